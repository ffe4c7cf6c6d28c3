"""A pending call whose answer the calling thread itself waits for."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from phalanx.errors import CallTimeout
from phalanx.rpc.shared_memory.receiver import CopyTimeout

if TYPE_CHECKING:
    from phalanx.rpc.agent import Agent
    from phalanx.rpc.codec.message import Message
    from phalanx.rpc.peer import Peer
    from phalanx.rpc.transport.local import LocalConnection
    from phalanx.rpc.transport.remote import RemoteConnection

__all__ = ["PendingCall"]


class PendingCall:
    """A pending call.

    Args:
        own: The agent of this worker.
        peer: The callee.
        connection: The connection of the call; no other call uses it until the answer arrives.
        call: The number of the call.
        description: A description of the call, for messages.
        timeout: Seconds from now; 0 means no limit.
        keepalive: An object to keep alive until the answer arrives.
    """

    def __init__(
        self,
        own: Agent,
        peer: Peer,
        connection: LocalConnection | RemoteConnection,
        call: int,
        description: str,
        timeout: float,
        keepalive: object,
    ) -> None:
        self._own, self._peer, self._call, self._description = own, peer, call, description
        self._keepalive = keepalive
        self._timeout, self._end = timeout, time.monotonic() + (timeout or math.inf)
        self._connection: LocalConnection | RemoteConnection | None = connection

    def wait(self) -> Any:
        """Wait for the answer and return it.

        Raises:
            PeerLost: The worker is dead or has left.
            CallTimeout: There is no answer in time.
            Exception: The exception that the function raised.
        """
        self._own.promote_follower()
        try:
            message = self._receive_answer()
        except TimeoutError:
            raise self._timeout_error() from None
        except OSError:
            message = None
        except BaseException:
            # Interrupted: part of a message may be lost, so the connection cannot be reused.
            connection, self._connection = self._connection, None
            self._own.call_log.outgoing.pop(self._call, None)
            if connection is not None:
                connection.close()
            raise
        finally:
            self._release_connection()
        if message is None:
            raise self._own.loss_error(self._peer, self._description)
        try:
            tensors = self._own.read_tensors(message, self._peer, self._description, self._end)
        except CopyTimeout:
            raise self._timeout_error() from None
        return self._own.codec.deserialize(message, self._peer, tensors)

    def _timeout_error(self) -> CallTimeout:
        return CallTimeout(f"{self._description} took longer than {self._timeout:g} s")

    def _receive_answer(self) -> Message | None:
        connection = self._connection
        while connection is not None and (frames := connection.receive(self._end)) is not None:
            message = self._own.parse(frames)
            if message is not None and message.call == self._call:
                return message
            if message is not None:
                self._own.drop(message, self._peer)
        return None

    def _release_connection(self) -> None:
        # The next user of the connection drops an answer that comes too late.
        connection, self._connection = self._connection, None
        if connection is not None:
            self._own.call_log.outgoing.pop(self._call, None)
            self._peer.return_connection(connection)

    def __del__(self) -> None:
        self._release_connection()
