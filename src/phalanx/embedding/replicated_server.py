"""The two servers of a part, as a trainer sees them, and its change from one to the other.

If the primary is lost, the trainer asks the backup to take its place, and repeats the calls that
were not answered there. Each update has a token, by which the backup knows those that it has made
already.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from phalanx.embedding.replication import PartKey, Replaced, RoleRegister, Roles
from phalanx.errors import PeerLost, PhalanxError
from phalanx.rpc import calls
from phalanx.rpc.agent import agent
from phalanx.rpc.rref import RRef

_log = logging.getLogger("phalanx")
_parts: dict[PartKey, RRef[Any]] = {}
"""The servers of replicated parts in this process. They stay until RPC ends here."""


def keep_part(key: PartKey, server: RRef[Any]) -> None:
    """Keep a server of this process, so that trainers find it."""
    own = agent()
    if not _parts:
        own.on_close.append(_parts.clear)
    _parts[key] = server


def drop_part(key: PartKey) -> None:
    """Keep a server no longer; references to it still do."""
    _parts.pop(key, None)


def find_part(key: PartKey) -> RRef[Any]:
    """Return the server of a part in this process.

    Raises:
        Replaced: There is none.
    """
    try:
        return _parts[key]
    except KeyError:
        raise Replaced(
            f"part {key.number} of the table is not on worker {agent().id} any more"
        ) from None


def tell_replaced(key: PartKey, former: int) -> None:
    """Tell a former primary that it is not one any more, without waiting for it.

    Otherwise it would notice that with its next change, for which trainers may wait there.
    """
    try:
        calls.rpc_async(former, _read_roles, (key,))
    except PhalanxError:
        _log.debug("worker %d was not told that it is replaced", former, exc_info=True)


def _read_roles(key: PartKey) -> None:
    if (server := _parts.get(key)) is not None:
        server.local_value().read_roles()


class ReplicatedServer:
    """The servers of a part, as a trainer sees them; thread-safe.

    It may be passed to other workers, also to those that join later.

    Args:
        key: The part.
    """

    def __init__(self, key: PartKey) -> None:
        self.key = key
        self._register = RoleRegister(key)
        self._lock = threading.Lock()
        """Guards what follows."""
        self._roles = Roles(0, -1)
        self._current: RRef[Any] | None = None

    def __reduce__(self) -> tuple[type[ReplicatedServer], tuple[PartKey]]:
        return ReplicatedServer, (self.key,)

    @property
    def roles(self) -> Roles:
        """The present roles of the servers; blocks for a query of the store.

        Raises:
            PhalanxError: The store cannot be reached.
        """
        with self._lock:
            return self._register.read()

    @property
    def current(self) -> RRef[Any]:
        """The server to call; blocks for a call the first time.

        Raises:
            PeerLost: All servers of the part are lost.
            PhalanxError: The store cannot be reached.
        """
        with self._lock:
            if self._current is None:
                self._find()
            assert self._current is not None  # it was found
            return self._current

    def start_call(self, method: str, *arguments: object, timeout: float | None) -> ReplicatedCall:
        """Start a call of a method, which is repeated if the server is lost."""
        return ReplicatedCall(self, method, arguments, timeout)

    def replace(self, former: RRef[Any]) -> None:
        """Call another server from now on, because a former one does not answer any more.

        Raises:
            PeerLost: All servers of the part are lost.
            PhalanxError: The store cannot be reached.
        """
        with self._lock:
            if self._current is former:  # else another call has noticed it
                self._find()

    def _find(self) -> None:
        roles = self._register.read()
        while True:
            try:
                self._current, self._roles = self._reach(roles)
            except (PeerLost, Replaced) as error:
                changed = self._register.read()
                if changed == roles:
                    raise error.replace(
                        f"part {self.key.number} of the table: no server with a copy of it is "
                        f"left: {error}: restart the job from its last checkpoint"
                    ) from None
                roles = changed
            else:
                return

    def _reach(self, roles: Roles) -> tuple[RRef[Any], Roles]:
        """Return the primary, or the backup after it has taken the place of a lost primary.

        Also returns the roles with which it is the primary. They may have changed since: the next
        call says so, and `_find` then sees other roles than these.
        """
        primary, backup = agent().peers[roles.primary], roles.backup
        server: RRef[Any]
        if roles != self._roles and not primary.is_unreachable():
            try:
                server = calls.rpc_sync(primary.id, find_part, (self.key,))
            except PeerLost:
                pass
            else:
                return server, roles
        if backup is None:
            primary.check(f"part {self.key.number} of the table")
            raise Replaced(f"part {self.key.number} of the table is not on {primary} any more")
        _log.warning("%s does not answer: calling %s", primary, agent().peers[backup])
        server = calls.rpc_sync(backup, find_part, (self.key,))
        server.rpc_sync().take_over(roles.epoch)
        return server, Roles(roles.epoch + 1, backup)


class ReplicatedCall:
    """A call of a server of a part; if the server is lost, another one is called."""

    def __init__(
        self,
        part: ReplicatedServer,
        method: str,
        arguments: Sequence[object],
        timeout: float | None,
    ) -> None:
        self._part, self._method, self._arguments = part, method, arguments
        self._timeout = timeout
        self._begin()

    def _begin(self) -> None:
        while True:
            self._server = self._part.current
            try:
                server, timeout = self._server, self._timeout
                proxy = server.begin() if timeout is None else server.begin(timeout)
                self._call = getattr(proxy, self._method)(*self._arguments)
            except PeerLost as error:
                self._replace_server(error)
            else:
                return

    def wait(self) -> Any:
        """Block until the call has returned; return its value or raise its exception."""
        while True:
            try:
                return self._call.wait()
            except (PeerLost, Replaced) as error:
                self._replace_server(error)
                self._begin()

    def _replace_server(self, error: PhalanxError) -> None:
        """Have the part call another server, unless the error is not the loss of this one."""
        if not isinstance(error, Replaced) and not self._server.owner_is_lost():
            raise error
        self._part.replace(self._server)
