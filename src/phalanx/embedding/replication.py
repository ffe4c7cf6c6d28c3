"""The two servers of a part of a table: their roles, and the updates that one sends to the other.

One server of a part, the primary, gets the trainers' updates. It makes each of them, sends it to
the other one, the backup, and answers when that has it too. Both make the same updates in the same
order, so they have the same rows, bit for bit (primary-backup replication: Alsberg and Day 1976).

The store of the workers records the roles. Each change of them takes the next number, an epoch, by
a compare-and-set. So the two servers cannot both decide for themselves when they have lost each
other: either the primary goes on without its backup, or the backup takes the place of the primary.
The one that comes second is told so, and answers no trainer any more.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.errors import PhalanxError
from phalanx.rpc.agent import agent
from phalanx.rpc.rref import RRef

_log = logging.getLogger("phalanx")


class PartKey(NamedTuple):
    """The name of a part that no other part of any table has.

    Attributes:
        table: A random text, the same for all parts of a table.
        number: The number of the part.
    """

    table: str
    number: int


class Roles(NamedTuple):
    """The servers of a part.

    Attributes:
        epoch: The number of this assignment, from 1; 0 before the first.
        primary: The id of the worker that answers calls.
        backup: The id of the worker with the copy; None if there is no copy.
    """

    epoch: int
    primary: int
    backup: int | None = None


class Replaced(PhalanxError):  # noqa: N818 - a state of the server
    """Another server has taken the place of this one."""


class RoleRegister:
    """The roles of the servers of a part, in the store of the workers.

    Args:
        key: The part.
    """

    def __init__(self, key: PartKey) -> None:
        self._prefix = f"embedding/{key.table}/{key.number}"
        self._latest = Roles(0, -1)

    def read(self) -> Roles:
        """Return the present roles.

        Raises:
            PhalanxError: The store cannot be reached.
        """
        try:
            while agent().store.check([key := f"{self._prefix}/{self._latest.epoch + 1}"]):
                self._latest = Roles(*json.loads(agent().store.get(key)))
        except RuntimeError as error:  # the type depends on the store
            raise _store_error(error) from error
        return self._latest

    def change(self, roles: Roles) -> Roles:
        """Record the roles of the next epoch; return those of it that were recorded first.

        Raises:
            PhalanxError: The store cannot be reached.
        """
        key, text = f"{self._prefix}/{roles.epoch}", json.dumps(roles)
        try:
            return Roles(*json.loads(agent().store.compare_set(key, "", text)))
        except RuntimeError as error:
            raise _store_error(error) from error


def _store_error(error: RuntimeError) -> PhalanxError:
    return PhalanxError(
        "the servers of a replicated table cannot change their roles, because the store of the "
        f"workers cannot be reached: {error}"
    )


class Update(NamedTuple):
    """An update by a trainer.

    Attributes:
        trainer: The number of the trainer.
        rows: The indices of the rows.
        gradients: The gradients of the rows.
        token: The trainer's number for the update; 0 if it has none.
    """

    trainer: int
    rows: Tensor
    gradients: Tensor
    token: int


class Presence(NamedTuple):
    """A trainer that comes or goes.

    Attributes:
        trainer: The number of the trainer.
        is_present: True if it comes.
        worker: The id of its worker; None if it has none.
    """

    trainer: int
    is_present: bool
    worker: int | None


Change = list[Update] | Presence
"""A message to a backup: the updates of a step, or a trainer that comes or goes."""


class ChangeSender:
    """The changes that a primary sends to its backup.

    Args:
        backup: The backup.
        epoch: The epoch of its role.
        timeout: The time that the backup has to answer, in seconds.
        on_answer: Called, in any thread, when more changes have been answered.
        on_failure: Called once, in a thread of its own, with the error of the first failed call.
    """

    def __init__(
        self,
        backup: RRef[Any],
        epoch: int,
        timeout: float,
        on_answer: Callable[[], None],
        on_failure: Callable[[PhalanxError], None],
    ) -> None:
        self.backup, self._epoch, self._timeout = backup, epoch, timeout
        self._on_answer, self._on_failure = on_answer, on_failure
        self._lock = threading.Lock()
        """Guards what follows; answers arrive in RPC threads."""
        self._unanswered: set[int] = set()
        self._has_failed = False
        self.sent = 0
        """The number of changes that were sent."""

    def send(self, change: Change) -> None:
        """Send a change, which the backup makes after all that were sent before it."""
        with self._lock:
            self.sent += 1
            number = self.sent
            self._unanswered.add(number)
        sending = [threading.get_ident()]

        def end(done: torch.futures.Future[Any]) -> None:
            # A call that fails at once calls back here, within the lock of the server.
            self._end(number, done, may_call=sending != [threading.get_ident()])

        proxy = self.backup.rpc_async(self._timeout)
        proxy.replicate(self._epoch, number, change).add_done_callback(end)
        sending.clear()

    def _end(self, number: int, done: torch.futures.Future[Any], may_call: bool) -> None:
        try:
            done.value()
        except PhalanxError as error:
            with self._lock:
                is_first, self._has_failed = not self._has_failed, True
            if is_first:  # asks the store, for which no thread of RPC should wait
                threading.Thread(
                    target=self._on_failure, args=(error,), name="phalanx-backup", daemon=True
                ).start()
            return
        with self._lock:
            self._unanswered.discard(number)
        if may_call:
            self._on_answer()

    def answered(self) -> int:
        """Return the number up to which the backup has all changes."""
        with self._lock:
            return min(self._unanswered, default=self.sent + 1) - 1


class ChangeReceiver:
    """The changes that a backup gets: each is made after those that were sent before it."""

    def __init__(self) -> None:
        self._made = 0
        self._early: dict[int, Change] = {}

    def receive(self, number: int, change: Change) -> list[Change]:
        """Keep a change; return those that can be made now, in their order."""
        self._early[number] = change
        ready = list[Change]()
        while (following := self._early.pop(self._made + 1, None)) is not None:
            self._made += 1
            ready.append(following)
        return ready


class Replica:
    """The part that a server has in the replication of its rows; the server's lock guards it.

    Args:
        key: The part of the table.
        roles: The servers of the part.
    """

    def __init__(self, key: PartKey, roles: Roles) -> None:
        self.key, self.roles = key, roles
        self.register = RoleRegister(key)
        self.receiver = ChangeReceiver()
        self.sender: ChangeSender | None = None

    @property
    def is_primary(self) -> bool:
        """True if this server answers trainers."""
        return self.roles.primary == agent().id

    def check_primary(self, name: str) -> None:
        """Raise `Replaced` if this server does not answer trainers.

        Args:
            name: The name of the table.
        """
        if not self.is_primary:
            raise Replaced(
                f"table {name!r}: worker {self.roles.primary} has the place of worker {agent().id}"
            )

    def progress(self) -> tuple[int, int]:
        """Return how many changes were sent to the backup, and up to which it has them all."""
        return (0, 0) if self.sender is None else (self.sender.sent, self.sender.answered())

    def change_roles(self, primary: int, backup: int | None, name: str) -> None:
        """Record the roles of the next epoch.

        Raises:
            Replaced: Another server has recorded other roles before.
            PhalanxError: The store cannot be reached.
        """
        wanted = Roles(self.roles.epoch + 1, primary, backup)
        recorded = self.register.change(wanted)
        if recorded != wanted:
            self.roles, self.sender = recorded, None
            raise Replaced(
                f"table {name!r}: worker {recorded.primary} has the place of worker {agent().id}"
            )
        self.roles = wanted


def continue_alone(replica: Replica, error: PhalanxError, name: str) -> None:
    """Go on without the backup, which is lost; log why.

    Raises:
        Replaced: The backup has taken the place of this server.
        PhalanxError: The store cannot be reached.
    """
    replica.change_roles(agent().id, None, name)
    replica.sender = None
    _log.warning(
        "table %r: continues without a copy of part %d, since the server with the copy is lost "
        "(%s): give it another one by embedding.replicate",
        name,
        replica.key.number,
        error,
    )


def list_lost(workers: dict[int, int | None]) -> Sequence[tuple[int, str]]:
    """Return the trainers whose workers are lost, with the reasons.

    Args:
        workers: The worker of each trainer.
    """
    return [
        (trainer, reason)
        for trainer, worker in workers.items()
        if worker is not None and (reason := agent().peers[worker].loss_reason)
    ]
