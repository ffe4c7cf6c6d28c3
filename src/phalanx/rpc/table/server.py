"""`Server`: what trainers call; one for each part of a table."""

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

from phalanx.errors import CollectiveTimeout, PeerLost, PhalanxError, SnapshotError, UsageError
from phalanx.rpc import seam
from phalanx.rpc.functions import async_execution
from phalanx.rpc.table.arguments import checked_gradients, checked_indices, out_of_range
from phalanx.rpc.table.gradients import Batch
from phalanx.rpc.table.rows import Table, TableHandle
from phalanx.rpc.table.rules import Rule
from phalanx.rpc.table.shards import Shards

__all__ = ["Server", "Terms"]


class Terms(NamedTuple):
    """What a server has, and how it is updated; fields are as `Server` and `Table` have them."""

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
    """A trainer that has given its gradients for a step.

    Args:
        trainer: Its number.
        step: Its step.
        end: When it has waited for too long, in monotonic seconds.
    """

    def __init__(self, trainer: int, step: int, end: float) -> None:
        self.trainer, self.step, self.end = trainer, step, end
        self.future: torch.futures.Future[int] = torch.futures.Future()
        self.error: PhalanxError | None = None

    def settle(self) -> None:
        """Say how it ended, without the server's lock: an answer is sent here."""
        if self.error is None:
            self.future.set_result(self.step)
        else:
            self.future.set_exception(self.error)  # type: ignore[arg-type] # its stub is wrong


class Server:
    """Rows of a table, and the trainers that update them, in step or within a bound.

    In step (`staleness=None`): the gradients of all trainers for a step are averaged, as
    data-parallel training averages them, and applied at once; `update` returns when that is done.
    So the table goes through the very states of a single process with all their batches.

    With a bound: each update is applied when it comes. It returns once no trainer is more than
    `staleness` steps behind it (stale synchronous parallel: Ho et al., NIPS 2013): whoever waits
    for it before its step n + 1 sees all updates up to step n - `staleness`, of all trainers.

    Its methods may be called by many threads at the same time.

    Args:
        table: Its rows.
        trainers: How many update it, numbered from 0.
        staleness: None, or how many steps a trainer may be ahead of another.
        timeout: Seconds that an update waits for other trainers.

    Raises:
        UsageError: No trainer, or a bound below 0.
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
        # Guarded by it: how many steps each trainer has made, what has come for the next one, and
        # who waits.
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
        """A server with a table for its rows of a split; `weight` gives those of a list of rows.

        Arguments are those of `Table` and of the class; errors too.
        """
        first = None if weight is None else weight(shards.rows_of(server))
        table = Table(shards.count(server), width, rule, dtype=dtype, name=name, weight=first)
        return cls(table, trainers, staleness=staleness, timeout=timeout)

    def handle(self) -> TableHandle:
        """Where processes of this host find the rows."""
        return self.table.handle

    def terms(self) -> Terms:
        """What trainers must know of it."""
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
        """The rows of these indices, as `Table.gather` gives them."""
        return self.table.gather(indices)

    def update(self, indices: Tensor, gradients: Tensor, trainer: int = 0) -> int:
        """Take a trainer's gradients for its next step: one call for each, with rows or without.

        Blocks until the step is made by all (in step), or until no trainer is too far behind.
        Gradients of a row that is there more than once are added up.

        Returns:
            How many steps this trainer has made.

        Raises:
            UsageError: An index is out of range, or an argument isn't as expected: nothing is
                updated, and the trainer's step isn't made.
            CollectiveTimeout: Trainers are missing; they are named. In step, the gradients of those
                who waited are dropped: nothing is updated.
            PeerLost: A trainer has died.
            PhalanxError: A row couldn't be updated; this update and all later ones raise it.
        """
        step: int = self.begin_update(indices, gradients, trainer).wait()
        return step

    @async_execution
    def begin_update(
        self, indices: Tensor, gradients: Tensor, trainer: int = 0
    ) -> torch.futures.Future[int]:
        """The same, without waiting: a future of the number of steps.

        Called from another worker (`rref.rpc_sync().begin_update(...)`) it gives the number itself,
        and no thread of this worker waits meanwhile.

        Raises:
            UsageError: As `update`; what comes later is raised by the future.
            PeerLost: As `update`.
            PhalanxError: As `update`.
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
        """Say which worker of `phalanx.rpc` a trainer is; if that is lost, so is the trainer.

        Args:
            trainer: Its number.
            worker: The worker's id; None where it is none.
        """
        self._check_trainer(trainer)
        if worker is None:
            return
        here = weakref.ref(self)

        def lost(one: int) -> None:
            if one == worker and (server := here()) is not None:
                server.lose(trainer, seam.why_lost(one))

        seam.when_lost(lost)

    def lose(self, trainer: int, why: str) -> None:
        """Say that a trainer has died: updates that wait, and all later ones, raise `PeerLost`.

        Args:
            trainer: Its number.
            why: What is known of it: its name, its pid, the signal.
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
        """Make the step for which all have given their gradients, in the order of the trainers."""
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
        """Those who need wait no longer."""
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
        """See to it that those who wait wait no longer than they may."""
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
        """Write the rows, their state and how far the trainers are, to a directory of its own.

        By `torch.distributed.checkpoint`. Updates that come meanwhile are in it or aren't, each
        row whole; for a state between two steps call it when no update is under way.

        Raises:
            SnapshotError: It can't be written.
        """
        with self._lock:
            made = torch.tensor(self._made)
        state = {"table": self.table.state_dict(), "made": made}
        try:
            with _alone():
                save(state, checkpoint_id=path, no_dist=True)
        except CheckpointException as error:
            raise SnapshotError(f"table {self.table.name!r}: {path} can't be written") from error

    def load(self, path: str) -> None:
        """Replace all of that by what `save` has written.

        PyTorch reads what such a directory says of itself with pickle: give it only your own.

        Raises:
            SnapshotError: It can't be read, or is of another shape, optimizer or number of
                trainers; nothing is replaced.
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
            raise SnapshotError(
                f"table {self.table.name!r}: {path} can't be used: {why}"
            ) from error
        self.table.load_state_dict(state["table"])
        with self._lock:
            self._made = state["made"].tolist()
            self._given.clear()
            self._failure = None


@contextmanager
def _alone() -> Iterator[None]:
    """Without PyTorch's warning that a part is written by one process: it is meant so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _expire(server: weakref.ref[Server]) -> None:
    if (here := server()) is not None:
        here._expire()
