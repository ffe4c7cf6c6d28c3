"""Groups that span hosts: what is made once it is known who shares one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from phalanx import engines, topology
from phalanx.backend.failure import HostsWords
from phalanx.errors import PhalanxError, UsageError
from phalanx.hosts import HostsGroup

if TYPE_CHECKING:
    from datetime import timedelta

__all__ = ["spanning"]

_COUNT, _OPEN = "phalanx/engines", "phalanx/open"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05


def spanning(
    local: Any,
    layout: topology.Layout,
    places: list[topology.Place],
    store: Any,
    engine: str,
    timeout: timedelta,
) -> Any:
    """A group of several hosts, in the place of the native one of this host.

    Blocks until all ranks have opened their ends of the engine.

    Raises:
        UsageError: This machine has no such interface, or has not what the engine needs.
        PhalanxError: The engine can't be had here or on another rank, or that one didn't come.
    """
    try:
        opened = _opened(layout, places, store, engine, timeout)
    except BaseException:
        local.close()
        raise
    group: Any = HostsGroup(local, layout, places, store, opened, HostsWords(lambda: group))
    return group


def _opened(
    layout: topology.Layout,
    places: list[topology.Place],
    store: Any,
    engine: str,
    timeout: timedelta,
) -> engines.Engine:
    end = time.monotonic() + timeout.total_seconds()
    this = f"rank {layout.rank}/{layout.size}"
    where = dist.PrefixStore("phalanx/engine", store)  # type: ignore[attr-defined]
    try:
        address = topology.own_address(store, places)
        made = engines.open_engine(engine, where, layout.rank, layout.size, address)
    except (engines.EngineError, UsageError) as error:
        words = f"the engine {engine} can't be had: {error}"
        store.compare_set(_OPEN, "", f"on rank {layout.rank} {words}")
        if isinstance(error, UsageError):
            raise
        raise PhalanxError(f"[{this}] {words}") from None
    try:
        _all_open(store, layout.size, this, end)
    except BaseException:
        made.abort()
        made.close()
        raise
    return made


def _all_open(store: Any, size: int, this: str, end: float) -> None:
    """Wait until all ranks have an engine; one that has none says so to all."""
    if store.add(_COUNT, 1) == size:
        store.compare_set(_OPEN, "", "all")
    pause = _FIRST_PAUSE
    while not store.check([_OPEN]):
        if time.monotonic() > end:
            raise PhalanxError(f"[{this}] not all ranks have opened their engines in time")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    said = store.get(_OPEN).decode()
    if said != "all":
        raise PhalanxError(f"[{this}] {said}")
