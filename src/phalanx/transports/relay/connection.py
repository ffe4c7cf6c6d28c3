"""The connection of a process to the relay, shared by all of its groups."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from phalanx.transports.interface import TransportError
from phalanx.transports.relay import keys
from phalanx.transports.relay.frames import Word
from phalanx.transports.relay.sockets import Wake, harden

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Line", "Listener"]

_CONNECT_SECONDS = 20.0
_PARTING_MILLISECONDS = 2_000
_AT_ONCE = 256
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_ENDED = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | _REFUSED | _ENDED


class Listener(Protocol):
    """A receiver of the words of one channel: a group's end."""

    def heard(self, word: Word, data: memoryview) -> None:
        """Handle a word with its data, which may be empty.

        Called in the line's thread, in the order of arrival.
        """

    def cut(self, reason: str) -> None:
        """Handle the end of the connection: no more words will come."""


class Line:
    """A connection with its threads: one sends and receives, the other runs callbacks.

    Blocks until the connection is made, for up to 20 s.

    Args:
        where: The ZeroMQ address of the relay.
        key: The job's key.

    Raises:
        TransportError: The relay cannot be reached, or it does not have the same key.
    """

    def __init__(self, where: str, key: bytes) -> None:
        self._where = where
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        own = keys.of_client(key)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.of_server(key).public)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)  # the relay would not know this process
        harden(self._socket, where)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._listeners: dict[bytes, Listener] = {}
        self._words: deque[tuple[bytes, bytes]] = deque()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._wake = Wake()
        self._lock = threading.Lock()
        self._connected = threading.Event()
        self._reason = ""
        self._closed = False
        self._socket.connect(where)
        self._threads = [
            threading.Thread(target=work, name=f"phalanx-relay-{name}", daemon=True)
            for name, work in (("line", self._run), ("calls", self._call))
        ]
        for thread in self._threads:
            thread.start()
        if not self._connected.wait(_CONNECT_SECONDS):
            self._lose(f"it hasn't answered for {_CONNECT_SECONDS:g} s")
        if self._reason:
            self.close()
            raise TransportError(-1, f"no connection to the relay at {where}: {self._reason}")

    def add(self, channel: bytes, listener: Listener) -> None:
        """Register a listener for a channel.

        If the connection is already lost, its `cut` is called at once.
        """
        with self._lock:
            self._listeners[channel] = listener
            reason = self._reason
        if reason:
            listener.cut(reason)

    def remove(self, channel: bytes) -> bool:
        """Remove the listener of a channel; return whether that was the last channel."""
        with self._lock:
            self._listeners.pop(channel, None)
            return not self._listeners

    def say(self, word: Word, data: bytes = b"") -> None:
        """Queue a word for sending and return at once; do nothing if the connection is lost."""
        with self._lock:
            if self._closed or self._reason:
                return
            self._words.append((word.pack(), data))
            self._wake.up()

    def call(self, call: Callable[[], None]) -> None:
        """Call a function in a thread of this line that may block; calls run one by one."""
        self._calls.put(call)

    def close(self) -> None:
        """Send all queued words for up to 2 s, then close the connection and end the threads."""
        with self._lock:
            self._closed = True
            self._wake.up()
        self._calls.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2 * _PARTING_MILLISECONDS / 1000)
        if not self._threads[0].is_alive():
            self._wake.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wake):
            poller.register(source, zmq.POLLIN)
        while not self._closed:
            ready = dict(poller.poll())
            if self._wake.fileno() in ready:
                self._wake.clear()
            self._speak()
            if self._socket in ready:
                self._listen()
            if self._monitor in ready:
                self._look_at_connection()
        self._speak()
        self._socket.disable_monitor()
        linger = 0 if self._reason else _PARTING_MILLISECONDS
        self._context.destroy(linger)  # waits until everything is sent, or for the linger time

    def _speak(self) -> None:
        while self._words:
            frames = [frame for frame in self._words.popleft() if frame]
            try:
                self._socket.send_multipart(frames, zmq.DONTWAIT)
            except zmq.Again:  # the queue has no limit, so the connection must be gone
                self._words.clear()
                while self._listen():
                    pass
                self._lose("the connection is gone")

    def _listen(self) -> bool:
        """Handle up to `_AT_ONCE` words that have arrived; return whether there was any."""
        for number in range(_AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return number > 0
            with contextlib.suppress(ValueError):  # the relay forwards only words
                word = Word.parse(frames[0].bytes)
                listener = self._listeners.get(word.channel)
                if listener is not None:
                    listener.heard(word, frames[1].buffer if len(frames) > 1 else memoryview(b""))
        return True

    def _look_at_connection(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected.set()
            elif event & _REFUSED:
                self._lose("it refuses this process: do both have the same key of the job?")
            elif not self._reason:
                while self._listen():
                    pass
                self._lose("the connection is gone")

    def _lose(self, reason: str) -> None:
        with self._lock:
            self._reason = self._reason or reason
            listeners = list(self._listeners.values())
        self._connected.set()
        for listener in listeners:
            listener.cut(reason)

    def _call(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call
