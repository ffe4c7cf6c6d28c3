"""Bringing the ranks of a group into one segment, through the group's store."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed import DistError, HashStore  # type: ignore[attr-defined]

from phalanx import _native
from phalanx.errors import CollectiveTimeout, PhalanxError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import timedelta

    from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

_MOST_TOLD = 8
"""Of so many ranks that don't come an error says what is known."""


def join(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    name: str = "",
    members: Sequence[int] = (),
    where: Callable[[int, str], str] | None = None,
) -> _native.Group:
    """Enter the group as `rank` of `size`; blocks until all ranks have entered.

    Rank 0 creates the segment and publishes where it is; the others open it and prove by its nonce
    that it is the same memory. No rank is in before all are: a failure on one is
    raised on all.

    Args:
        store: The group's store. Keys begin with "phalanx/".
        rank: This process's rank in the group.
        size: World size of the group.
        timeout: How long to wait for the others.
        name: The group's name, for the black box.
        members: Ranks in the job by rank in the group, for the black box; all, if there are none.
        where: What is known of a rank of the group that doesn't come, a sentence without its
            subject, or nothing. It is given the rank, and the process that has claimed it, as in
            "pid 812 on node-a"; empty, if none has.

    Raises:
        UsageError: The rank doesn't fit the world size, or another process has claimed it.
        CollectiveTimeout: Ranks that didn't come in time are named, with what is known of them.
        PhalanxError: A rank could not open the segment, for the reason given.
    """
    _check_place(rank, size)
    if size == 1:
        # There is nobody to meet, and PyTorch gives the groups of one rank that `new_subgroups`
        # makes inside of different groups the same place in the store.
        store = HashStore()
    wait = _Wait(store, time.monotonic(), timeout.total_seconds(), where)
    joining = _native.Joining(name, rank, size, ranges(members or range(size)))
    try:
        _claim(store, rank, size)
        group = _enter(store, rank, size, wait, joining)
    except BaseException as error:
        joining.end(_outcome(error))
        raise
    joining.end("ok")
    return group


def _outcome(error: BaseException) -> str:
    """What the black box says of a group that `error` kept from being formed."""
    if isinstance(error, CollectiveTimeout):
        return "timeout"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "system"


@dataclass(frozen=True)
class _Wait:
    """How long a rank waits for the others, and how it learns what is known of them."""

    store: Store
    start: float
    seconds: float
    where: Callable[[int, str], str] | None

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.start + self.seconds

    def told(self, ranks: Sequence[int]) -> str:
        """What is known of ranks that have not come."""
        if self.where is None:
            return ""
        known = [(rank, self.where(rank, self._holder(rank))) for rank in ranks[:_MOST_TOLD]]
        return "".join(f"; rank {rank} {words}" for rank, words in known if words)

    def _holder(self, rank: int) -> str:
        with contextlib.suppress(DistError):  # who hosts the store may be gone
            if self.store.check([f"phalanx/rank/{rank}"]):
                holder: str = self.store.get(f"phalanx/rank/{rank}").decode()
                return holder.rsplit(" ", 1)[0]
        return ""


def ranges(numbers: Sequence[int]) -> str:
    """Ranks in the order given, runs of them as ranges: "0-3,6"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def _enter(
    store: Store, rank: int, size: int, wait: _Wait, joining: _native.Joining
) -> _native.Group:
    try:
        if rank == 0:
            group = _create(store, size, joining.note)
        else:
            group = _open(store, rank, size, wait, joining)
    except OSError as error:
        # Before the others hear of it: who failed first is the cause.
        joining.end("system")
        store.set("phalanx/failed", f"rank {rank} could not join: {error.args[0]}")
        raise PhalanxError(f"[rank {rank}/{size}] could not join: {error.args[0]}") from None
    _wait_for_all(store, group, rank, size, wait, joining)
    if (status := group.connect()) is not None:
        raise PhalanxError(
            f"[rank {rank}/{size}] could not watch the process of rank {status.peer}: "
            f"{os.strerror(status.error) if status.error else status.code}"
        )
    return group


def _check_place(rank: int, size: int) -> None:
    if size < 1 or size > _native.MAX_RANKS:
        raise UsageError(f"world size {size}: expected 1 to {_native.MAX_RANKS}")
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} in a group of {size}: expected 0 to {size - 1}")


def _claim(store: Store, rank: int, size: int) -> None:
    """Make this process the one that is `rank`."""
    own = f"pid {os.getpid()} on {socket.gethostname()} ({secrets.token_hex(4)})"
    holder = store.compare_set(f"phalanx/rank/{rank}", "", own).decode()
    if holder != own:
        raise UsageError(
            f"rank {rank} of {size} is taken already by {holder.rsplit(' ', 1)[0]}: "
            "give each process a rank of its own, and each run a store (port or file) of its own"
        )


def _create(store: Store, size: int, note: int) -> _native.Group:
    nonce = secrets.randbits(64)
    try:
        group = _native.Group.create(size, 0, nonce, note)
    except OSError as error:
        raise OSError(f"no shared memory for {size} ranks ({error.strerror})") from None
    where = {
        "pid": os.getpid(),
        "descriptor": group.descriptor,
        "nonce": nonce,
        "layout": _native.LAYOUT_VERSION,
        "size": size,
        "host": socket.gethostname(),
    }
    store.set("phalanx/segment", json.dumps(where))
    return group


def _open(
    store: Store, rank: int, size: int, wait: _Wait, joining: _native.Joining
) -> _native.Group:
    joining.waiting_for(0)
    for _ in _tries(rank, size, wait, lambda: [0]):
        _raise_failure(store, rank, size)
        if store.check(["phalanx/segment"]):
            break
    where = json.loads(store.get("phalanx/segment"))
    if where["layout"] != _native.LAYOUT_VERSION:
        raise OSError(
            f"rank 0 runs a Phalanx with layout version {where['layout']}, this rank one with "
            f"{_native.LAYOUT_VERSION}: install the same version everywhere"
        )
    if where["size"] != size:
        raise OSError(
            f"rank 0 was started with world size {where['size']}, this rank with {size}: "
            "give all ranks the same"
        )
    try:
        return _native.Group.open(
            where["pid"], where["descriptor"], size, rank, where["nonce"], joining.note
        )
    except OSError as error:
        raise OSError(
            f"process {os.getpid()} on {socket.gethostname()} can't open the segment of process "
            f"{where['pid']} on {where['host']} ({error.strerror}): the ranks don't share a host "
            "(or a pid namespace, or a user), and this version joins only ranks that do"
        ) from None


def _wait_for_all(
    store: Store,
    group: _native.Group,
    rank: int,
    size: int,
    wait: _Wait,
    joining: _native.Joining,
) -> None:
    """Wait until all ranks are present in the segment.

    The store is asked only for failures: rank 0, which may host it, may be done and gone by the
    time that a rank looks again.
    """
    for _ in _tries(rank, size, wait, group.absent):
        absent = group.absent()
        if not absent:
            return
        joining.waiting_for(absent[0])
        try:
            _raise_failure(store, rank, size)
        except DistError:
            if group.absent():
                raise


def _raise_failure(store: Store, rank: int, size: int) -> None:
    if store.check(["phalanx/failed"]):
        reason = store.get("phalanx/failed").decode()
        raise PhalanxError(f"[rank {rank}/{size}] {reason}")


def _tries(rank: int, size: int, wait: _Wait, missing: Callable[[], list[int]]) -> Iterator[None]:
    """Look again and again, until the deadline: a blocking wait would not hear Ctrl-C."""
    pause = 0.0005
    while not wait.over:
        yield
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    absent = missing()
    ranks = ", ".join(map(str, absent))
    raise CollectiveTimeout(
        f"[rank {rank}/{size} on {socket.gethostname()}] joining the group: rank {ranks} did not "
        f"come before the deadline, in the {wait.seconds:g} s since this rank came"
        f"{wait.told(absent)}: are all processes started, with the same world size and address?"
    )
