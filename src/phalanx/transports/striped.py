"""Several connections between two ranks, for links that one connection does not fill.

A TCP connection sends at most one window of data per round trip. Over long distances, that is less
than the link carries, and a lost packet halves it. Transfers with different tags go over different
connections; the chunks of a collective have different tags.
"""

from __future__ import annotations

from collections.abc import Callable

from phalanx.transports.interface import Transfer, Transport


class StripedTransport(Transport):
    """A transport over several others, by tag.

    Args:
        count: The number of connections.
        open_one: Opens the transport with a number from 0 on.
    """

    def __init__(self, count: int, open_one: Callable[[int], Transport]) -> None:
        self._stripes: list[Transport] = []
        try:
            for number in range(count):
                self._stripes.append(open_one(number))
        except BaseException:
            self.abort()
            self.close()
            raise

    def send(self, data: memoryview, peer: int, tag: int) -> Transfer:
        return self._stripes[tag % len(self._stripes)].send(data, peer, tag)

    def recv(self, data: memoryview, peer: int, tag: int) -> Transfer:
        return self._stripes[tag % len(self._stripes)].recv(data, peer, tag)

    def has_ended(self, peer: int) -> bool:
        return any(each.has_ended(peer) for each in self._stripes)

    def abort(self) -> None:
        for each in self._stripes:
            each.abort()

    def close(self) -> None:
        for each in self._stripes:
            each.close()
