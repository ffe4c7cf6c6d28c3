"""`EmbeddingServer`, which serves a part of a table to trainers."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.checkpoints import load_local, save_local
from phalanx.embedding.batch import Batch, index_error, prepare_gradients, prepare_indices
from phalanx.embedding.optimizers import RowOptimizer
from phalanx.embedding.replicated_server import tell_replaced
from phalanx.embedding.replication import (
    Change,
    ChangeReceiver,
    ChangeSender,
    PartKey,
    Presence,
    Replaced,
    Replica,
    Roles,
    Update,
    continue_alone,
    list_lost,
)
from phalanx.embedding.sharding import Sharding
from phalanx.embedding.table import EmbeddingTable, TableHandle
from phalanx.errors import CheckpointError, CollectiveTimeout, PeerLost, PhalanxError, UsageError
from phalanx.rpc.agent import agent
from phalanx.rpc.functions import async_execution
from phalanx.rpc.rref import RRef
from phalanx.system.polling import wait_until

COPY_SECONDS = 3600.0
"""The time that a server has to create, write, read or copy its part."""


class TableSpec(NamedTuple):
    """The shape of a server's part and its update settings.

    See `EmbeddingServer` and `EmbeddingTable`.
    """

    name: str
    rows: int
    width: int
    dtype: torch.dtype
    trainers: int | None
    staleness: int | None
    timeout: float

    def __str__(self) -> str:
        trainers = "any" if self.trainers is None else self.trainers
        return (
            f"{self.rows} rows of {self.width} {self.dtype} for {trainers} trainers with "
            f"staleness={self.staleness} and timeout={self.timeout:g}"
        )


class _Waiter:
    """A trainer that waits for the end of its step.

    Args:
        trainer: The number of the trainer.
        step: The number of its step.
        deadline: The deadline, in seconds of the monotonic clock.
    """

    def __init__(self, trainer: int, step: int, deadline: float) -> None:
        self.trainer, self.step, self.deadline = trainer, step, deadline
        self.is_made = False
        """True once the update is made on this server."""
        self.number = 0
        """The number of the last change that the backup must have made then."""
        self.future: torch.futures.Future[int] = torch.futures.Future()
        self.error: PhalanxError | None = None

    def complete(self) -> None:
        """Complete the future; call this without the server's lock, since it sends an answer."""
        if self.error is None:
            self.future.set_result(self.step)
        else:
            self.future.set_exception(self.error)  # type: ignore[arg-type] # the stub is wrong


class EmbeddingServer:
    """Rows of a table, updated by trainers synchronously or within a staleness bound.

    Synchronous (`staleness=None`): the gradients of all trainers for a step are averaged, as in
    data-parallel training, and applied at once; `update` returns when that is done. The table goes
    through the same states as in a single process with all their batches.

    With a bound: each update is applied when it arrives. `update` returns once no trainer is more
    than `staleness` steps behind (stale synchronous parallel: Ho et al., NIPS 2013). A trainer that
    waits for it before step n + 1 sees the updates of all trainers up to step n - `staleness`.

    Trainers whose number is not fixed come by `register_trainer`, and go by `remove_trainer` or
    with their worker. Those that are there count for the steps and for the bound. One that comes
    continues at the step of the others, or of the one that is behind.

    Methods may be called from several threads concurrently.

    Args:
        table: The rows.
        trainers: The number of trainers that update the rows; they are numbered from 0. None:
            trainers come and go.
        staleness: The number of steps that a trainer may be ahead of another; None: synchronous.
        timeout: The time that an update waits for other trainers, in seconds.

    Raises:
        UsageError: `trainers` is less than 1, or the bound is negative.

    Example:
        >>> server = EmbeddingServer(EmbeddingTable(4, 2, SGD(lr=1.0), weight=torch.zeros(4, 2)))
        >>> server.update(torch.tensor([1]), torch.ones(1, 2))
        1
        >>> server.lookup(torch.tensor([1]))
        tensor([[-1., -1.]])
    """

    def __init__(
        self,
        table: EmbeddingTable,
        trainers: int | None = 1,
        *,
        staleness: int | None = None,
        timeout: float = 300.0,
    ) -> None:
        if (trainers is not None and trainers < 1) or (staleness is not None and staleness < 0):
            raise UsageError(
                f"EmbeddingServer: trainers={trainers}, staleness={staleness} given, expected at "
                "least one trainer, and a staleness of None or at least 0"
            )
        self.table = table
        self.trainers, self.staleness, self.timeout = trainers, staleness, timeout
        self._lock = threading.Lock()
        # The lock guards the steps made by each trainer that is there, the gradients for the next
        # step, the waiting trainers, and the replica.
        self._steps = dict.fromkeys(range(trainers or 0), 0)
        self._tokens: dict[int, int] = {}
        self._workers: dict[int, int | None] = {}
        self._next_step = 0
        """The step at which a trainer continues that comes when no other is there."""
        self._gradients: dict[int, Update] = {}
        self._waiters: list[_Waiter] = []
        self._failure: PhalanxError | None = None
        self._timer: threading.Timer | None = None
        self._listens = False
        self._replica: Replica | None = None

    @classmethod
    def create_shard(
        cls,
        sharding: Sharding,
        server: int,
        width: int,
        optimizer: RowOptimizer | None = None,
        *,
        trainers: int | None = 1,
        staleness: int | None = None,
        timeout: float = 300.0,
        dtype: torch.dtype = torch.float32,
        name: str = "table",
        weight: Callable[[Tensor], Tensor] | None = None,
    ) -> EmbeddingServer:
        """Create a server with a table for its rows of a sharding.

        `weight` is a function from the indices of rows to their initial values. The other
        arguments, and the errors, are those of `EmbeddingTable` and of this class.
        """
        initial = None if weight is None else weight(sharding.list_rows(server))
        table = EmbeddingTable(
            sharding.count_rows(server), width, optimizer, dtype=dtype, name=name, weight=initial
        )
        return cls(table, trainers, staleness=staleness, timeout=timeout)

    def handle(self) -> TableHandle:
        """Return the handle by which processes of this host open the table."""
        return self.table.handle

    def spec(self) -> TableSpec:
        """Return the shape and the update settings, for trainers."""
        table = self.table
        return TableSpec(
            table.name,
            table.rows,
            table.width,
            table.dtype,
            self.trainers,
            self.staleness,
            self.timeout,
        )

    def optimizer(self) -> RowOptimizer:
        """Return the optimizer of the rows."""
        return self.table.optimizer

    def lookup(self, indices: Tensor) -> Tensor:
        """Return the rows of these indices, like `EmbeddingTable.gather`."""
        replica = self._replica
        if replica is not None and not replica.is_primary:
            with self._lock:  # it may just be taking the place, and others know that already
                replica.check_primary(self.table.name)
        return self.table.gather(indices)

    def update(self, indices: Tensor, gradients: Tensor, trainer: int = 0) -> int:
        """Make a trainer's next step with its gradients; each step is one call, even without rows.

        Blocks until all trainers have made the step (synchronous), or until no trainer is too far
        behind. The gradients of a duplicate row are summed.

        Returns:
            The number of steps that this trainer has made.

        Raises:
            UsageError: An index is out of range, or an argument is invalid. Nothing is updated, and
                the step is not made.
            CollectiveTimeout: Trainers are missing; the message names them. In synchronous mode the
                gradients of the trainer that timed out are dropped, and nothing is updated.
            PeerLost: A trainer has died.
            PhalanxError: A row could not be updated; this update and all later ones raise it.
        """
        step: int = self.begin_update(indices, gradients, trainer).wait()
        return step

    @async_execution
    def begin_update(
        self, indices: Tensor, gradients: Tensor, trainer: int = 0, token: int = 0
    ) -> torch.futures.Future[int]:
        """Start `update` without waiting, and return a future of the number of steps.

        If another worker calls it (`rref.rpc_sync().begin_update(...)`), the call returns the
        number itself, and no thread of this worker waits meanwhile.

        Args:
            indices: Row indices.
            gradients: Their gradients.
            trainer: The number of the trainer.
            token: A number that the trainer has not used before, or that of its last update, which
                is not made again. 0 for none.

        Raises:
            UsageError: As in `update`; the future raises errors that occur later.
            PeerLost: As in `update`.
            PhalanxError: As in `update`.
        """
        indices, gradients = self._prepare(indices, gradients, trainer)
        if self.staleness is None and self.trainers != 1:
            # A caller in this process may change them before the last trainer calls.
            indices, gradients = indices.clone(), gradients.clone()
        with self._lock:
            self._check_call(trainer)
            is_made = token != 0 and token == self._tokens.get(trainer)
            if not is_made:
                self._check_has_no_gradients(trainer)
        # Only a copy needs the order of the updates.
        is_unordered = self.staleness is not None and self._replica is None
        if is_unordered and not is_made:
            self.table.update(indices, gradients)
        with self._lock:
            self._check_call(trainer)  # another server may have taken the place of this one
            step = self._steps[trainer] + (not is_made)
            self._waiters.append(_Waiter(trainer, step, time.monotonic() + self.timeout))
            waiter = self._waiters[-1]
            if is_unordered and not is_made:
                self._steps[trainer], self._tokens[trainer] = step, token
            elif not is_made:
                self._gradients[trainer] = Update(trainer, indices, gradients, token)
                self._make_complete_step()
            ended = self._pop_finished()
            self._start_timer()
        _complete(ended)
        return waiter.future

    def _check_call(self, trainer: int) -> None:
        if self._replica is not None:
            self._replica.check_primary(self.table.name)
        self._check_failure()
        self._check_trainer(trainer)

    def _check_has_no_gradients(self, trainer: int) -> None:
        if trainer in self._gradients:
            raise UsageError(
                f"table {self.table.name!r}: trainer {trainer} has already sent its gradients "
                f"for step {self._steps[trainer] + 1}: do two trainers have the same number?"
            )

    def _make_complete_step(self) -> None:
        """Make the step whose gradients are there: in synchronous mode, those of all trainers."""
        if not self._gradients or (
            self.staleness is None and len(self._gradients) < len(self._steps)
        ):
            return
        updates = [self._gradients[each] for each in sorted(self._gradients)]
        self._gradients.clear()
        self._make_step(updates)
        if self._failure is None:
            self._send(updates)

    def _make_step(self, updates: Sequence[Update]) -> None:
        """Make a step with the gradients of some trainers, in the order of the trainers."""
        try:
            batches = [Batch(each.rows).addresses(each.gradients) for each in updates]
            self.table.update_batches(batches, len(updates))
        except PhalanxError as error:
            self._failure = error
            return
        for each in updates:
            self._steps[each.trainer] += 1
            self._tokens[each.trainer] = each.token

    # ---- trainers that come and go ----

    def register_trainer(self, trainer: int, worker: int | None) -> None:
        """Register a trainer; if its worker is lost, so is the trainer.

        Args:
            trainer: The number of the trainer.
            worker: The id of its worker of `phalanx.rpc`, or None if it is not a worker.

        Raises:
            UsageError: The number is not that of a trainer, or in use.
        """
        with self._lock:
            if self._replica is not None:
                self._replica.check_primary(self.table.name)
            if self.trainers is not None:
                self._check_trainer(trainer)
            elif trainer < 0 or self._workers.get(trainer, worker) != worker:
                raise UsageError(
                    f"table {self.table.name!r}: trainer={trainer} given, expected a number that "
                    f"no other trainer has; worker {self._workers.get(trainer)} has it"
                )
            change = Presence(trainer, is_present=True, worker=worker)
            self._set_presence(change)
            self._send(change)
        self._wait_for_backup()
        self._handle_lost_trainers()

    def remove_trainer(self, trainer: int) -> None:
        """Go on without a trainer; its gradients for a step that is not made yet are dropped.

        Raises:
            UsageError: The number of trainers is fixed.
            Replaced: Another server has taken the place of this one.
        """
        if self.trainers is not None:
            raise UsageError(
                f"table {self.table.name!r}: trainer {trainer} of {self.trainers} can't leave: "
                "the number of trainers is fixed; create the servers with trainers=None"
            )
        self._remove(trainer)
        self._wait_for_backup()

    def _remove(self, trainer: int) -> None:
        with self._lock:
            if self._replica is not None:
                self._replica.check_primary(self.table.name)
            if trainer not in self._steps:
                return
            change = Presence(trainer, is_present=False, worker=None)
            self._set_presence(change)
            self._send(change)
            self._make_complete_step()
            ended = self._pop_finished()
        _complete(ended)

    def _set_presence(self, change: Presence) -> None:
        trainer, is_present, worker = change
        if is_present:
            if trainer not in self._steps:
                self._steps[trainer] = self._common_step()
            self._workers[trainer] = worker
            if worker is not None and not self._listens:
                self._listens = True
                server_ref = weakref.ref(self)
                agent().loss_listeners.append(lambda *_: _handle_lost_trainers(server_ref))
        elif trainer in self._steps:
            self._next_step = self._common_step()
            for each in (self._steps, self._workers, self._tokens, self._gradients):
                each.pop(trainer, None)

    def _common_step(self) -> int:
        """Return the step that all trainers have made."""
        return min(self._steps.values(), default=self._next_step)

    def _handle_lost_trainers(self) -> None:
        with self._lock:
            if self._replica is not None and not self._replica.is_primary:
                return  # the primary tells this server
            lost = list_lost(self._workers)
        for trainer, reason in lost:
            if self.trainers is None:
                with contextlib.suppress(Replaced):  # the other server removes it
                    self._remove(trainer)
            else:
                self.mark_lost(trainer, reason)

    # ---- copies on a second server ----

    def serve(self, key: PartKey, roles: Roles) -> None:
        """Become a server of a replicated part.

        Args:
            key: The part.
            roles: The servers of the part.
        """
        with self._lock:
            self._replica = Replica(key, roles)

    def set_backup(self, backup: RRef[EmbeddingServer]) -> None:
        """Copy this part to another server, and send all further changes to that too.

        Updates wait meanwhile. A former backup is not one any more.

        Raises:
            UsageError: The part is not replicated.
            Replaced: This server is not the primary.
            PhalanxError: The other server is lost, or has another shape or optimizer.
        """
        with self._lock:
            replica = self._require_replica()
            replica.check_primary(self.table.name)
            self._check_failure()
            worker = backup.owner().id
            if worker == agent().id:
                raise UsageError(
                    f"table {self.table.name!r}: a server was given itself as its backup"
                )
            roles = Roles(replica.roles.epoch + 1, agent().id, worker)
            trainers = self._steps, self._tokens, self._workers, self._next_step
            proxy = backup.rpc_sync(COPY_SECONDS)
            proxy.begin_copy(replica.key, roles, self.table.state_dict(), trainers)
            replica.change_roles(agent().id, worker, self.table.name)
            server_ref = weakref.ref(self)
            replica.sender = ChangeSender(
                backup,
                roles.epoch,
                self.timeout,
                lambda: _continue(server_ref),
                lambda error: _drop_backup(server_ref, roles.epoch, error),
            )
            ended = self._confirm_made()
        _complete(ended)

    def begin_copy(
        self, key: PartKey, roles: Roles, state: dict[str, Any], trainers: tuple[Any, ...]
    ) -> None:
        """Become the backup of a server with this state.

        Args:
            key: The part.
            roles: The servers of the part, as they will be.
            state: The rows.
            trainers: The trainers and their steps.
        """
        self.table.load_state_dict(state)
        with self._lock:
            self._steps, self._tokens, workers, self._next_step = trainers
            self._replica = Replica(key, roles)
            self._gradients.clear()
            self._failure = None
            for trainer, worker in workers.items():
                self._set_presence(Presence(trainer, is_present=True, worker=worker))

    def replicate(self, epoch: int, number: int, change: Change) -> None:
        """Make a change of the primary, after the ones with smaller numbers.

        Raises:
            Replaced: This server has taken the place of the primary.
        """
        with self._lock:
            replica = self._require_replica()
            if replica.is_primary or replica.roles.epoch != epoch:
                raise Replaced(
                    f"table {self.table.name!r}: worker {agent().id} is not the backup of the "
                    "server that has sent an update"
                )
            for each in replica.receiver.receive(number, change):
                if isinstance(each, Presence):
                    self._set_presence(each)
                else:
                    self._make_step(each)
            self._check_failure()

    def take_over(self, epoch: int) -> None:
        """Become the primary of this part, if the roles are still those of an epoch.

        Raises:
            Replaced: The roles have changed.
            PhalanxError: The store cannot be reached.
        """
        with self._lock:
            replica = self._require_replica()
            if replica.roles.epoch != epoch:
                replica.check_primary(self.table.name)
                return
            former = replica.roles.primary
            replica.change_roles(agent().id, None, self.table.name)
            replica.receiver = ChangeReceiver()  # without updates that the primary has not answered
        tell_replaced(replica.key, former)
        self._handle_lost_trainers()

    def hand_over(self) -> None:
        """Make the backup the primary; calls that are not answered yet raise `Replaced`.

        Raises:
            UsageError: There is no backup.
            PhalanxError: The backup is lost.
        """
        with self._lock:
            replica = self._require_replica()
            replica.check_primary(self.table.name)
            if replica.sender is None:
                raise UsageError(f"table {self.table.name!r}: this server has no backup")
            replica.sender.backup.rpc_sync(COPY_SECONDS).take_over(replica.roles.epoch)
        self.read_roles()

    def read_roles(self) -> None:
        """Read the present roles; if this server is not the primary, waiting calls are told so."""
        with self._lock:
            replica = self._require_replica()
            was_primary, replica.roles = replica.is_primary, replica.register.read()
            if replica.is_primary or not was_primary:
                return
            replica.sender = None
            ended = self._fail_waiters(self._replaced_error())
        _complete(ended)

    def _require_replica(self) -> Replica:
        if self._replica is None:
            raise UsageError(
                f"table {self.table.name!r} is not replicated: create its servers by "
                "embedding.deploy(..., replicated=True)"
            )
        return self._replica

    def _replaced_error(self) -> Replaced:
        return Replaced(f"table {self.table.name!r}: another server serves this part now")

    def _wait_for_backup(self) -> None:
        """Wait until the backup has all changes so far, or there is none any more.

        Raises:
            Replaced: The backup has taken the place of this server.
            CollectiveTimeout: The backup does not answer.
        """
        with self._lock:
            replica = self._replica
            sender = None if replica is None else replica.sender
            number = 0 if sender is None else sender.sent
        if replica is None or sender is None:
            return
        # The call of the backup has the same timeout, after which there is no backup any more.
        if not wait_until(
            lambda: replica.sender is not sender or sender.answered() >= number, 2 * self.timeout
        ):
            raise CollectiveTimeout(
                f"table {self.table.name!r}: the server with the copy has not answered within "
                f"{2 * self.timeout:g} s",
                seconds=2 * self.timeout,
            )
        replica.check_primary(self.table.name)

    def _send(self, change: Change) -> None:
        if self._replica is not None and self._replica.sender is not None:
            self._replica.sender.send(change)

    def _drop_backup(self, epoch: int, error: PhalanxError) -> None:
        """Go on without the backup, or fail if the backup does without this server."""
        with self._lock:
            replica = self._require_replica()
            if replica.roles.epoch != epoch:
                return
            try:
                continue_alone(replica, error, self.table.name)
                ended = self._confirm_made()
            except PhalanxError as reason:
                ended = self._fail_waiters(reason)
        _complete(ended)

    def _confirm_made(self) -> list[_Waiter]:
        """Return the waiters that end because a new backup has all updates so far, or none must."""
        for each in self._waiters:
            each.number = 0
        return self._pop_finished()

    def _continue(self) -> None:
        with self._lock:
            ended = self._pop_finished()
        _complete(ended)

    def mark_lost(self, trainer: int, reason: str) -> None:
        """Mark a trainer as dead: pending updates and all later ones raise `PeerLost`.

        Args:
            trainer: The number of the trainer.
            reason: The reason for the error message, such as its name, its pid and the signal.
        """
        with self._lock:
            self._failure = PeerLost(
                f"table {self.table.name!r}: trainer {trainer} is lost: {reason}", ranks=[trainer]
            )
            ended = self._fail_waiters(self._failure)
        _complete(ended)

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.replace(str(self._failure))

    def _check_trainer(self, trainer: int) -> None:
        if trainer not in self._steps:
            expected = (
                f"0 to {self.trainers - 1}"
                if self.trainers is not None
                else f"one of those that are there, {sorted(self._steps)}; a trainer comes with "
                "its ShardedEmbeddingBag, and goes with its process"
            )
            raise UsageError(
                f"table {self.table.name!r}: trainer={trainer} given, expected {expected}"
            )

    def _prepare(self, indices: Tensor, gradients: Tensor, trainer: int) -> tuple[Tensor, Tensor]:
        flat = prepare_indices(self.table.name, indices)
        shape = len(flat), self.table.width
        name, origin = self.table.name, f" from trainer {trainer}"
        prepared = prepare_gradients(name, gradients, shape, self.table.dtype, origin)
        if len(flat):
            for extreme in torch.aminmax(flat):
                if not 0 <= (index := int(extreme)) < self.table.rows:
                    raise index_error(self.table.name, index, self.table.rows)
        return flat, prepared

    def _pop_finished(self) -> list[_Waiter]:
        """Remove and return the waiters that have succeeded or failed."""
        if self._failure is not None:
            return self._fail_waiters(self._failure)
        limit = self._common_step() + (self.staleness or 0)
        sent, answered = (0, 0) if self._replica is None else self._replica.progress()
        ended, waiting = list[_Waiter](), list[_Waiter]()
        for each in self._waiters:
            made = self._steps.get(each.trainer)
            if made is None:  # the trainer has gone
                each.error = self._gone_error(each.trainer)
                ended.append(each)
                continue
            if each.step <= made and not each.is_made:
                each.is_made, each.number = True, sent
            is_ended = each.is_made and each.step <= limit and each.number <= answered
            (ended if is_ended else waiting).append(each)
        self._waiters = waiting
        return ended

    def _gone_error(self, trainer: int) -> PeerLost:
        return PeerLost(
            f"table {self.table.name!r}: trainer {trainer} has been removed", ranks=[trainer]
        )

    def _fail_waiters(self, error: PhalanxError) -> list[_Waiter]:
        ended, self._waiters = self._waiters, []
        self._gradients.clear()
        for each in ended:
            each.error = error.replace(str(error))
        return ended

    def _start_timer(self) -> None:
        """Start the timer that enforces the deadlines of the waiters."""
        if self._waiters and self._timer is None:
            seconds = max(0.0, self._waiters[0].deadline - time.monotonic())
            self._timer = threading.Timer(seconds, _expire, (weakref.ref(self),))
            self._timer.daemon = True
            self._timer.start()

    def _expire(self) -> None:
        now = time.monotonic()
        with self._lock:
            self._timer = None
            expired = [each for each in self._waiters if each.deadline <= now]
            for each in expired:
                each.error = self._timeout_error(each)
            for each in expired:
                self._gradients.pop(each.trainer, None)
                self._waiters.remove(each)
            self._start_timer()
        _complete(expired)

    def _timeout_error(self, waiter: _Waiter) -> CollectiveTimeout:
        behind = waiter.step - (self.staleness or 0)
        missing = [
            other
            for other in sorted(self._steps)
            if self._steps[other] < behind and other not in self._gradients
        ]
        return CollectiveTimeout(
            f"table {self.table.name!r}: trainer {waiter.trainer} has waited {self.timeout:g} s in "
            f"step {waiter.step} for trainers {missing}, which have made "
            f"{[self._steps[other] for other in missing]} steps",
            ranks=missing,
            seconds=self.timeout,
        )

    def save(self, path: str) -> None:
        """Write the rows, their state and the trainers' step counts to a separate directory.

        The format is that of `phalanx.train.Checkpointer`: a state that `save` wrote there before
        is replaced, whole or not at all. A concurrent update of a row is included completely or not
        at all. To save a state between two steps, call this while no update is in progress.

        Raises:
            CheckpointError: The directory cannot be written.
        """
        with self._lock:
            steps = torch.tensor(
                [self._common_step()]
                if self.trainers is None
                else [self._steps[trainer] for trainer in range(self.trainers)],
                device="cpu",
            )
        state = {"table": self.table.state_dict(), "steps": steps}
        try:
            save_local(Path(path), self.table.step, state)
        except CheckpointError as error:
            raise CheckpointError(f"table {self.table.name!r}: {error}") from error

    def load(self, path: str) -> None:
        """Replace the rows, their state and the step counts by those that `save` wrote.

        Trainers that come and go continue at the same step.

        Raises:
            CheckpointError: The directory cannot be read, or has another shape, optimizer or number
                of trainers. Nothing is replaced.
        """
        count = torch.empty(self.trainers or 1, dtype=torch.int64, device="meta")
        like = {"table": self.table.describe_state(), "steps": count}
        try:
            state = load_local(Path(path), like)
        except (CheckpointError, UsageError) as error:
            raise CheckpointError(
                f"table {self.table.name!r}: {path} cannot be loaded: {error}"
            ) from error
        self.table.load_state_dict(state["table"])
        with self._lock:
            steps = state["steps"].tolist()
            if self.trainers is None:
                (self._next_step,) = steps
                self._steps = dict.fromkeys(self._steps, self._next_step)
            else:
                self._steps = dict(enumerate(steps))
            self._gradients.clear()
            self._failure = None
            sender = None if self._replica is None else self._replica.sender
        if sender is not None:
            self.set_backup(sender.backup)


def _complete(waiters: Sequence[_Waiter]) -> None:
    for each in waiters:
        each.complete()


def _expire(server_ref: weakref.ref[EmbeddingServer]) -> None:
    if (server := server_ref()) is not None:
        server._expire()


def _continue(server_ref: weakref.ref[EmbeddingServer]) -> None:
    if (server := server_ref()) is not None:
        server._continue()


def _drop_backup(server_ref: weakref.ref[EmbeddingServer], epoch: int, error: PhalanxError) -> None:
    if (server := server_ref()) is not None:
        server._drop_backup(epoch, error)


def _handle_lost_trainers(server_ref: weakref.ref[EmbeddingServer]) -> None:
    if (server := server_ref()) is not None:
        server._handle_lost_trainers()
