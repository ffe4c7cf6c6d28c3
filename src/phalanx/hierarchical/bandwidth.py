"""The bandwidth of the links of a group, measured when it is formed."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

from phalanx.hierarchical.execution import CHECK_INTERVAL, LEADER, MEASUREMENT_TAG
from phalanx.topology import Layout
from phalanx.topology.store_rendezvous import get_values
from phalanx.transports import Transfer, Transport, TransportError

_SIZES = (64 * 1024, 2**20)
"""The sizes of the messages in bytes; the first one opens the connection, and TCP's window."""
_KEY = "phalanx/bandwidth/{}"
_FAILED_KEY = "phalanx/bandwidth/failed"


def measure_slowest(
    transport: Transport,
    layout: Layout,
    store: Store,
    end: float,
    check: Callable[[], None] | None,
) -> float:
    """Return the bandwidth of the slowest link between hosts in bytes per second.

    Each host sends to the next one while it receives from the one before: all links are busy, as in
    a collective. Collective; all ranks get the same number.

    Args:
        transport: This rank's end of the transport.
        layout: The ranks of the group by host.
        store: The group's store.
        end: The deadline, in seconds on the monotonic clock.
        check: A function that is called during all waits, and may raise to end them.

    Raises:
        TransportError: A rank was lost, as this rank or another one has seen.
        TimeoutError: It took too long.
    """
    if layout.local_rank == LEADER:
        try:
            rate = _measure(transport, layout, end, check)
        except (TimeoutError, TransportError) as error:
            store.compare_set(_FAILED_KEY, "", f"{error} (on rank {layout.rank})")
            raise
        store.set(_KEY.format(layout.host), repr(rate))
    keys = [_KEY.format(host) for host in range(len(layout.hosts))]
    while not store.check(keys):
        if store.check([_FAILED_KEY]):
            raise TransportError(-1, store.get(_FAILED_KEY).decode())
        _check(end, check)
        time.sleep(CHECK_INTERVAL)
    return min(float(each) for each in get_values(store, keys))


def _measure(
    transport: Transport, layout: Layout, end: float, check: Callable[[], None] | None
) -> float:
    hosts = len(layout.hosts)
    ahead = layout.leaders[(layout.host + 1) % hosts]
    behind = layout.leaders[layout.host - 1]
    rate = 0.0
    for size in _SIZES:
        begin = time.monotonic()
        received = transport.recv(memoryview(bytearray(size)), behind, MEASUREMENT_TAG)
        sent = transport.send(memoryview(bytearray(size)), ahead, MEASUREMENT_TAG)
        _wait(received, end, check)
        rate = size / max(time.monotonic() - begin, 1e-9)
        _wait(sent, end, check)
    return rate


def _wait(transfer: Transfer, end: float, check: Callable[[], None] | None) -> None:
    while not transfer.wait(CHECK_INTERVAL):
        _check(end, check)


def _check(end: float, check: Callable[[], None] | None) -> None:
    if check is not None:
        check()
    if time.monotonic() >= end:
        raise TimeoutError("the bandwidth of the links could not be measured in time")
