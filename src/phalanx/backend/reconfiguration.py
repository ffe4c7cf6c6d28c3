"""Groups that get other ranks by PyTorch's own call, `ProcessGroup.reconfigure` (PyTorch 2.14).

The caller exchanges the handles of the processes, and decides which of them form the group from now
on. Manager and elastic loops that PyTorch's users know, such as torchft's, stand on this call.
With `phalanx.shrink`, the ranks themselves find out which of them are left.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from phalanx.errors import UsageError
from phalanx.torch_versions import world


class Reconfiguration:
    """The handle of this process in a group, and the changes of the group's ranks by handles.

    Args:
        group: The process group, a `process_group.ProcessGroup`.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._used: set[int] = set()

    @cached_property
    def handle(self) -> str:
        """The text by which this process is named; the same as long as it has the group."""
        group = self._group
        own = {
            "rank": group.job_ranks[group.rank()],
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "nonce": secrets.token_hex(8),
        }
        return json.dumps(own)

    def run(self, opts: Any) -> None:
        """Continue with the ranks that the handles name; blocks until all of them have called it.

        If this fails, the group stays as it was, and the call can be repeated with a new uuid.

        Args:
            opts: PyTorch's `ReconfigureOptions`: a `uuid` that was not used before, the same on all
                ranks; the `handles`, by rank if they are a list; and a `timeout`, by default that
                of the group. `hints` are ignored.

        Raises:
            UsageError: The uuid was used before, or the handles lack this process or are not those
                of processes.
            CollectiveTimeout: A rank did not call it in time.
            PhalanxError: A rank could not join, for the reason given.
        """
        group, handles = self._group, _check_handles(opts.handles, self.handle)
        if opts.uuid in self._used:
            raise UsageError(f"reconfigure: uuid {opts.uuid} was already used: give a new one")
        self._used.add(opts.uuid)
        rank, job_ranks = handles.index(self.handle), [json.loads(each)["rank"] for each in handles]
        timeout = opts.timeout or timedelta(seconds=group._membership.timeout)
        store = PrefixStore(f"phalanx/reconfigured/{opts.uuid}", group.base_store)
        formed = group.form(store, rank, len(handles), timeout, job_ranks)
        members = self._members(job_ranks)
        group.change_ranks(formed, rank, members)
        world().pg_group_ranks[group] = {each: number for number, each in enumerate(members)}

    def _members(self, job_ranks: Sequence[int]) -> Sequence[int]:
        """Return the ranks as numbers in the default group, which may have changed too."""
        default = dist.group.WORLD
        if self._group is default:
            return range(len(job_ranks))
        numbers = getattr(default, "job_ranks", ())
        return [numbers.index(each) if each in numbers else each for each in job_ranks]


def _check_handles(handles: Any, own: str) -> list[str]:
    """Return the handles by rank."""
    if not isinstance(handles, (set, list)) or not all(isinstance(each, str) for each in handles):
        raise UsageError(f"reconfigure: handles is {handles!r}, expected a set or list of str")
    by_rank = sorted(handles, key=_sort_key) if isinstance(handles, set) else handles
    list(map(_sort_key, by_rank))
    if own not in by_rank:
        raise UsageError(
            f"reconfigure: handles is {handles!r}, without the handle of this process, {own!r}: "
            "only the processes that are named call it"
        )
    if len(set(by_rank)) != len(by_rank):
        raise UsageError(f"reconfigure: handles is {handles!r}, expected each of them once")
    return by_rank


def _sort_key(handle: str) -> tuple[int, str]:
    try:
        return json.loads(handle)["rank"], handle
    except (ValueError, TypeError, KeyError):
        raise UsageError(
            f"reconfigure: got the handle {handle!r}, expected a result of get_reconfigure_handle()"
        ) from None
