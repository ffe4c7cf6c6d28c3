"""The relay: it maps ranks to processes and forwards their frames.

It stores no messages, except those that a rank has left for another that has not joined yet. Frames
for a process that is gone are dropped. Sender and receiver limit the data in flight between
themselves, so a slow receiver does not fill the relay's memory. Only processes with the job's key
pass ZeroMQ's handshake. The relay detects the end of a process by the end of its connection;
missing heartbeats end a connection that is not closed otherwise.

The relay ends with the last rank that uses it, which may be long after the rank of its own process
has left.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Sequence

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from phalanx.system.curve import HANDSHAKE_FAILURES
from phalanx.system.polling import EventFd
from phalanx.transports.relay.protocol import (
    CONNECT_SECONDS,
    Frame,
    Kind,
    LeaveReason,
    client_key_pair,
    configure,
    server_key_pair,
)

_log = logging.getLogger("phalanx")

_ZAP = "inproc://zeromq.zap.01"  # ZeroMQ's fixed address for authentication requests
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILURES
_KINDS_TO_RELAY = (Kind.JOIN, Kind.SUBSCRIBE, Kind.LEAVE, Kind.PROBE)
_KINDS_FROM_RELAY = (Kind.PRESENT, Kind.GONE)
_BATCH = 256
"""The maximum number of frames that are forwarded before the connections are checked again."""


class RelayServer:
    """A relay in a thread.

    It runs until `close` is called, or until `end_when_unused` was called and no rank uses it.

    Args:
        key: The job's key.
        endpoint: The ZeroMQ endpoint to bind.

    Raises:
        zmq.ZMQError: The relay cannot bind the endpoint.
    """

    def __init__(self, key: bytes, endpoint: str) -> None:
        self._context = zmq.Context()
        self._key = key
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        configure(self._socket, endpoint, server_key_pair(key))
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """The endpoint to connect to."""
        self.channels = ChannelRegistry()
        """The ranks in all channels; only for the relay's thread."""
        self._connections: dict[int, bytes] = {}
        self._undelivered: dict[tuple[bytes, int], list[list[bytes | zmq.Frame]]] = {}
        """By channel and rank, the messages for a rank that has not joined yet."""
        self._warnings: set[str] = set()
        self._eventfd = EventFd()
        self._lock = threading.Lock()
        self._ends_when_unused = self._is_ending = False
        self._unused_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="phalanx-relay", daemon=True)
        self._thread.start()

    def end_when_unused(self) -> None:
        """End the relay when no rank is in a channel any more; return at once.

        Ranks that have not joined the channel of their group yet may do so for 20 s after the last
        rank has left.
        """
        with self._lock:
            self._ends_when_unused = True
            self._wake()

    def keep(self) -> bool:
        """Undo `end_when_unused`; return False if the relay has ended, or is about to end."""
        with self._lock:
            self._ends_when_unused = False
            return not self._is_ending

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the relay has ended; return False if it has not within `seconds`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop the relay; processes that are still connected lose their connection."""
        with self._lock:
            self._wake()
            self._is_ending = True
        self._thread.join()

    def _wake(self) -> None:
        if not self._is_ending:  # the thread closes the descriptor only after that
            self._eventfd.notify()

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._zap, self._eventfd):
            poller.register(source, zmq.POLLIN)
        while not self._must_end():
            ready = dict(poller.poll(self._poll_milliseconds()))
            if self._eventfd.fileno() in ready:
                self._eventfd.clear()
            if self._zap in ready:
                self._authenticate()
            if self._monitor in ready:
                self._check_monitor()
            elif self._socket in ready:
                self._forward()
        self._warn_of_undelivered()
        self._socket.disable_monitor()
        self._context.destroy(linger=0)
        self._eventfd.close()

    def _must_end(self) -> bool:
        with self._lock:
            if not self._ends_when_unused or self.channels.is_in_use:
                self._unused_since = None
            elif self._unused_since is None:
                self._unused_since = time.monotonic()
            if self._unused_since is not None and (
                not self.channels.expects_ranks or self._poll_milliseconds() == 0
            ):
                self._is_ending = True
            return self._is_ending

    def _poll_milliseconds(self) -> int | None:
        """Return the time that ranks have left to join an unused relay, or None."""
        if self._unused_since is None:
            return None
        remaining = self._unused_since + CONNECT_SECONDS - time.monotonic()
        return math.ceil(1000 * max(0.0, remaining))

    def _warn_of_undelivered(self) -> None:
        if self._undelivered:
            ranks = sorted({rank for _, rank in self._undelivered})
            _log.warning(
                "the relay at %s ends with %d messages that it could not deliver, since their "
                "receivers never joined: ranks %s of their groups",
                self.endpoint,
                sum(map(len, self._undelivered.values())),
                ", ".join(map(str, ranks)),
            )

    def _authenticate(self) -> None:
        """Answer ZeroMQ's authentication request for a client."""
        version, request, _domain, _address, _identity, mechanism, *credentials = (
            self._zap.recv_multipart()
        )
        is_valid = mechanism == b"CURVE" and credentials == [
            z85.decode(client_key_pair(self._key).public)
        ]
        status = (b"200", b"OK") if is_valid else (b"400", b"No")
        self._zap.send_multipart([version, request, *status, b"", b""])

    def _check_monitor(self) -> None:
        """Report processes whose connections have ended, after forwarding all their frames."""
        gone, unknown = [], set()
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            kind, number = event["event"], int(event["value"])
            if kind & HANDSHAKE_FAILURES:
                self._warn_once("rejected a connection without the job's key")
            elif kind == zmq.EVENT_ACCEPTED:
                unknown.discard(number)  # the descriptor now belongs to another connection
            elif number in self._connections:
                gone.append(self._connections.pop(number))
            else:
                unknown.add(number)
        while self._forward():
            pass
        gone += [self._connections.pop(each) for each in unknown if each in self._connections]
        for process in gone:
            for frame, target in self.channels.remove_process(process):
                self._send(target, [frame.pack()])

    def _forward(self) -> bool:
        """Forward up to `_BATCH` frames that have arrived; return whether there were any."""
        for number in range(_BATCH):
            try:
                sender, *parts = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return number > 0
            process = sender.bytes
            self._connections[int(sender.get(zmq.SRCFD))] = process
            try:
                self._handle_parts(process, parts)
            except ValueError as error:
                self._warn_once(f"a process sent an invalid frame ({error})")
        return True

    def _handle_parts(self, process: bytes, parts: Sequence[zmq.Frame]) -> None:
        if not 1 <= len(parts) <= 2:
            raise ValueError(f"{len(parts)} frames")
        frame = Frame.parse(parts[0].bytes)
        if frame.kind in _KINDS_FROM_RELAY:
            raise ValueError(f"{frame.kind.name} from a process")
        if frame.kind in _KINDS_TO_RELAY:
            for response, target in self.channels.handle_frame(process, frame):
                self._send(target, [response.pack()])
            if frame.kind is Kind.JOIN:
                for message in self._undelivered.pop((frame.channel, frame.peer), ()):
                    self._send(process, message)
        elif (rank := self.channels.rank_of(process, frame.channel)) is not None:
            message = [frame._replace(peer=rank).pack(), *parts[1:]]
            receiver = self.channels.process_of(frame.channel, frame.peer)
            if receiver is not None:
                self._send(receiver, message)
            elif self.channels.may_join(frame.channel, frame.peer):
                self._undelivered.setdefault((frame.channel, frame.peer), []).append(message)

    def _send(self, process: bytes, parts: Sequence[bytes | zmq.Frame]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the process is gone; the monitor reports it
            self._socket.send_multipart([process, *parts], zmq.DONTWAIT, copy=False)

    def _warn_once(self, message: str) -> None:
        if message not in self._warnings:
            self._warnings.add(message)
            _log.warning(
                "the relay at %s: %s; this warning is not repeated", self.endpoint, message
            )


class ChannelRegistry:
    """The ranks and processes of all channels, and the subscribers to each rank."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[bytes, bytes], int] = {}  # by process and channel
        self._processes: dict[tuple[bytes, int], bytes] = {}  # by channel and rank
        self._gone: dict[tuple[bytes, int], int] = {}
        self._absent: dict[bytes, int] = {}
        """By channel, the number of the ranks that have not joined yet."""
        self._aborted: dict[bytes, set[tuple[bytes, int]]] = {}
        """By process, the members that have aborted; their end is reported too."""
        self._subscribers: dict[tuple[bytes, int], dict[tuple[bytes, int], bytes]] = {}

    @property
    def is_in_use(self) -> bool:
        """True if any rank is in any channel, or has aborted and may ask whether others ended."""
        return bool(self._processes or self._aborted)

    @property
    def expects_ranks(self) -> bool:
        """True if ranks of any channel have not joined yet."""
        return any(count > 0 for count in self._absent.values())

    def rank_of(self, process: bytes, channel: bytes) -> int | None:
        """Return the rank of a process in a channel; None if it is not in the channel."""
        return self._ranks.get((process, channel))

    def process_of(self, channel: bytes, rank: int) -> bytes | None:
        """Return the process of a rank in a channel; None if the rank is not in the channel."""
        return self._processes.get((channel, rank))

    def may_join(self, channel: bytes, rank: int) -> bool:
        """Return whether a rank that is not in a channel may still join it."""
        return self._absent.get(channel, 0) > 0 and (channel, rank) not in self._gone

    def handle_frame(self, process: bytes, frame: Frame) -> list[tuple[Frame, bytes]]:
        """Handle a frame for the relay; return the frames to send with their processes.

        Raises:
            ValueError: The process or the rank has already joined the channel.
        """
        channel, rank = frame.channel, self._ranks.get((process, frame.channel))
        member = (channel, frame.peer)
        if frame.kind is Kind.PROBE:
            return [(frame, process)]
        if frame.kind is Kind.JOIN:
            if rank is not None or member in self._processes or member in self._gone:
                raise ValueError(f"rank {frame.peer} joined twice")
            self._absent[channel] = self._absent.get(channel, frame.value) - 1
            self._ranks[process, channel] = frame.peer
            self._processes[member] = process
            subscribers = self._subscribers.get(member, {}).values()
            return [(Frame(Kind.PRESENT, channel, frame.peer), each) for each in subscribers]
        if rank is None:
            aborted = self._aborted.get(process, set())
            rank = next((rank for each, rank in aborted if each == channel), None)
        if rank is None:
            return []
        if frame.kind is Kind.LEAVE:
            return self._leave(process, channel, rank, frame.value)
        gone = self._gone.get(member)
        if gone in (None, LeaveReason.ABORTED):
            self._subscribers.setdefault(member, {})[channel, rank] = process
        if gone is not None:
            return [(Frame(Kind.GONE, channel, frame.peer, value=gone), process)]
        if member in self._processes:
            return [(Frame(Kind.PRESENT, channel, frame.peer), process)]
        return []

    def remove_process(self, process: bytes) -> list[tuple[Frame, bytes]]:
        """Handle a lost process; return the frames to send with their processes."""
        members = [
            (channel, rank) for (each, channel), rank in self._ranks.items() if each == process
        ]
        members += self._aborted.get(process, ())
        return [
            frame
            for channel, rank in members
            for frame in self._leave(process, channel, rank, LeaveReason.DIED)
        ]

    def _leave(
        self, process: bytes, channel: bytes, rank: int, reason: int
    ) -> list[tuple[Frame, bytes]]:
        member = (channel, rank)
        self._ranks.pop((process, channel), None)
        self._processes.pop(member, None)
        self._gone[member] = reason
        subscribers = list(self._subscribers.get(member, {}).values())
        if reason == LeaveReason.ABORTED:
            self._absent[channel] = 0  # nothing that others would do in the channel can succeed
            self._aborted.setdefault(process, set()).add(member)
        else:
            self._subscribers.pop(member, None)
            if aborted := self._aborted.get(process):
                aborted.discard(member)
                if not aborted:
                    del self._aborted[process]
        return [(Frame(Kind.GONE, channel, rank, value=reason), each) for each in subscribers]
