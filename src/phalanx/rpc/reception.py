"""Who comes to this worker: strangers, who must prove that they know the key, and requests."""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING

from phalanx.rpc.door import Door
from phalanx.rpc.near import Stream
from phalanx.rpc.wire import ANSWERS, Malformed, Message, parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.rpc.far import Inbox
    from phalanx.rpc.freight import Frames
    from phalanx.rpc.reactor import Reactor

__all__ = ["Reception"]

_LOG = logging.getLogger("phalanx.rpc")


class Reception:
    """Where a worker is asked.

    Args:
        me: This worker's name, for messages.
        key: The job's.
        address: Where workers of this host come.
        reactor: Waits for them.
        asked: Called with each request, and a function that sends an answer to it.
    """

    def __init__(
        self,
        me: str,
        key: bytes,
        address: str,
        reactor: Reactor,
        asked: Callable[[Message, Callable[[Frames], None]], None],
    ) -> None:
        self._me, self._reactor, self._asked_for = me, reactor, asked
        self._door = Door(key, address, self.stranger)
        self._streams: dict[int, Stream] = {}
        self._refused = self._malformed = False
        self._workers = 0

    def open(self, workers: int, inbox: Inbox | None) -> None:
        """Let them come in.

        Args:
            workers: How many workers there are.
            inbox: Where those of other hosts come.
        """
        self._workers = workers
        self._reactor.watch(self._door.descriptor, self._knocked)
        if inbox is not None:
            self._reactor.watch(inbox.descriptor, partial(self._came, inbox))
            self._reactor.watch(inbox.monitor_descriptor, partial(self._turned_away, inbox))

    def close(self) -> None:
        """Close all connections by which workers of this host have come."""
        self._door.close()
        for stream in self._streams.values():
            stream.close()

    def stranger(self) -> None:
        """One was turned away: that is said once."""
        if not self._refused:
            self._refused = True
            _LOG.warning(
                "worker %r refused a connection from one who hasn't shown that it has the job's "
                "key; more of them are refused in silence",
                self._me,
            )

    def strange(self, error: Malformed) -> None:
        """A message was malformed: that is said once."""
        if not self._malformed:
            self._malformed = True
            _LOG.warning(
                "worker %r dropped a malformed message: %s; more of them are dropped in silence",
                self._me,
                error,
            )

    def _knocked(self) -> None:
        for descriptor in self._door.knock():
            self._reactor.watch(descriptor, partial(self._said, descriptor))
        for descriptor in self._door.crowd():
            self._reactor.unwatch(descriptor)
            self._door.turn_away(descriptor)

    def _said(self, descriptor: int) -> None:
        stream = self._door.admit(descriptor)
        if stream is True:
            return
        self._reactor.unwatch(descriptor)
        if isinstance(stream, Stream):
            self._streams[descriptor] = stream
            self._reactor.watch(descriptor, partial(self._read, stream))
        else:
            self._door.turn_away(descriptor)

    def _read(self, stream: Stream) -> None:
        messages = stream.read()
        if messages is None:
            self._reactor.unwatch(stream.descriptor)
            del self._streams[stream.descriptor]
            stream.close()
            return
        answer = partial(_reply, stream)
        self._reactor.do(*(partial(self._requested, answer, (each, [])) for each in messages))

    def _came(self, inbox: Inbox) -> None:
        messages = inbox.receive()
        self._reactor.do(
            *(
                partial(self._requested, partial(self._send, inbox, who), frames)
                for who, frames in messages
            )
        )
        if len(messages) == inbox.at_a_time:
            self._reactor.do(partial(self._came, inbox))

    def _send(self, inbox: Inbox, who: bytes, frames: Frames) -> None:
        if inbox.send(who, *frames):
            self._reactor.do(partial(self._came, inbox))

    def _turned_away(self, inbox: Inbox) -> None:
        if inbox.mishap():
            self.stranger()

    def _requested(self, answer: Callable[[Frames], None], frames: Frames) -> None:
        try:
            message = parse(*frames, self._workers)
            if message.kind in ANSWERS:
                raise Malformed("an answer, to no question")
        except Malformed as error:
            self.strange(error)
            return
        self._asked_for(message, answer)


def _reply(stream: Stream, frames: Frames) -> None:
    with contextlib.suppress(OSError):  # nobody waits for it any more
        stream.answer(frames[0])
