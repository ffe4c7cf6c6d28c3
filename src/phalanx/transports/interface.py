"""The interface between transports and the rest of Phalanx."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Transfer", "Transport", "TransportError"]


class TransportError(Exception):
    """A transfer cannot be carried out: its peer is gone, or the transport was aborted.

    Attributes:
        peer: The rank that the transfer needs, or through which its connections lead; -1 if
            unknown.
    """

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


class Transfer(ABC):
    """A posted send or receive, which owns its buffer until it has ended."""

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Block until the transfer has ended, and return whether it has.

        A send has ended when its buffer may be used again. After a wait that returns False, the
        transfer may be waited for again.

        Args:
            seconds: The longest time to wait, in seconds.

        Raises:
            TransportError: The transfer has failed. Every later wait raises the same.
        """

    @abstractmethod
    def then(self, call: Callable[[], None]) -> None:
        """Call a function once, in a thread of the transport, soon after the transfer has ended.

        It is called after a failure too.
        """


class Transport(ABC):
    """A carrier of bytes between the ranks of one group.

    Sends and receives with the same tag between the same two ranks match in the order in which
    they are posted. Those with different tags do not wait for each other. A receive must have
    exactly the size of its send, at least one byte. All methods are thread-safe.
    """

    @abstractmethod
    def send(self, data: memoryview, peer: int, tag: int) -> Transfer:
        """Post a send of contiguous bytes; return at once.

        Args:
            data: The bytes to send, which must not change until the transfer has ended.
            peer: A rank of the group.
            tag: From 0 to 2^31 - 1.

        Raises:
            TransportError: The peer is known to be gone, or the transport was aborted.
        """

    @abstractmethod
    def recv(self, data: memoryview, peer: int, tag: int) -> Transfer:
        """Post a receive into contiguous writable bytes; return at once.

        Args:
            data: The buffer for the bytes, of the same size as the send.
            peer: A rank of the group.
            tag: From 0 to 2^31 - 1.

        Raises:
            TransportError: The peer is known to be gone, or the transport was aborted.
        """

    @abstractmethod
    def abort(self) -> None:
        """Fail all pending transfers with `TransportError`, here and soon on their peers."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources; data already sent still reach the peers."""
