"""`EmbeddingServer`, which serves a part of a table to trainers, and the deployment of servers."""

from __future__ import annotations

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
from phalanx.embedding.sharding import Sharding, make_sharding
from phalanx.embedding.table import EmbeddingTable, TableHandle
from phalanx.errors import CheckpointError, CollectiveTimeout, PeerLost, PhalanxError, UsageError
from phalanx.rpc import calls
from phalanx.rpc.agent import agent
from phalanx.rpc.functions import async_execution
from phalanx.rpc.rref import RRef

_TIMEOUT_SECONDS = 3600.0
"""The time that a server has to create, write or read its part."""


class TableSpec(NamedTuple):
    """The shape of a server's part and its update settings.

    See `EmbeddingServer` and `EmbeddingTable`.
    """

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
        deadline: The deadline, in seconds of the monotonic clock.
    """

    def __init__(self, trainer: int, step: int, deadline: float) -> None:
        self.trainer, self.step, self.deadline = trainer, step, deadline
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

    Methods may be called from several threads concurrently.

    Args:
        table: The rows.
        trainers: The number of trainers that update the rows; they are numbered from 0.
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
        trainers: int = 1,
        *,
        staleness: int | None = None,
        timeout: float = 300.0,
    ) -> None:
        if trainers < 1 or (staleness is not None and staleness < 0):
            raise UsageError(
                f"EmbeddingServer: trainers={trainers}, staleness={staleness} given, expected at "
                "least one trainer, and a staleness of None or at least 0"
            )
        self.table = table
        self.trainers, self.staleness, self.timeout = trainers, staleness, timeout
        self._lock = threading.Lock()
        # The lock guards the steps made by each trainer, the gradients for the next step, and the
        # waiting trainers.
        self._steps = [0] * trainers
        self._gradients: dict[int, tuple[Tensor, Tensor]] = {}
        self._waiters: list[_Waiter] = []
        self._failure: PhalanxError | None = None
        self._timer: threading.Timer | None = None

    @classmethod
    def create_shard(
        cls,
        sharding: Sharding,
        server: int,
        width: int,
        optimizer: RowOptimizer | None = None,
        *,
        trainers: int = 1,
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

    def lookup(self, indices: Tensor) -> Tensor:
        """Return the rows of these indices, like `EmbeddingTable.gather`."""
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
        indices, gradients = self._prepare(indices, gradients, trainer)
        with self._lock:
            self._check_failure()
            if self.staleness is None and trainer in self._gradients:
                raise UsageError(
                    f"table {self.table.name!r}: trainer {trainer} has already sent its gradients "
                    f"for step {self._steps[trainer] + 1}: do two trainers have the same number?"
                )
        if self.staleness is not None:
            self.table.update(indices, gradients)
        elif self.trainers > 1:
            # A caller in this process may change them before the last trainer calls.
            indices, gradients = indices.clone(), gradients.clone()
        with self._lock:
            waiter = _Waiter(trainer, self._steps[trainer] + 1, time.monotonic() + self.timeout)
            self._waiters.append(waiter)
            if self.staleness is None:
                self._gradients[trainer] = indices, gradients
                if len(self._gradients) == self.trainers:
                    self._apply()
            else:
                self._steps[trainer] += 1
            ended = self._pop_finished()
            self._start_timer()
        for each in ended:
            each.complete()
        return waiter.future

    def register_trainer(self, trainer: int, worker: int | None) -> None:
        """Register the worker of `phalanx.rpc` of a trainer; if it is lost, so is the trainer.

        Args:
            trainer: The number of the trainer.
            worker: The worker's id, or None if the trainer is not a worker.
        """
        self._check_trainer(trainer)
        if worker is None:
            return
        server_ref = weakref.ref(self)

        def on_loss(lost_worker: int, reason: str) -> None:
            if lost_worker == worker and (server := server_ref()) is not None:
                server.mark_lost(trainer, reason)

        agent().loss_listeners.append(on_loss)

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
        for each in ended:
            each.complete()

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.replace(str(self._failure))

    def _check_trainer(self, trainer: int) -> None:
        if not 0 <= trainer < self.trainers:
            raise UsageError(
                f"table {self.table.name!r}: trainer={trainer} given, expected 0 to "
                f"{self.trainers - 1}"
            )

    def _prepare(self, indices: Tensor, gradients: Tensor, trainer: int) -> tuple[Tensor, Tensor]:
        self._check_trainer(trainer)
        flat = prepare_indices(self.table.name, indices)
        shape = len(flat), self.table.width
        name, origin = self.table.name, f" from trainer {trainer}"
        prepared = prepare_gradients(name, gradients, shape, self.table.dtype, origin)
        if len(flat):
            for extreme in torch.aminmax(flat):
                if not 0 <= (index := int(extreme)) < self.table.rows:
                    raise index_error(self.table.name, index, self.table.rows)
        return flat, prepared

    def _apply(self) -> None:
        """Make a synchronous step with all trainers' gradients, in the order of the trainers."""
        gradients_by_trainer = [self._gradients[trainer] for trainer in range(self.trainers)]
        self._gradients.clear()
        try:
            batches = [Batch(rows).addresses(gradients) for rows, gradients in gradients_by_trainer]
            self.table.update_batches(batches, self.trainers)
        except PhalanxError as error:
            self._failure = error
        else:
            self._steps = [step + 1 for step in self._steps]

    def _pop_finished(self) -> list[_Waiter]:
        """Remove and return the waiters that have succeeded or failed."""
        if self._failure is not None:
            return self._fail_waiters(self._failure)
        limit = min(self._steps) + (self.staleness or 0)
        ended = [each for each in self._waiters if each.step <= limit]
        self._waiters = [each for each in self._waiters if each.step > limit]
        return ended

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
        for each in expired:
            each.complete()

    def _timeout_error(self, waiter: _Waiter) -> CollectiveTimeout:
        behind = waiter.step - (self.staleness or 0)
        missing = [
            other
            for other in range(self.trainers)
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
            steps = torch.tensor(self._steps)
        state = {"table": self.table.state_dict(), "steps": steps}
        try:
            save_local(Path(path), self.table.step, state)
        except CheckpointError as error:
            raise CheckpointError(f"table {self.table.name!r}: {error}") from error

    def load(self, path: str) -> None:
        """Replace the rows, their state and the step counts by those that `save` wrote.

        Raises:
            CheckpointError: The directory cannot be read, or has another shape, optimizer or number
                of trainers. Nothing is replaced.
        """
        like = {
            "table": self.table.describe_state(),
            "steps": torch.empty(self.trainers, dtype=torch.int64, device="meta"),
        }
        try:
            state = load_local(Path(path), like)
        except (CheckpointError, UsageError) as error:
            raise CheckpointError(
                f"table {self.table.name!r}: {path} cannot be loaded: {error}"
            ) from error
        self.table.load_state_dict(state["table"])
        with self._lock:
            self._steps = state["steps"].tolist()
            self._gradients.clear()
            self._failure = None


def _expire(server_ref: weakref.ref[EmbeddingServer]) -> None:
    if (server := server_ref()) is not None:
        server._expire()


def deploy(
    workers: Sequence[str | int],
    num_embeddings: int,
    embedding_dim: int,
    optimizer: RowOptimizer | None = None,
    *,
    sharding: str = "range",
    trainers: int = 1,
    staleness: int | None = None,
    timeout: float = 300.0,
    dtype: torch.dtype = torch.float32,
    name: str = "table",
    weight: Callable[[Tensor], Tensor] | None = None,
) -> list[RRef[EmbeddingServer]]:
    """Create a table on workers of `phalanx.rpc`; block until all have their part.

    Args:
        workers: Names or ids of the servers, in the order of the parts.
        num_embeddings: The number of rows of the whole table.
        embedding_dim: The number of elements of a row.
        optimizer: The optimizer of the rows: `SGD` (the default), `Adagrad` or `Adam`.
        sharding: "range" places consecutive rows on the same server; "hash" places row r on server
            r modulo the number of servers.
        trainers: The number of trainers that update the table.
        staleness: The number of steps that a trainer may be ahead of another; None: trainers step
            synchronously.
        timeout: The time that an update waits for other trainers, in seconds.
        dtype: float32 or float64.
        name: The table's name in error messages.
        weight: A function, which must be serializable, from n row indices to the rows' initial
            values, of shape (n, embedding_dim). By default the values are drawn from a normal
            distribution.

    Returns:
        References for `ShardedEmbeddingBag`. A server keeps its part as long as a reference to it
        exists.

    Raises:
        UsageError: An argument is invalid, or a worker does not exist.
        PhalanxError: A server does not have enough memory, or was lost.
        CallTimeout: A server has not created its part within an hour.

    Example:
        >>> servers = embedding.deploy(["ps"], 1000, 8, Adagrad(lr=0.1))
        >>> bag = ShardedEmbeddingBag(1000, 8, servers, mode="sum")
    """
    layout = make_sharding(sharding, num_embeddings, len(workers))
    settings: dict[str, Any] = {
        "trainers": trainers,
        "staleness": staleness,
        "timeout": timeout,
        "dtype": dtype,
        "name": name,
        "weight": weight,
    }
    futures = [
        calls.begin(
            worker,
            _create_server,
            (layout, number, embedding_dim, optimizer),
            settings,
            _TIMEOUT_SECONDS,
        )
        for number, worker in enumerate(workers)
    ]
    return [future.wait() for future in futures]


def save(servers: Sequence[RRef[EmbeddingServer]], path: str) -> None:
    """Write the parts of all servers, each by `EmbeddingServer.save`, to `path`/server-0 and so on.

    Call it between two steps, so that the parts are of the same state. Each path is on its server's
    host.

    Raises:
        CheckpointError: A server could not write its part.
        CallTimeout: A server has not written its part within an hour.

    Example:
        >>> servers = embedding.deploy(["ps"], 1000, 8)
        >>> embedding.save(servers, f"{checkpoints}/step-100")
    """
    _call_all(servers, "save", path)


def load(servers: Sequence[RRef[EmbeddingServer]], path: str) -> None:
    """Read the parts that `save` wrote for the same number of servers.

    Each server reads its part by `EmbeddingServer.load`.

    Raises:
        CheckpointError: A server could not read its part; others may have.
        CallTimeout: A server has not read its part within an hour.

    Example:
        >>> servers = embedding.deploy(["ps"], 1000, 8)
        >>> embedding.load(servers, f"{checkpoints}/step-100")
    """
    _call_all(servers, "load", path)


def _call_all(servers: Sequence[RRef[EmbeddingServer]], method: str, path: str) -> None:
    futures = [
        getattr(server.begin(timeout=_TIMEOUT_SECONDS), method)(f"{path}/server-{number}")
        for number, server in enumerate(servers)
    ]
    for future in futures:
        future.wait()


def _create_server(*arguments: Any, **settings: Any) -> RRef[EmbeddingServer]:
    return RRef(EmbeddingServer.create_shard(*arguments, **settings))
