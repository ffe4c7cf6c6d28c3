"""A call whose answer the calling thread itself waits for."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from phalanx.errors import CallTimeout
from phalanx.rpc.mapped import Late

if TYPE_CHECKING:
    from phalanx.rpc.agent import Agent
    from phalanx.rpc.far import Line
    from phalanx.rpc.near import Stream
    from phalanx.rpc.peer import Peer
    from phalanx.rpc.wire import Message

__all__ = ["Asked"]


class Asked:
    """A call that is under way.

    Args:
        own: This worker.
        peer: Who was asked.
        line: By which; nobody else uses it until the answer is there.
        call: Its number.
        said: What it is, for messages.
        timeout: Seconds from now; 0: any.
        kept: What must live until the answer is there.
    """

    def __init__(
        self,
        own: Agent,
        peer: Peer,
        line: Stream | Line,
        call: int,
        said: str,
        timeout: float,
        kept: object,
    ) -> None:
        self._own, self._peer, self._call, self._said = own, peer, call, said
        self._kept = kept
        self._timeout, self._end = timeout, time.monotonic() + (timeout or math.inf)
        self._line: Stream | Line | None = line

    def wait(self) -> Any:
        """The answer; blocks until it is there.

        Raises:
            PeerLost: The worker is dead or has left.
            CallTimeout: It isn't there in time.
            Exception: What the function raised.
        """
        self._own.hand_over()
        try:
            message = self._answer()
        except TimeoutError:
            raise self._late() from None
        except OSError:
            message = None
        except BaseException:
            # Interrupted: a part of a message may be lost.
            line, self._line = self._line, None
            if line is not None:
                line.close()
            raise
        finally:
            self._give_back()
        if message is None:
            raise self._own.how_lost(self._peer, self._said)
        try:
            tensors = self._own.taken(message, self._peer, self._said, self._end)
        except Late:
            raise self._late() from None
        return self._own.freight.unpack(message, self._peer, tensors)

    def _late(self) -> CallTimeout:
        return CallTimeout(f"{self._said} took longer than {self._timeout:g} s")

    def _answer(self) -> Message | None:
        line = self._line
        while line is not None and (frames := line.receive(self._end)) is not None:
            message = self._own.parsed(frames)
            if message is not None and message.call == self._call:
                return message
            if message is not None:
                self._own.drop(message, self._peer)
        return None

    def _give_back(self) -> None:
        # An answer that comes too late is dropped by who uses the line next.
        line, self._line = self._line, None
        if line is not None:
            self._peer.give_back(line)

    def __del__(self) -> None:
        self._give_back()
