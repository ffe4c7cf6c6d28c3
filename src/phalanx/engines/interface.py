"""What an engine is to the rest of Phalanx."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Engine", "EngineError", "Transfer"]


class EngineError(Exception):
    """An engine can't carry something: its peer is gone, or it was aborted.

    Attributes:
        peer: The rank that it was for or from; -1 if it isn't known.
    """

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


class Transfer(ABC):
    """A send or a receive that has been posted. Its buffer belongs to it until it has ended."""

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Block until it has ended, for so many seconds at most; whether it has.

        A send has ended when its buffer may be used again. What was not waited for to its end may
        be waited for again.

        Raises:
            EngineError: It can't end any more. So says every later wait.
        """

    @abstractmethod
    def then(self, call: Callable[[], None]) -> None:
        """Call in a thread of the engine when it has ended, well or not: once, and soon."""


class Engine(ABC):
    """Carries bytes between the ranks of one group.

    Sends and receives with the same tag between the same two ranks meet in the order in which they
    were posted; those with different tags don't wait for each other. A receive has exactly the
    size of its send, at least one byte. Any thread may call.
    """

    @abstractmethod
    def send(self, data: memoryview, peer: int, tag: int) -> Transfer:
        """Post a send of contiguous bytes; returns at once.

        Args:
            data: Bytes, which stay as they are until it has ended.
            peer: A rank of the group.
            tag: From 0 to 2^31 - 1.

        Raises:
            EngineError: The peer is known to be gone, or the engine was aborted.
        """

    @abstractmethod
    def recv(self, data: memoryview, peer: int, tag: int) -> Transfer:
        """Post a receive into contiguous writable bytes; returns at once.

        Args:
            data: Where the bytes go, of the size of what is sent.
            peer: A rank of the group.
            tag: From 0 to 2^31 - 1.

        Raises:
            EngineError: The peer is known to be gone, or the engine was aborted.
        """

    @abstractmethod
    def abort(self) -> None:
        """End all that is under way with `EngineError`, here and soon on every peer it is with."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. What peers have been sent still arrives."""
