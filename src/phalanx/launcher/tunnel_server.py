"""The only port of a job that other hosts can reach; connections without the key are rejected.

The services that the hosts share listen where only the gate's machine can reach them: the stores
of the launchers and ranks on the loopback interface, the relay of the ranks on a Unix socket. The
gate listens on the interface that faces the other hosts. It authenticates each guest by the job's
key (`handshake`) and only then connects it to the requested service. `Way` is the other end, on the
other hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from typing import TYPE_CHECKING, Any

from phalanx.launcher.connections import (
    BUFFER,
    Connections,
    keep_alive,
    limit_silence,
    relay_name,
    splice,
)
from phalanx.launcher.handshake import Stranger, answer, as_gate
from phalanx.launcher.store import HOST, AttemptStores

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Gate"]

_HANDSHAKE_SECONDS = 10.0
_MOST_PENDING = 512
"""The maximum number of concurrent handshakes. A further connection replaces the oldest one from
the address that has the most."""
_MOST_TOLD = 16
_SETTLE_SECONDS = 2.0
"""Seconds for which connections stay open at the end, since other hosts may need the store."""


class Gate:
    """A server that admits the hosts of a job and connects them to its services.

    Args:
        address: The IP address on which the gate listens.
        port: The TCP port on which the gate listens.
        key: The job's key; empty if it has none.
        store: The port of the launchers' store, on the loopback interface.
        check: A function that returns why a guest with this hello is rejected; empty if it is not.
        tell: A function that shows a sentence to the user when a connection is rejected.

    Raises:
        OSError: The gate cannot listen on this address and port.
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
        """The reason for which the last host with the key was rejected; empty if none was."""
        self._pending: dict[asyncio.Task[Any], str] = {}
        self._hosts: dict[int, str] = {}
        self.on_gone: Callable[[str, str], None] = lambda *_: None
        """A function called for each host that leaves, with its unique name and one for people."""
        self.stores = AttemptStores()
        """The stores of the ranks."""
        self._connections = Connections("phalanx-gate", _SETTLE_SECONDS)
        self.relay = relay_name()
        """The name of the Unix socket on which the ranks' relay must listen."""
        self._connections.call(self._connections.serve(listener, self._serve))

    def close(self) -> None:
        """Stop listening and close all connections."""
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
        if service in ("join", "store", "ranks"):  # a reader behind the relay may pause
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
        """Connect a rank to the store of its attempt.

        The attempt is needed because the ranks of several hosts do not start at the same time.
        """
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
        """Admit a host to the job; its number is reserved for the lifetime of the connection."""
        number = hello.get("number")
        if not isinstance(number, int) or number < 0:  # the rendezvous assigns the numbers
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
        """Cancel the oldest handshake from the address that has the most.

        A flood from one address therefore displaces its own connections, not the job's hosts.
        """
        worst = Counter(self._pending.values()).most_common(1)[0][0]
        oldest = next(task for task, who in self._pending.items() if who == worst)
        del self._pending[oldest]  # at once: more may arrive before the task has ended
        oldest.cancel()

    def _turn_away(self, who: str, why: str) -> None:
        if len(self._told) < _MOST_TOLD and who not in self._told:
            self._told.add(who)
            self._tell(f"turned {who} away: {why}")
