"""The relay: it maps ranks to processes and forwards their words.

It stores no messages. Words for an absent process are dropped, and sender and receiver limit the
data in flight to a slow process between themselves. Only processes with the job's key pass
ZeroMQ's handshake. The relay detects the end of a process by the end of its connection; heartbeats
end a connection that is not closed otherwise.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from phalanx.transports.relay import keys
from phalanx.transports.relay.frames import Ending, Kind, Word
from phalanx.transports.relay.sockets import Wake, harden

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Server"]

_log = logging.getLogger("phalanx")

_ZAP = "inproc://zeromq.zap.01"  # ZeroMQ's fixed address for authentication requests
_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _FAILURES
_TO_THE_RELAY = (Kind.ENTER, Kind.SEEK, Kind.LEAVE)
_FROM_THE_RELAY = (Kind.THERE, Kind.GONE)
_AT_ONCE = 256
"""Most words that are forwarded before the connections are checked again."""


class Server:
    """A relay in a thread, which runs until `close` is called or the process ends.

    Args:
        key: The job's key.
        where: The ZeroMQ address to listen on.

    Raises:
        zmq.ZMQError: The relay cannot listen on the address.
    """

    def __init__(self, key: bytes, where: str) -> None:
        self._context = zmq.Context()
        self._key = key
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.of_server(key).secret)
        harden(self._socket, where)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        try:
            self._socket.bind(where)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self.where = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """The address to connect to."""
        self._members = Members()
        self._connections: dict[int, bytes] = {}
        self._complained: set[str] = set()
        self._wake = Wake()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="phalanx-relay", daemon=True)
        self._thread.start()

    def others(self, channel: bytes, rank: int) -> bool:
        """Return whether ranks other than this one are in a channel."""
        return self._members.others(channel, rank)

    @property
    def anybody(self) -> bool:
        """True if any rank is in any channel."""
        return self._members.anybody

    def close(self) -> None:
        """Stop the relay; processes that are still connected lose their connection."""
        if not self._closed:
            self._closed = True
            self._wake.up()
            self._thread.join()
            self._wake.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._zap, self._wake):
            poller.register(source, zmq.POLLIN)
        while not self._closed:
            ready = dict(poller.poll())
            if self._zap in ready:
                self._admit()
            if self._monitor in ready:
                self._look_at_connections()
            elif self._socket in ready:
                self._pass_on()
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    def _admit(self) -> None:
        """Answer ZeroMQ's authentication request for a client."""
        version, request, _domain, _address, _identity, how, *who = self._zap.recv_multipart()
        right = how == b"CURVE" and who == [z85.decode(keys.of_client(self._key).public)]
        answer = (b"200", b"OK") if right else (b"400", b"No")
        self._zap.send_multipart([version, request, *answer, b"", b""])

    def _look_at_connections(self) -> None:
        """Report the processes whose connections have ended, after forwarding all their words."""
        gone, unknown = [], set()
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            kind, number = event["event"], int(event["value"])
            if kind & _FAILURES:
                self._complain("somebody without the job's key was refused")
            elif kind == zmq.EVENT_ACCEPTED:
                unknown.discard(number)  # the descriptor now belongs to another connection
            elif number in self._connections:
                gone.append(self._connections.pop(number))
            else:
                unknown.add(number)
        while self._pass_on():
            pass
        gone += [self._connections.pop(each) for each in unknown if each in self._connections]
        for process in gone:
            for word, target in self._members.died(process):
                self._say(target, [word.pack()])

    def _pass_on(self) -> bool:
        """Forward up to `_AT_ONCE` words that have arrived; return whether there was any."""
        for number in range(_AT_ONCE):
            try:
                sender, *frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return number > 0
            process = sender.bytes
            self._connections[int(sender.get(zmq.SRCFD))] = process
            try:
                self._heard(process, frames)
            except ValueError as error:
                self._complain(f"a process said what can't be understood ({error})")
        return True

    def _heard(self, process: bytes, frames: Sequence[zmq.Frame]) -> None:
        if not 1 <= len(frames) <= 2:
            raise ValueError(f"{len(frames)} frames")
        word = Word.parse(frames[0].bytes)
        if word.kind in _FROM_THE_RELAY:
            raise ValueError(f"{word.kind.name} from a process")
        if word.kind in _TO_THE_RELAY:
            for told, target in self._members.heard(process, word):
                self._say(target, [told.pack()])
        elif (found := self._members.find(process, word)) is not None:
            rank, target = found
            self._say(target, [word._replace(peer=rank).pack(), *frames[1:]])

    def _say(self, process: bytes, frames: Sequence[bytes | zmq.Frame]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the process is gone; the monitor reports it
            self._socket.send_multipart([process, *frames], zmq.DONTWAIT, copy=False)

    def _complain(self, what: str) -> None:
        if what not in self._complained:
            self._complained.add(what)
            _log.warning("the relay at %s: %s; this isn't said again", self.where, what)


class Members:
    """The ranks and processes of all channels, and the processes that asked about each rank."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[bytes, bytes], int] = {}  # by process and channel
        self._processes: dict[tuple[bytes, int], bytes] = {}  # by channel and rank
        self._gone: dict[tuple[bytes, int], int] = {}
        self._seekers: dict[tuple[bytes, int], dict[tuple[bytes, int], bytes]] = {}

    @property
    def anybody(self) -> bool:
        """True if any rank is in any channel."""
        return bool(self._processes)

    def others(self, channel: bytes, rank: int) -> bool:
        """Return whether ranks other than this one are in a channel."""
        return any(there == channel and r != rank for there, r in list(self._processes))

    def find(self, process: bytes, word: Word) -> tuple[int, bytes] | None:
        """Return the rank of a process, and the destination process of its word.

        Returns None if either is not in the channel.
        """
        rank = self._ranks.get((process, word.channel))
        target = self._processes.get((word.channel, word.peer))
        return None if rank is None or target is None else (rank, target)

    def heard(self, process: bytes, word: Word) -> list[tuple[Word, bytes]]:
        """Handle a word for the relay; return the words to send with their processes.

        Raises:
            ValueError: The process or the rank has already entered the channel.
        """
        channel, rank = word.channel, self._ranks.get((process, word.channel))
        place = (channel, word.peer)
        if word.kind is Kind.ENTER:
            if rank is not None or place in self._processes or place in self._gone:
                raise ValueError(f"rank {word.peer} entered twice")
            self._ranks[process, channel] = word.peer
            self._processes[place] = process
            seekers = self._seekers.get(place, {}).values()
            return [(Word(Kind.THERE, channel, word.peer), seeker) for seeker in seekers]
        if rank is None:
            return []
        if word.kind is Kind.LEAVE:
            return self._leave(process, channel, word.value)
        if place in self._gone:
            return [(Word(Kind.GONE, channel, word.peer, value=self._gone[place]), process)]
        self._seekers.setdefault(place, {})[channel, rank] = process
        if place in self._processes:
            return [(Word(Kind.THERE, channel, word.peer), process)]
        return []

    def died(self, process: bytes) -> list[tuple[Word, bytes]]:
        """Handle a lost process; return the words to send with their processes."""
        channels = [channel for who, channel in self._ranks if who == process]
        return [told for channel in channels for told in self._leave(process, channel, Ending.DIED)]

    def _leave(self, process: bytes, channel: bytes, how: int) -> list[tuple[Word, bytes]]:
        rank = self._ranks.pop((process, channel))
        del self._processes[channel, rank]
        self._gone[channel, rank] = how
        seekers = self._seekers.pop((channel, rank), {}).values()
        return [(Word(Kind.GONE, channel, rank, value=how), seeker) for seeker in seekers]
