"""The connection of a process to the relay, shared by all of its groups."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from phalanx.system.curve import HANDSHAKE_FAILURES
from phalanx.system.polling import EventFd
from phalanx.transports.interface import CallbackThread, TransportError
from phalanx.transports.relay.protocol import (
    CHANNEL_BYTES,
    CONNECT_SECONDS,
    Frame,
    Kind,
    client_key_pair,
    configure,
    server_key_pair,
)

_LINGER_MILLISECONDS = 2_000
_CLOSE_SECONDS = 4.0
_BATCH = 256
_DISCONNECTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | HANDSHAKE_FAILURES | _DISCONNECTS


class Listener(Protocol):
    """A receiver of the frames of one channel: the transport of a group."""

    def handle_frame(self, frame: Frame, data: memoryview) -> None:
        """Handle a frame with its data, which may be empty.

        Called in the connection's thread, in the order of arrival.
        """

    def handle_disconnect(self, reason: str) -> None:
        """Handle the end of the connection: no more frames will arrive."""


class _Probe:
    """A listener for the answer to a probe."""

    def __init__(self) -> None:
        self.is_answered = False
        self.is_over = threading.Event()

    def handle_frame(self, _frame: Frame, _data: memoryview) -> None:
        self.is_answered = True
        self.is_over.set()

    def handle_disconnect(self, _reason: str) -> None:
        self.is_over.set()


class RelayConnection:
    """A connection with its threads: one sends and receives, the other runs callbacks.

    Its creation blocks until the connection is made, for up to 20 s.

    Args:
        endpoint: The ZeroMQ address of the relay.
        key: The job's key.

    Raises:
        TransportError: The relay cannot be reached, or it does not have the same key.
    """

    def __init__(self, endpoint: str, key: bytes) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)  # the relay would not know this process
        configure(self._socket, endpoint, client_key_pair(key), server_key_pair(key).public)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._listeners: dict[bytes, Listener] = {}
        self._send_queue: deque[tuple[bytes, bytes]] = deque()
        self.callbacks = CallbackThread("phalanx-relay-callbacks")
        """The thread for the callbacks of transfers."""
        self._eventfd = EventFd()
        self._lock = threading.Lock()
        self._connected = threading.Event()
        self._reason = ""
        self._closed = False
        self._socket.connect(endpoint)
        self._thread = threading.Thread(
            target=self._run, name="phalanx-relay-connection", daemon=True
        )
        self._thread.start()
        if not self._connected.wait(CONNECT_SECONDS):
            self._disconnect(f"it did not answer within {CONNECT_SECONDS:g} s")
        if self._reason:
            self.close()
            raise TransportError(-1, f"no connection to the relay at {endpoint}: {self._reason}")

    @property
    def is_lost(self) -> bool:
        """True if the relay has ended, or is known to be unreachable."""
        return bool(self._reason)

    def is_answered(self) -> bool:
        """Ask the relay for an answer, and return whether it has come.

        Of a relay whose process has died, the connection may seem to be in order for a moment.
        Blocks until the relay answers or the connection is lost, by its heartbeats at the latest.
        """
        channel, probe = os.urandom(CHANNEL_BYTES), _Probe()
        self.add_listener(channel, probe)
        self.send(Frame(Kind.PROBE, channel, 0))
        probe.is_over.wait(CONNECT_SECONDS)
        self.remove_listener(channel)
        return probe.is_answered

    def add_listener(self, channel: bytes, listener: Listener) -> None:
        """Register a listener for a channel.

        If the connection is already lost, its `handle_disconnect` is called at once.
        """
        with self._lock:
            self._listeners[channel] = listener
            reason = self._reason
        if reason:
            listener.handle_disconnect(reason)

    def remove_listener(self, channel: bytes) -> bool:
        """Remove the listener of a channel; return whether that was the last channel."""
        with self._lock:
            self._listeners.pop(channel, None)
            return not self._listeners

    def send(self, frame: Frame, data: bytes = b"") -> None:
        """Queue a frame for sending and return at once; do nothing if the connection is lost."""
        with self._lock:
            if self._closed or self._reason:
                return
            self._send_queue.append((frame.pack(), data))
            self._eventfd.notify()

    def close(self) -> None:
        """Send all queued frames for up to 2 s, then close the connection and end the threads."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._eventfd.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)
        self.callbacks.stop(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._eventfd.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._eventfd):
            poller.register(source, zmq.POLLIN)
        while not self._closed:
            ready = dict(poller.poll())
            if self._eventfd.fileno() in ready:
                self._eventfd.clear()
            self._send_queued()
            if self._socket in ready:
                self._receive()
            if self._monitor in ready:
                self._check_monitor()
        self._send_queued()
        self._socket.disable_monitor()
        linger = 0 if self._reason else _LINGER_MILLISECONDS
        self._context.destroy(linger)  # blocks until everything is sent, or for the linger time

    def _send_queued(self) -> None:
        while self._send_queue:
            parts = [part for part in self._send_queue.popleft() if part]
            try:
                self._socket.send_multipart(parts, zmq.DONTWAIT)
            except zmq.Again:  # the queue has no limit, so the connection must be gone
                self._send_queue.clear()
                while self._receive():
                    pass
                self._disconnect("the connection is gone")

    def _receive(self) -> bool:
        """Handle up to `_BATCH` frames that have arrived; return whether there were any."""
        for number in range(_BATCH):
            try:
                parts = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return number > 0
            with contextlib.suppress(ValueError):  # the relay forwards only frames
                frame = Frame.parse(parts[0].bytes)
                listener = self._listeners.get(frame.channel)
                if listener is not None:
                    listener.handle_frame(
                        frame, parts[1].buffer if len(parts) > 1 else memoryview(b"")
                    )
        return True

    def _check_monitor(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected.set()
            elif event & HANDSHAKE_FAILURES:
                self._disconnect("it rejects this process: do both have the same job key?")
            elif not self._reason:
                while self._receive():
                    pass
                self._disconnect("the connection is gone")

    def _disconnect(self, reason: str) -> None:
        with self._lock:
            self._reason = self._reason or reason
            listeners = list(self._listeners.values())
        self._connected.set()
        for listener in listeners:
            listener.handle_disconnect(reason)
