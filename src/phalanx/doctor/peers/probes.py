"""Measurements of one pair: over TCP between two hosts, and by messages between ranks of a host.

A TCP connection begins with the token of this measurement; the server closes connections without
it. The connection then serves either round trips or a flow from the client to the server. The
server counts the bytes of a flow as they arrive, since bytes that the client has handed to its
kernel may not have crossed the network yet.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import socketserver
import statistics
import struct
import threading
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

CONNECT_SECONDS = 3.0
"""Seconds until an attempt to connect fails."""
TOKEN_BYTES = 32
_TRIP, _FLOW = b"t", b"f"
_TRIP_BYTES = 64
_TRIPS = 300
_WARM_TRIPS = 5
_TRIP_SECONDS = 0.5
_BLOCK = bytes(1 << 20)
# Seconds of TCP slow start, which are not counted.
_WARM_SECONDS = 0.15
_FLOW_SECONDS = 0.5
_SILENT_SECONDS = 3.0
_COUNT = struct.Struct("<Qd")
_MEMORY_TRIPS = 200
_BLOCK_BYTES = 8 << 20
_BLOCKS = 8


class LinkMeasurement(NamedTuple):
    """The measurements of a one-way link."""

    latency: float
    """Median round-trip time of 64 bytes, in seconds."""
    bandwidth: float
    """Bandwidth of one connection, in bytes per second."""


class UnreachableError(Exception):
    """The other host can't be reached, or only small packets reach it; the message says why."""


class ProbeServer:
    """A server for measurements from other hosts, in threads, until it is closed.

    Args:
        address: The only address at which the server listens.
        token: Secret of 32 bytes that clients must send.

    Raises:
        OSError: The server can't listen at the address.
    """

    def __init__(self, address: str, token: bytes) -> None:
        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, EOFError):  # the client reports errors
                    _serve(self.request, token)

        kind = socket.AF_INET6 if ":" in address else socket.AF_INET

        class Server(socketserver.ThreadingTCPServer):
            address_family = kind
            daemon_threads = True

        self._server = Server((address, 0), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()


def measure(address: str, port: int, token: bytes) -> LinkMeasurement:
    """Measure the link to a host that runs a `ProbeServer`.

    Takes one to two seconds, or about ten if the network drops packets.

    Raises:
        UnreachableError: There is no connection, or data does not pass through it.
    """
    with _connect(address, port) as trips:
        latency = _measure_latency(trips, token)
    with _connect(address, port) as flow:
        return LinkMeasurement(latency, _measure_bandwidth(flow, token))


def _connect(address: str, port: int) -> socket.socket:
    try:
        connection = socket.create_connection((address, port), CONNECT_SECONDS)
    except TimeoutError:
        raise UnreachableError(f"no answer from {address} within {CONNECT_SECONDS:g} s") from None
    except OSError as error:
        raise UnreachableError(f"{address}: {error.strerror or error}") from None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(_SILENT_SECONDS)
    return connection


def _measure_latency(connection: socket.socket, token: bytes) -> float:
    times: list[float] = []
    end = time.monotonic() + _TRIP_SECONDS
    try:
        connection.sendall(token + _TRIP)
        while len(times) < _TRIPS and (len(times) <= _WARM_TRIPS or time.monotonic() < end):
            start = time.perf_counter()
            connection.sendall(_BLOCK[:_TRIP_BYTES])
            _receive_exactly(connection, _TRIP_BYTES)
            times.append(time.perf_counter() - start)
    except (OSError, EOFError) as error:
        raise UnreachableError(f"connected, but small packets get no answer ({error})") from None
    return statistics.median(times[_WARM_TRIPS:])


def _measure_bandwidth(connection: socket.socket, token: bytes) -> float:
    """Send until the server reports the bytes counted and their time; return bytes per second."""
    end = time.monotonic() + _FLOW_SECONDS + _WARM_SECONDS + 2 * _SILENT_SECONDS
    try:
        connection.sendall(token + _FLOW)
        connection.setblocking(False)
        while (remaining := end - time.monotonic()) > 0:
            readable, writable, _ = select.select([connection], [connection], [], remaining)
            if readable:
                connection.settimeout(_SILENT_SECONDS)
                count, seconds = _COUNT.unpack(_receive_exactly(connection, _COUNT.size))
                if count:
                    return float(count / seconds)
                break
            if writable:
                connection.send(_BLOCK)
    except (OSError, EOFError) as error:
        raise UnreachableError(
            f"connected, but the connection broke under load ({error})"
        ) from None
    finally:
        # Data still in flight need not arrive: closing resets the connection.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raise UnreachableError(
        "small packets pass, but large packets do not: the MTU of an interface may be larger than "
        "the network between supports"
    )


def _serve(peer: socket.socket, token: bytes) -> None:
    peer.settimeout(_SILENT_SECONDS)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not hmac.compare_digest(_receive_exactly(peer, TOKEN_BYTES), token):
        return
    if _receive_exactly(peer, 1) == _TRIP:
        while True:
            peer.sendall(_receive_exactly(peer, _TRIP_BYTES))
    _count_flow(peer)


def _count_flow(peer: socket.socket) -> None:
    buffer = bytearray(1 << 20)
    start = time.perf_counter()
    warm = start + _WARM_SECONDS
    total, begin, now = 0, start, start
    try:
        while now < warm + _FLOW_SECONDS:
            received = peer.recv_into(buffer)
            now = time.perf_counter()
            if not received:
                return
            if now < warm:
                begin = now
            else:
                total += received
    except TimeoutError:
        total = 0
    peer.sendall(_COUNT.pack(total, now - begin))
    while peer.recv_into(buffer):  # closing with unread data could discard the answer
        pass


def _receive_exactly(peer: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = peer.recv(size - len(received))
        if not part:
            raise EOFError("closed by the peer")
        received += part
    return received


def measure_memory(peer: int, *, first: bool) -> LinkMeasurement:
    """Measure messages of `torch.distributed` with a rank of this host, which calls this too.

    Takes a fraction of a second.

    Args:
        peer: The other rank.
        first: Whether this rank sends first. The peer passes the opposite value.

    Returns:
        The median round-trip time, and the bandwidth of messages received from the peer.

    Raises:
        PhalanxError: The peer does not arrive, or is lost.
    """
    small = torch.zeros(_TRIP_BYTES, dtype=torch.uint8, device="cpu")
    times = []
    for _ in range(_MEMORY_TRIPS):
        start = time.perf_counter()
        _transfer(small, peer, is_sender=first)
        _transfer(small, peer, is_sender=not first)
        times.append(time.perf_counter() - start)
    latency = statistics.median(times[_WARM_TRIPS:])
    block = torch.ones(_BLOCK_BYTES, dtype=torch.uint8, device="cpu")
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
