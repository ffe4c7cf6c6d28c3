"""Measurement of messages between two ranks of one host, sent by `torch.distributed`."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from phalanx.doctor.peers.tcp_probe import LinkMeasurement

__all__ = ["exchange"]

_TRIP_BYTES = 64
_TRIPS = 200
_WARM_TRIPS = 5
_BLOCK_BYTES = 8 << 20
_BLOCKS = 8


def exchange(peer: int, *, first: bool) -> LinkMeasurement:
    """Measure the link with a rank, which calls this too; takes a fraction of a second.

    Args:
        peer: The other rank.
        first: Whether this rank sends first. The peer passes the opposite value.

    Returns:
        The median round-trip time, and the bandwidth of messages received from the peer.

    Raises:
        PhalanxError: The peer does not arrive, or is lost.
    """
    small = torch.zeros(_TRIP_BYTES, dtype=torch.uint8)
    times = []
    for _ in range(_TRIPS):
        start = time.perf_counter()
        _transfer(small, peer, is_sender=first)
        _transfer(small, peer, is_sender=not first)
        times.append(time.perf_counter() - start)
    latency = statistics.median(times[_WARM_TRIPS:])
    block = torch.ones(_BLOCK_BYTES, dtype=torch.uint8)
    bandwidth = 0.0
    for is_sender in (first, not first):
        _transfer(
            block, peer, is_sender=is_sender
        )  # page faults of the first transfer are not timed
        start = time.perf_counter()
        for _ in range(_BLOCKS):
            _transfer(block, peer, is_sender=is_sender)
        if not is_sender:
            bandwidth = _BLOCKS * _BLOCK_BYTES / (time.perf_counter() - start)
    return LinkMeasurement(latency, bandwidth)


def _transfer(tensor: torch.Tensor, peer: int, *, is_sender: bool) -> None:
    if is_sender:
        dist.send(tensor, peer)
    else:
        dist.recv(tensor, peer)
