"""The setup of groups that span hosts, once the ranks of each host are known."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from phalanx import topology, transports
from phalanx.backend.failure import FailureFormatter
from phalanx.errors import PhalanxError, UsageError
from phalanx.hierarchical import HierarchicalGroup
from phalanx.system.polling import attempts

if TYPE_CHECKING:
    from datetime import timedelta

__all__ = ["form_multihost_group"]

_COUNT, _OPEN = "phalanx/transports", "phalanx/open"


def form_multihost_group(
    local: Any,
    layout: topology.Layout,
    rank_records: list[topology.RankRecord],
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
        opened = _open_transport(layout, rank_records, store, transport, timeout)
    except BaseException:
        local.close()
        raise
    group: Any = HierarchicalGroup(
        local, layout, rank_records, store, opened, FailureFormatter(lambda: group)
    )
    return group


def _open_transport(
    layout: topology.Layout,
    rank_records: list[topology.RankRecord],
    store: Any,
    transport: str,
    timeout: timedelta,
) -> transports.Transport:
    end = time.monotonic() + timeout.total_seconds()
    rank_label = f"rank {layout.rank}/{layout.size}"
    transport_store = dist.PrefixStore("phalanx/transport", store)  # type: ignore[attr-defined]
    try:
        address = topology.own_address(store, rank_records)
        opened = transports.open_transport(
            transport, transport_store, layout.rank, layout.size, address
        )
    except (transports.TransportError, UsageError) as error:
        reason = f"the transport {transport} is not available: {error}"
        store.compare_set(_OPEN, "", f"on rank {layout.rank} {reason}")
        if isinstance(error, UsageError):
            raise
        raise PhalanxError(f"[{rank_label}] {reason}") from None
    try:
        _wait_until_all_open(store, layout.size, rank_label, end)
    except BaseException:
        opened.abort()
        opened.close()
        raise
    return opened


def _wait_until_all_open(store: Any, size: int, rank_label: str, end: float) -> None:
    """Wait until all ranks have opened their transports; raise if one could not."""
    if store.add(_COUNT, 1) == size:
        store.compare_set(_OPEN, "", "all")
    for _ in attempts(end):
        if store.check([_OPEN]):
            break
    else:
        raise PhalanxError(f"[{rank_label}] not all ranks have opened their transports in time")
    outcome = store.get(_OPEN).decode()
    if outcome != "all":
        raise PhalanxError(f"[{rank_label}] {outcome}")
