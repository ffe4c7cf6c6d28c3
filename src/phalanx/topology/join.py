"""Bringing the ranks of a group into one segment, through the group's store."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from typing import TYPE_CHECKING

from phalanx import _native
from phalanx.errors import CollectiveTimeout, PhalanxError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import timedelta

    from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time


def join(store: Store, rank: int, size: int, timeout: timedelta) -> _native.Group:
    """Enter the group as `rank` of `size`; blocks until all ranks have entered.

    Rank 0 creates the segment and publishes where it is; the others open it and prove by its nonce
    that it is the same memory. No rank is in before all are: an error on one is raised on all.

    Args:
        store: The group's store. Keys begin with "phalanx/".
        rank: This process's rank in the group.
        size: World size of the group.
        timeout: How long to wait for the others.

    Raises:
        UsageError: The rank doesn't fit the world size, or another process has claimed it.
        CollectiveTimeout: Ranks that didn't come in time are named.
        PhalanxError: A rank could not open the segment, for the reason given.
    """
    _check_place(rank, size)
    deadline = time.monotonic() + timeout.total_seconds()
    _claim(store, rank, size)
    group, error = _create(store, size) if rank == 0 else _open(store, rank, size, deadline)
    store.set(f"phalanx/attached/{rank}", error)
    keys = [f"phalanx/attached/{peer}" for peer in range(size)]
    _wait(store, keys, rank, size, deadline)
    for peer, key in enumerate(keys):
        if text := store.get(key).decode():
            raise PhalanxError(f"[rank {rank}/{size}] rank {peer} could not join: {text}")
    assert group is not None  # its error would have been raised above
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


def _create(store: Store, size: int) -> tuple[_native.Group | None, str]:
    """The group, or why there is none."""
    nonce = secrets.randbits(64)
    try:
        group = _native.Group.create(size, 0, nonce)
    except OSError as error:
        reason = f"no shared memory for {size} ranks ({error.strerror})"
        store.set("phalanx/segment", json.dumps({"error": reason}))
        return None, reason
    where = {
        "pid": os.getpid(),
        "descriptor": group.descriptor,
        "nonce": nonce,
        "layout": _native.LAYOUT_VERSION,
        "host": socket.gethostname(),
    }
    store.set("phalanx/segment", json.dumps(where))
    return group, ""


def _open(store: Store, rank: int, size: int, deadline: float) -> tuple[_native.Group | None, str]:
    """The group, or why there is none."""
    _wait(store, ["phalanx/segment"], rank, size, deadline)
    where = json.loads(store.get("phalanx/segment"))
    if "error" in where:
        return None, f"rank 0 has {where['error']}"
    if where["layout"] != _native.LAYOUT_VERSION:
        return None, (
            f"rank 0 runs a Phalanx with layout version {where['layout']}, this rank one with "
            f"{_native.LAYOUT_VERSION}: install the same version everywhere"
        )
    try:
        return _native.Group.open(where["pid"], where["descriptor"], size, rank, where["nonce"]), ""
    except OSError as error:
        return None, (
            f"process {os.getpid()} on {socket.gethostname()} can't open the segment of process "
            f"{where['pid']} on {where['host']} ({error.strerror}): the ranks don't share a host "
            "(or a pid namespace, or a user), and this version joins only ranks that do"
        )


def _wait(store: Store, keys: Iterable[str], rank: int, size: int, deadline: float) -> None:
    """Wait for keys by looking again and again: a blocking wait would not hear Ctrl-C."""
    missing = list(keys)
    pause = 0.0005
    while missing := [key for key in missing if not store.check([key])]:
        if time.monotonic() >= deadline:
            ranks = ", ".join(key.removeprefix("phalanx/attached/") for key in missing)
            who = "rank 0" if missing == ["phalanx/segment"] else f"rank {ranks}"
            raise CollectiveTimeout(
                f"[rank {rank}/{size} on {socket.gethostname()}] joining the group: {who} did not "
                "come before the deadline: are all processes started, with the same world size "
                "and address?"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
