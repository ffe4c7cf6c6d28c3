"""`Server`: a part of a table, which serves trainers."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from phalanx.embedding.arguments import checked_gradients, checked_indices, out_of_range
from phalanx.embedding.gradients import Batch
from phalanx.embedding.optimizers import Rule
from phalanx.embedding.sharding import Shards
from phalanx.embedding.table import Table, TableHandle
from phalanx.errors import CheckpointError, CollectiveTimeout, PeerLost, PhalanxError, UsageError
from phalanx.rpc import peer_loss
from phalanx.rpc.functions import async_execution

__all__ = ["Server", "Terms"]


class Terms(NamedTuple):
    """The shape of a server's part and its update settings; see `Server` and `Table`."""

    name: str
    rows: int
    width: int
    dtype: torch.dtype
    trainers: int
    staleness: int | None
    timeout: float

    def __str__(self) -> str:
        return (
            f"{self.rows} rows of {self.width} {self.dtype} for {self.trainers} trainers with "
            f"staleness={self.staleness} and timeout={self.timeout:g}"
        )


class _Waiter:
    """A trainer that waits for the end of its step.

    Args:
        trainer: The number of the trainer.
        step: The number of its step.
        end: The deadline, in seconds of the monotonic clock.
    """

    def __init__(self, trainer: int, step: int, end: float) -> None:
        self.trainer, self.step, self.end = trainer, step, end
        self.future: torch.futures.Future[int] = torch.futures.Future()
        self.error: PhalanxError | None = None

    def settle(self) -> None:
        """Complete the future; call this without the server's lock, since it sends an answer."""
        if self.error is None:
            self.future.set_result(self.step)
        else:
            self.future.set_exception(self.error)  # type: ignore[arg-type] # the stub is wrong


class Server:
    """Rows of a table, updated by trainers synchronously or within a staleness bound.

    Synchronous (`staleness=None`): the gradients of all trainers for a step are averaged, as in
    data-parallel training, and applied at once; `update` returns when that is done. The table goes
    through the same states as in a single process with all their batches.

    With a bound: each update is applied when it arrives. `update` returns once no trainer is more
    than `staleness` steps behind (stale synchronous parallel: Ho et al., NIPS 2013). A trainer that
    waits for it before step n + 1 sees the updates of all trainers up to step n - `staleness`.

    Methods may be called from several threads concurrently.

    Args:
        table: The rows.
        trainers: The number of trainers that update the rows; they are numbered from 0.
        staleness: The number of steps that a trainer may be ahead of another; None: synchronous.
        timeout: The time that an update waits for other trainers, in seconds.

    Raises:
        UsageError: There is no trainer, or the bound is negative.
    """

    def __init__(
        self,
        table: Table,
        trainers: int = 1,
        *,
        staleness: int | None = None,
        timeout: float = 300.0,
    ) -> None:
        if trainers < 1 or (staleness is not None and staleness < 0):
            raise UsageError(
                f"Server: trainers={trainers}, staleness={staleness} given, expected at least one "
                "trainer, and no bound or one of 0 or more"
            )
        self.table = table
        self.trainers, self.staleness, self.timeout = trainers, staleness, timeout
        self._lock = threading.Lock()
        # The lock guards the steps made by each trainer, the gradients for the next step, and the
        # waiting trainers.
        self._made = [0] * trainers
        self._given: dict[int, tuple[Tensor, Tensor]] = {}
        self._waiters: list[_Waiter] = []
        self._failure: PhalanxError | None = None
        self._timer: threading.Timer | None = None

    @classmethod
    def of_shard(
        cls,
        shards: Shards,
        server: int,
        width: int,
        rule: Rule | None = None,
        *,
        trainers: int = 1,
        staleness: int | None = None,
        timeout: float = 300.0,
        dtype: torch.dtype = torch.float32,
        name: str = "table",
        weight: Callable[[Tensor], Tensor] | None = None,
    ) -> Server:
        """Create a server with a table for its rows of a split.

        `weight` is a function from the indices of rows to their initial values. The other
        arguments, and the errors, are those of `Table` and of this class.
        """
        first = None if weight is None else weight(shards.rows_of(server))
        table = Table(shards.count(server), width, rule, dtype=dtype, name=name, weight=first)
        return cls(table, trainers, staleness=staleness, timeout=timeout)

    def handle(self) -> TableHandle:
        """Return the handle by which processes of this host open the table."""
        return self.table.handle

    def terms(self) -> Terms:
        """Return the shape and the update settings, for trainers."""
        table = self.table
        return Terms(
            table.name,
            table.rows,
            table.width,
            table.dtype,
            self.trainers,
            self.staleness,
            self.timeout,
        )

    def lookup(self, indices: Tensor) -> Tensor:
        """Return the rows of these indices, like `Table.gather`."""
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
        self, indices: Tensor, gradients: Tensor, trainer: int = 0
    ) -> torch.futures.Future[int]:
        """Start `update` without waiting, and return a future of the number of steps.

        If another worker calls it (`rref.rpc_sync().begin_update(...)`), the call returns the
        number itself, and no thread of this worker waits meanwhile.

        Raises:
            UsageError: As in `update`; the future raises errors that occur later.
            PeerLost: As in `update`.
            PhalanxError: As in `update`.
        """
        indices, gradients = self._checked(indices, gradients, trainer)
        with self._lock:
            self._check_failure()
            if self.staleness is None and trainer in self._given:
                raise UsageError(
                    f"table {self.table.name!r}: trainer {trainer} has given its gradients for "
                    f"step {self._made[trainer] + 1} already: two trainers with one number?"
                )
        if self.staleness is not None:
            self.table.update(indices, gradients)
        elif self.trainers > 1:
            # A caller in this process may change them before the last trainer arrives.
            indices, gradients = indices.clone(), gradients.clone()
        with self._lock:
            waiter = _Waiter(trainer, self._made[trainer] + 1, time.monotonic() + self.timeout)
            self._waiters.append(waiter)
            if self.staleness is None:
                self._given[trainer] = indices, gradients
                if len(self._given) == self.trainers:
                    self._apply()
            else:
                self._made[trainer] += 1
            ended = self._served()
            self._arm()
        for each in ended:
            each.settle()
        return waiter.future

    def enrol(self, trainer: int, worker: int | None) -> None:
        """Register the worker of `phalanx.rpc` that a trainer is; if it is lost, so is the trainer.

        Args:
            trainer: The number of the trainer.
            worker: The worker's id, or None if the trainer is not a worker.
        """
        self._check_trainer(trainer)
        if worker is None:
            return
        here = weakref.ref(self)

        def lost(one: int) -> None:
            if one == worker and (server := here()) is not None:
                server.lose(trainer, peer_loss.get_loss_reason(one))

        peer_loss.add_listener(lost)

    def lose(self, trainer: int, why: str) -> None:
        """Mark a trainer as dead: pending updates and all later ones raise `PeerLost`.

        Args:
            trainer: The number of the trainer.
            why: The reason for the error message, such as its name, its pid and the signal.
        """
        with self._lock:
            self._failure = PeerLost(f"table {self.table.name!r}: trainer {trainer} is lost: {why}")
            ended = self._failed(self._failure)
        for each in ended:
            each.settle()

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def _check_trainer(self, trainer: int) -> None:
        if not 0 <= trainer < self.trainers:
            raise UsageError(
                f"table {self.table.name!r}: trainer={trainer} given, expected 0 to "
                f"{self.trainers - 1}"
            )

    def _checked(self, indices: Tensor, gradients: Tensor, trainer: int) -> tuple[Tensor, Tensor]:
        self._check_trainer(trainer)
        flat = checked_indices(self.table.name, indices)
        shape = len(flat), self.table.width
        name, giver = self.table.name, f" from trainer {trainer}"
        checked = checked_gradients(name, gradients, shape, self.table.dtype, giver)
        if len(flat):
            for edge in torch.aminmax(flat):
                if not 0 <= (index := int(edge)) < self.table.rows:
                    raise out_of_range(self.table.name, index, self.table.rows)
        return flat, checked

    def _apply(self) -> None:
        """Make a synchronous step with all trainers' gradients, in the order of the trainers."""
        given = [self._given[trainer] for trainer in range(self.trainers)]
        self._given.clear()
        try:
            batches = [Batch(rows).at(gradients) for rows, gradients in given]
            self.table.update_all(batches, self.trainers)
        except PhalanxError as error:
            self._failure = error
        else:
            self._made = [made + 1 for made in self._made]

    def _served(self) -> list[_Waiter]:
        """Remove and return the waiters whose wait has ended, by success or by failure."""
        if self._failure is not None:
            return self._failed(self._failure)
        least = min(self._made) + (self.staleness or 0)
        ended = [each for each in self._waiters if each.step <= least]
        self._waiters = [each for each in self._waiters if each.step > least]
        return ended

    def _failed(self, error: PhalanxError) -> list[_Waiter]:
        ended, self._waiters = self._waiters, []
        self._given.clear()
        for each in ended:
            each.error = type(error)(str(error))
        return ended

    def _arm(self) -> None:
        """Start the timer that enforces the deadlines of the waiters."""
        if self._waiters and self._timer is None:
            seconds = max(0.0, self._waiters[0].end - time.monotonic())
            self._timer = threading.Timer(seconds, _expire, (weakref.ref(self),))
            self._timer.daemon = True
            self._timer.start()

    def _expire(self) -> None:
        now = time.monotonic()
        with self._lock:
            self._timer = None
            late = [each for each in self._waiters if each.end <= now]
            for each in late:
                each.error = self._missed(each)
            for each in late:
                self._given.pop(each.trainer, None)
                self._waiters.remove(each)
            self._arm()
        for each in late:
            each.settle()

    def _missed(self, waiter: _Waiter) -> CollectiveTimeout:
        behind = waiter.step - (self.staleness or 0)
        missing = [
            other
            for other in range(self.trainers)
            if self._made[other] < behind and other not in self._given
        ]
        return CollectiveTimeout(
            f"table {self.table.name!r}: trainer {waiter.trainer} has waited {self.timeout:g} s in "
            f"step {waiter.step} for trainers {missing}, which have made "
            f"{[self._made[other] for other in missing]} steps"
        )

    def save(self, path: str) -> None:
        """Write the rows, their state and the trainers' step counts to a directory of its own.

        The format is that of `torch.distributed.checkpoint`. Concurrent updates may or may not be
        included, each row completely. To save a state between two steps, call this while no update
        is in progress.

        Raises:
            CheckpointError: The directory cannot be written.
        """
        with self._lock:
            made = torch.tensor(self._made)
        state = {"table": self.table.state_dict(), "made": made}
        try:
            with _alone():
                save(state, checkpoint_id=path, no_dist=True)
        except CheckpointException as error:
            raise CheckpointError(f"table {self.table.name!r}: {path} can't be written") from error

    def load(self, path: str) -> None:
        """Replace the rows, their state and the step counts by those that `save` has written.

        PyTorch reads the metadata of the directory with pickle: load only trusted directories.

        Raises:
            CheckpointError: The directory cannot be read, or has another shape, optimizer or number
                of trainers. Nothing is replaced.
        """
        state: dict[str, Any] = {
            "table": self.table.state_dict(),
            "made": torch.zeros(self.trainers).long(),
        }
        try:
            with _alone():
                load(state, checkpoint_id=path, no_dist=True)
        except CheckpointException as error:
            why = "; ".join(str(failure) for failure, _ in error.failures.values())
            raise CheckpointError(
                f"table {self.table.name!r}: {path} can't be used: {why}"
            ) from error
        self.table.load_state_dict(state["table"])
        with self._lock:
            self._made = state["made"].tolist()
            self._given.clear()
            self._failure = None


@contextmanager
def _alone() -> Iterator[None]:
    """Suppress PyTorch's warning about saving from a single process, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _expire(server: weakref.ref[Server]) -> None:
    if (here := server()) is not None:
        here._expire()
