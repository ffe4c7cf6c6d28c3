"""Two hosts over TCP: the one that answers, and the one that measures.

A connection begins with the token of this examination; without it nothing is answered. Then it is
for round trips, or for a flow from who measures to who answers, which counts what arrives: what has
been handed to the kernel hasn't crossed anything yet.
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

__all__ = ["TOKEN_BYTES", "Answering", "Measured", "Unreached", "measure"]

CONNECT_SECONDS = 3.0
"""How long a connection may take to come about."""
TOKEN_BYTES = 32
_TRIP, _FLOW = b"t", b"f"
_TRIP_BYTES = 64
_TRIPS = 300
_WARM_TRIPS = 5
_TRIP_SECONDS = 0.5
_BLOCK = bytes(1 << 20)
# TCP finds its pace first: that isn't counted.
_WARM_SECONDS = 0.15
_FLOW_SECONDS = 0.5
_SILENT_SECONDS = 3.0
_COUNT = struct.Struct("<Qd")


class Measured(NamedTuple):
    """Of one way between two hosts."""

    latency: float
    """Median round trip of 64 bytes, in seconds."""
    bandwidth: float
    """Of one connection, in bytes per second."""


class Unreached(Exception):  # noqa: N818 - a result, not an error
    """The other host can't be reached, or not with more than small packets: why."""


class Answering:
    """Answers whoever measures, in threads, until closed.

    Args:
        address: Where to listen: nowhere else.
        token: What the others know: 32 bytes.

    Raises:
        OSError: It can't be listened there.
    """

    def __init__(self, address: str, token: bytes) -> None:
        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, EOFError):  # its own business
                    _answer(self.request, token)

        kind = socket.AF_INET6 if ":" in address else socket.AF_INET

        class Server(socketserver.ThreadingTCPServer):
            address_family = kind
            daemon_threads = True

        self._server = Server((address, 0), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.shutdown()
        self._server.server_close()


def measure(address: str, port: int, token: bytes) -> Measured:
    """Measure the way to a host that answers; takes one to two seconds, ten at most.

    Raises:
        Unreached: There is no connection, or data don't come through it.
    """
    with _connected(address, port) as trips:
        latency = _trips(trips, token)
    with _connected(address, port) as flow:
        return Measured(latency, _flow(flow, token))


def _connected(address: str, port: int) -> socket.socket:
    try:
        made = socket.create_connection((address, port), CONNECT_SECONDS)
    except TimeoutError:
        raise Unreached(f"no answer from {address} within {CONNECT_SECONDS:g} s") from None
    except OSError as error:
        raise Unreached(f"{address}: {error.strerror or error}") from None
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.settimeout(_SILENT_SECONDS)
    return made


def _trips(to: socket.socket, token: bytes) -> float:
    times: list[float] = []
    end = time.monotonic() + _TRIP_SECONDS
    try:
        to.sendall(token + _TRIP)
        while len(times) < _TRIPS and (len(times) <= _WARM_TRIPS or time.monotonic() < end):
            start = time.perf_counter()
            to.sendall(_BLOCK[:_TRIP_BYTES])
            _exactly(to, _TRIP_BYTES)
            times.append(time.perf_counter() - start)
    except (OSError, EOFError) as error:
        raise Unreached(f"connected, but small packets get no answer ({error})") from None
    return statistics.median(times[_WARM_TRIPS:])


def _flow(to: socket.socket, token: bytes) -> float:
    """Send until the other has counted enough; who counts says how much came in what time."""
    end = time.monotonic() + _FLOW_SECONDS + _WARM_SECONDS + 2 * _SILENT_SECONDS
    try:
        to.sendall(token + _FLOW)
        to.setblocking(False)
        while (left := end - time.monotonic()) > 0:
            counted, free, _ = select.select([to], [to], [], left)
            if counted:
                to.settimeout(_SILENT_SECONDS)
                count, seconds = _COUNT.unpack(_exactly(to, _COUNT.size))
                if count:
                    return float(count / seconds)
                break
            if free:
                to.send(_BLOCK)
    except (OSError, EOFError) as error:
        raise Unreached(f"connected, but the connection broke under load ({error})") from None
    finally:
        # What is still on its way needn't arrive.
        to.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raise Unreached(
        "small packets pass, large ones don't: is the MTU of an interface larger than the network "
        "between carries?"
    )


def _answer(peer: socket.socket, token: bytes) -> None:
    peer.settimeout(_SILENT_SECONDS)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not hmac.compare_digest(_exactly(peer, TOKEN_BYTES), token):
        return
    if _exactly(peer, 1) == _TRIP:
        while True:
            peer.sendall(_exactly(peer, _TRIP_BYTES))
    _count(peer)


def _count(peer: socket.socket) -> None:
    buffer = bytearray(1 << 20)
    start = time.perf_counter()
    warm = start + _WARM_SECONDS
    total, begin, now = 0, start, start
    try:
        while now < warm + _FLOW_SECONDS:
            got = peer.recv_into(buffer)
            now = time.perf_counter()
            if not got:
                return
            if now < warm:
                begin = now
            else:
                total += got
    except TimeoutError:
        total = 0
    peer.sendall(_COUNT.pack(total, now - begin))
    while peer.recv_into(buffer):  # else the answer could be lost with what wasn't read
        pass


def _exactly(peer: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        part = peer.recv(size - len(got))
        if not part:
            raise EOFError("closed by the other side")
        got += part
    return got
