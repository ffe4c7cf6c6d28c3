"""The setup of groups that span hosts, once the ranks of each host are known."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from phalanx import topology, transports
from phalanx.backend.failure import HostsWords
from phalanx.errors import PhalanxError, UsageError
from phalanx.hierarchical import HostsGroup
from phalanx.system.polling import attempts

if TYPE_CHECKING:
    from datetime import timedelta

__all__ = ["spanning"]

_COUNT, _OPEN = "phalanx/transports", "phalanx/open"


def spanning(
    local: Any,
    layout: topology.Layout,
    places: list[topology.RankRecord],
    store: Any,
    transport: str,
    timeout: timedelta,
) -> Any:
    """Return a group of several hosts, which takes the place of the native group of this host.

    Blocks until all ranks have opened their transports.

    Raises:
        UsageError: This machine has no such interface, or lacks something that the transport needs.
        PhalanxError: The transport cannot be opened here or on another rank, or a rank did not open
            its transport in time.
    """
    try:
        opened = _opened(layout, places, store, transport, timeout)
    except BaseException:
        local.close()
        raise
    group: Any = HostsGroup(local, layout, places, store, opened, HostsWords(lambda: group))
    return group


def _opened(
    layout: topology.Layout,
    places: list[topology.RankRecord],
    store: Any,
    transport: str,
    timeout: timedelta,
) -> transports.Transport:
    end = time.monotonic() + timeout.total_seconds()
    this = f"rank {layout.rank}/{layout.size}"
    where = dist.PrefixStore("phalanx/transport", store)  # type: ignore[attr-defined]
    try:
        address = topology.own_address(store, places)
        made = transports.open_transport(transport, where, layout.rank, layout.size, address)
    except (transports.TransportError, UsageError) as error:
        words = f"the transport {transport} can't be had: {error}"
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
    """Wait until all ranks have opened their transports; raise if one could not."""
    if store.add(_COUNT, 1) == size:
        store.compare_set(_OPEN, "", "all")
    for _ in attempts(end):
        if store.check([_OPEN]):
            break
    else:
        raise PhalanxError(f"[{this}] not all ranks have opened their transports in time")
    said = store.get(_OPEN).decode()
    if said != "all":
        raise PhalanxError(f"[{this}] {said}")
