"""The one port of a job that other hosts reach: strangers stay outside.

What the hosts share listens where only the gate's own machine reaches it: the stores of launchers
and ranks on the loopback interface, the relay of the ranks on a Unix socket. The gate listens
on the interface that faces the other hosts, has each guest prove that it has the job's key
(`handshake`), and only then connects it to what it asks for. On the other hosts a `Way` is the
other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from typing import TYPE_CHECKING, Any

from phalanx.launch.connections import (
    BUFFER,
    Connections,
    keep_alive,
    limit_silence,
    relay_name,
    splice,
)
from phalanx.launch.handshake import Stranger, answer, as_gate
from phalanx.launch.store import HOST, AttemptStores

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Gate"]

_HANDSHAKE_SECONDS = 10.0
_MOST_PENDING = 512
"""So many may be in their handshake at once. When another one comes, one has to go: the oldest from
the address that has the most."""
_MOST_TOLD = 16
_SETTLE_SECONDS = 2.0
"""Other hosts may need the store, until they have ended as well."""


class Gate:
    """Lets the hosts of a job in.

    Args:
        address: Where it listens.
        port: The TCP port.
        key: The job's; empty if it has none.
        store: The port of the launchers' store, on the loopback interface.
        check: What is wrong with what a guest says of itself; empty if nothing is.
        tell: Is given a sentence for the user, when somebody is turned away.

    Raises:
        OSError: It can't listen there.
    """

    def __init__(
        self,
        address: str,
        port: int,
        key: bytes,
        store: int,
        check: Callable[[dict[str, Any]], str],
        tell: Callable[[str], None],
    ) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=512)
        self._key = key
        self._store = store
        self._check = check
        self._tell = tell
        self._told: set[str] = set()
        self.wrong = ""
        """What was wrong with the last host that had the key and didn't fit."""
        self._pending: dict[asyncio.Task[Any], str] = {}
        self._hosts: dict[int, str] = {}
        self.on_gone: Callable[[str, str], None] = lambda *_: None
        """Is given the name of a host that has left, and its place, for people."""
        self.stores = AttemptStores()
        """Those of the ranks."""
        self._connections = Connections("phalanx-gate", _SETTLE_SECONDS)
        self.relay = relay_name()
        """Where the ranks' relay has to listen."""
        self._connections.call(self._connections.serve(listener, self._serve))

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._connections.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        keep_alive(writer)
        who = str(writer.get_extra_info("peername", ("?",))[0])
        greeting = asyncio.ensure_future(as_gate(reader, writer, self._key))
        self._pending[greeting] = who
        if len(self._pending) > _MOST_PENDING:
            self._make_room()
        try:
            hello = await asyncio.wait_for(greeting, _HANDSHAKE_SECONDS)
        except Stranger as stranger:
            self._turn_away(who, str(stranger))
            return
        finally:
            self._pending.pop(greeting, None)
        if wrong := self._check(hello):
            self.wrong = wrong
            self._turn_away(who, wrong)
            answer(writer, wrong)
            return
        await self._lead(reader, writer, who, hello)

    async def _lead(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        who: str,
        hello: dict[str, Any],
    ) -> None:
        service = hello.get("service")
        if service in ("join", "store", "ranks"):  # behind the relay somebody may well pause
            limit_silence(writer)
        if service == "join":
            await self._join(reader, writer, who, hello)
        elif service == "store":
            await self._splice(reader, writer, self._store)
        elif service == "ranks":
            await self._lead_ranks(reader, writer, hello.get("attempt"))
        elif service == "relay":
            there = await asyncio.open_unix_connection(self.relay.replace("@", "\0"), limit=BUFFER)
            answer(writer, "")
            await splice((reader, writer), there)
        else:
            answer(writer, f"there is no service {service!r}")

    async def _lead_ranks(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, attempt: object
    ) -> None:
        """A rank, to the store of its attempt: those of several hosts don't start at once."""
        try:
            if not isinstance(attempt, int) or attempt < 0:
                raise LookupError(f"there is no attempt {attempt!r}")
            port = self.stores.port(attempt)
        except LookupError as error:
            answer(writer, str(error))
            return
        await self._splice(reader, writer, port)

    async def _splice(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        there = await asyncio.open_connection(HOST, port, limit=BUFFER)
        answer(writer, "")
        await splice((reader, writer), there)

    async def _join(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        who: str,
        hello: dict[str, Any],
    ) -> None:
        """A host enters the job: as long as this connection lives, its number is taken."""
        number = hello.get("number")
        if not isinstance(number, int) or number < 0:  # the rendezvous gives numbers
            number = None
        elif number == 0 or number in self._hosts:
            wrong = (
                f"host {number} is {self._hosts.get(number, 'the one with the rendezvous')} "
                "already: give each host a --node-rank of its own"
            )
            self._turn_away(who, wrong)
            answer(writer, wrong)
            return
        else:
            self._hosts[number] = who
        try:
            answer(writer, "")
            with contextlib.suppress(OSError):
                await reader.read()
            self.on_gone(str(hello.get("id")), str(hello.get("name")))
        finally:
            if number is not None:
                del self._hosts[number]

    def _make_room(self) -> None:
        """Who sends many strangers loses them first, not the hosts of the job."""
        worst = Counter(self._pending.values()).most_common(1)[0][0]
        oldest = next(task for task, who in self._pending.items() if who == worst)
        del self._pending[oldest]  # now: more may come before it has ended
        oldest.cancel()

    def _turn_away(self, who: str, why: str) -> None:
        if len(self._told) < _MOST_TOLD and who not in self._told:
            self._told.add(who)
            self._tell(f"turned {who} away: {why}")
