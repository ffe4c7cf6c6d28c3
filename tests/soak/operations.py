"""Each kind of operation, by the public functions of `torch.distributed`.

Each function gets a `Task`. It requests tensors with their expected final values, calls the
operation, and returns the works to wait for (None if there are none).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import phalanx
from phalanx.errors import UsageError
from tests.conformance import cases
from tests.soak.memory import Block, Pool, premul_factor, reduce_exactly
from tests.soak.plan import Operation

CPU = torch.device("cpu")


class Task:
    """An operation on this rank: its tensors and their expected values.

    Args:
        operation: The operation.
        group: The group of the operation, which contains this rank.
        pool: The source of all values.
    """

    def __init__(self, operation: Operation, group: dist.ProcessGroup, pool: Pool) -> None:
        self.operation = operation
        self.group = group
        self.members = operation.members
        self.size = len(operation.members)
        self.rank = dist.get_rank(group)
        self.root = operation.root
        self.is_root = self.rank == self.root
        self.source = operation.members[self.root]
        self.dtype = cases.DTYPES[operation.dtype]
        self.async_op = operation.asynchronous
        self.common = Random(f"{operation.seed} common")  # draws the same on all ranks
        self.own = Random(f"{operation.seed} {self.rank}")  # draws only for this rank
        self.bytes = 0
        # An operation uses zero copy only if the tensors of all ranks are shared.
        self._shared = self.common.choice((0.0, 0.0, 0.5, 1.0))
        self._pool = pool
        self._checks: list[Callable[[], None]] = []

    def values(self, rank: int, part: int = 0, count: int = -1) -> Tensor:
        """Return the flat input of a rank, different for each operation and part."""
        count = self.operation.count if count < 0 else count
        return self._pool.slice(self.operation.dtype, count, self.operation.number, rank, part)

    def all_values(self, part: int = 0, count: int = -1) -> list[Tensor]:
        return [self.values(rank, part, count) for rank in range(self.size)]

    def reduced(self, inputs: list[Tensor]) -> Callable[[], Tensor]:
        return partial(reduce_exactly, self.operation.reduction, inputs)

    def op(self) -> Any:
        if self.operation.reduction == "PREMUL_SUM":
            return dist._make_nccl_premul_sum(premul_factor(self.rank))
        return cases.reduce_op(self.operation.reduction)

    def input(self, values: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
        """Create an input, which the operation may not write to."""
        return self._block(values, values, "input", shape)

    def output(
        self, expected: Tensor | Callable[[], Tensor], count: int, shape: tuple[int, ...] = ()
    ) -> Tensor:
        """Create an output of `count` elements."""
        return self._block(None, expected, "output", shape or (count,))

    def in_place(self, values: Tensor, expected: Tensor | Callable[[], Tensor]) -> Tensor:
        """Create an input that is also the output."""
        return self._block(values, expected, "result", None)

    def outputs(self, expected: list[Tensor]) -> list[Tensor]:
        return [self.output(values, len(values)) for values in expected]

    def inputs(self, values: list[Tensor]) -> list[Tensor]:
        return [self.input(each) for each in values]

    def uneven(self) -> list[int]:
        """Draw an element count for each rank of the group."""
        return [
            self.common.choice((0, self._draw_count(), self._draw_count()))
            for _ in range(self.size)
        ]

    def coalesced_counts(self) -> list[int]:
        """Draw the element counts of the tensors of a coalesced operation."""
        count = self.operation.count
        return [count // (1 + tensor) for tensor in range(self.common.randint(1, 4))]

    def _draw_count(self) -> int:
        return self.common.randint(0, self.operation.count)

    def call(self, function: Callable[..., object], *arguments: Any) -> object:
        """Call a collective of `torch.distributed`, or prepare it and run that."""
        operation = self._prepare(function, arguments)
        if operation is None:
            return function(*arguments, async_op=self.async_op)
        return self._start(operation) if self.async_op else operation()

    def post(self, function: Callable[..., object], *arguments: Any) -> object:
        """The same with a function for messages."""
        operation = self._prepare(function, arguments)
        if operation is None:
            done = function(*arguments)
            return done if function in (dist.isend, dist.irecv) else None
        return self._start(operation) if function in (dist.isend, dist.irecv) else operation()

    def _prepare(
        self, function: Callable[..., object], arguments: tuple[Any, ...]
    ) -> phalanx.PreparedOperation | None:
        """Prepare an operation, if this rank draws that and the tensors permit it."""
        if self.own.random() < 0.6:
            return None
        try:
            return phalanx.prepare(function, *arguments)
        except UsageError as error:
            if not str(error).endswith("itself"):
                raise
            return None  # it needs work in each call

    def _start(self, operation: phalanx.PreparedOperation) -> phalanx.PreparedOperation:
        operation.start()
        return operation

    def check_equal(self, found: object, expected: object, name: str) -> None:
        if found != expected:
            raise AssertionError(f"{name}: {found!r}, expected {expected!r}")

    def check_later(self, check: Callable[[], None]) -> None:
        self._checks.append(check)

    def check(self) -> None:
        """Check every tensor; to be called when the operation has finished."""
        for check in self._checks:
            check()

    def _block(
        self,
        values: Tensor | None,
        expected: Tensor | Callable[[], Tensor],
        name: str,
        shape: tuple[int, ...] | None,
    ) -> Tensor:
        assert shape is not None or values is not None
        block = Block(self.dtype, shape or values.shape, self.own, values, self._shared)
        name = f"{name} {len(self._checks)} of shape {list(block.tensor.shape)}"
        self._checks.append(
            lambda: block.check(expected if isinstance(expected, Tensor) else expected(), name)
        )
        self.bytes += block.size
        return block.tensor


# Operations with one tensor.


def all_reduce(task: Task) -> object:
    inputs = task.all_values()
    tensor = task.in_place(inputs[task.rank], task.reduced(inputs))
    return task.call(dist.all_reduce, tensor, task.op(), task.group)


def reduce(task: Task) -> object:
    inputs = task.all_values()
    own = inputs[task.rank]
    tensor = task.in_place(own, task.reduced(inputs) if task.is_root else own)
    return task.call(dist.reduce, tensor, task.source, task.op(), task.group)


def broadcast(task: Task) -> object:
    values = task.values(task.root)
    tensor = task.input(values) if task.is_root else task.output(values, len(values))
    return task.call(dist.broadcast, tensor, task.source, task.group)


# Operations with one tensor per rank.


def gather(task: Task) -> object:
    outputs = task.outputs(task.all_values()) if task.is_root else None
    tensor = task.input(task.values(task.rank))
    return task.call(dist.gather, tensor, outputs, task.source, task.group)


def scatter(task: Task) -> object:
    parts = [task.values(task.root, rank) for rank in range(task.size)]
    output = task.output(parts[task.rank], task.operation.count)
    inputs = task.inputs(parts) if task.is_root else None
    return task.call(dist.scatter, output, inputs, task.source, task.group)


def all_gather(task: Task) -> object:
    inputs = task.all_values()
    tensor = task.input(inputs[task.rank])
    return task.call(dist.all_gather, task.outputs(inputs), tensor, task.group)


def all_gather_uneven(task: Task) -> object:
    inputs = [task.values(rank, 0, count) for rank, count in enumerate(task.uneven())]
    tensor = task.input(inputs[task.rank])
    return task.call(dist.all_gather, task.outputs(inputs), tensor, task.group)


def all_gather_single(task: Task) -> object:
    inputs = task.all_values()
    output = task.output(partial(torch.cat, inputs), task.size * task.operation.count)
    tensor = task.input(inputs[task.rank])
    return task.call(dist.all_gather_into_tensor, output, tensor, task.group)


def reduce_scatter(task: Task) -> object:
    return _reduce_scatter(task, [task.operation.count] * task.size)


def reduce_scatter_uneven(task: Task) -> object:
    return _reduce_scatter(task, task.uneven())


def _reduce_scatter(task: Task, counts: list[int]) -> object:
    own = [task.values(task.rank, part, count) for part, count in enumerate(counts)]
    own_count = counts[task.rank]
    output = task.output(task.reduced(task.all_values(task.rank, own_count)), own_count)
    return task.call(dist.reduce_scatter, output, task.inputs(own), task.op(), task.group)


def reduce_scatter_single(task: Task) -> object:
    output, tensor = _to_reduce_and_scatter(task, 0, task.operation.count)
    return task.call(dist.reduce_scatter_tensor, output, tensor, task.op(), task.group)


def _to_reduce_and_scatter(task: Task, number: int, count: int) -> tuple[Tensor, Tensor]:
    inputs = task.all_values(number, task.size * count)
    begin = task.rank * count
    own_parts = [tensor[begin : begin + count] for tensor in inputs]
    return task.output(task.reduced(own_parts), count), task.input(inputs[task.rank])


# Operations with one tensor for each pair of ranks.


def all_to_all(task: Task) -> object:
    return _all_to_all(task, [[task.operation.count] * task.size] * task.size)


def all_to_all_uneven(task: Task) -> object:
    return _all_to_all(task, [task.uneven() for _ in range(task.size)])


def _all_to_all(task: Task, counts: list[list[int]]) -> object:
    inputs_sent = [task.values(task.rank, to, counts[task.rank][to]) for to in range(task.size)]
    inputs_received = [
        task.values(source, task.rank, counts[source][task.rank]) for source in range(task.size)
    ]
    outputs, inputs = task.outputs(inputs_received), task.inputs(inputs_sent)
    return task.call(dist.all_to_all, outputs, inputs, task.group)


def all_to_all_single(task: Task) -> object:
    return _all_to_all_single(task, [[task.operation.count] * task.size] * task.size, False)


def all_to_all_single_uneven(task: Task) -> object:
    return _all_to_all_single(task, [task.uneven() for _ in range(task.size)], True)


def _all_to_all_single(task: Task, rows: list[list[int]], uneven: bool) -> object:
    """Exchange rows of one to three elements; `rows` has the counts for each pair of ranks."""
    width = task.common.randint(1, 3)
    rows = [[count // width for count in line] for line in rows]
    me, everybody = task.rank, range(task.size)
    inputs_sent = [task.values(me, to, rows[me][to] * width) for to in everybody]
    inputs_received = [task.values(source, me, rows[source][me] * width) for source in everybody]
    taken_rows = [rows[source][me] for source in everybody]
    output = task.output(partial(torch.cat, inputs_received), 0, (sum(taken_rows), width))
    tensor = task.input(torch.cat(inputs_sent), (sum(rows[me]), width))
    # Equal splits may be passed on one rank and omitted on another.
    given_splits = uneven or task.own.random() < 0.5
    splits = (taken_rows, rows[me]) if given_splits else (None, None)
    return task.call(dist.all_to_all_single, output, tensor, *splits, task.group)


# Coalesced operations.


def all_reduce_coalesced(task: Task) -> object:
    tensors = _to_reduce(task)
    return dist.all_reduce_coalesced(tensors, task.op(), task.group, task.async_op)


def _to_reduce(task: Task) -> list[Tensor]:
    inputs = [
        task.all_values(number, count) for number, count in enumerate(task.coalesced_counts())
    ]
    return [task.in_place(each[task.rank], task.reduced(each)) for each in inputs]


def all_gather_coalesced(task: Task) -> object:
    inputs = [
        task.all_values(number, count) for number, count in enumerate(task.coalesced_counts())
    ]
    outputs = [task.outputs([each[rank] for each in inputs]) for rank in range(task.size)]
    tensors = task.inputs([each[task.rank] for each in inputs])
    return dist.all_gather_coalesced(outputs, tensors, task.group, task.async_op)


def _coalesce(task: Task, calls: list[Callable[[], object]], device: torch.device | None) -> object:
    with dist._coalescing_manager(task.group, device, task.async_op) as manager:
        for call in calls:
            call()
    return manager if task.async_op else None


def coalescing_all_reduce(task: Task) -> object:
    op = task.op()
    calls = [partial(dist.all_reduce, tensor, op, task.group) for tensor in _to_reduce(task)]
    return _coalesce(task, calls, None)


def coalescing_all_gather(task: Task) -> object:
    calls = []
    for number, count in enumerate(task.coalesced_counts()):
        inputs = task.all_values(number, count)
        output = task.output(partial(torch.cat, inputs), task.size * count)
        tensor = task.input(inputs[task.rank])
        calls.append(partial(dist.all_gather_into_tensor, output, tensor, task.group))
    return _coalesce(task, calls, None)


def coalescing_reduce_scatter(task: Task) -> object:
    op, calls = task.op(), []
    for number, count in enumerate(task.coalesced_counts()):
        pair = _to_reduce_and_scatter(task, number, count)
        calls.append(partial(dist.reduce_scatter_tensor, *pair, op, task.group))
    return _coalesce(task, calls, None)


def coalescing_any(task: Task) -> object:
    """Operations of several kinds, each asynchronous or not."""
    calls = []
    for number, count in enumerate(task.coalesced_counts()):
        inputs = task.all_values(number, count)
        own, root = inputs[task.rank], task.common.randrange(task.size)
        group, async_op = task.group, task.async_op and task.common.random() < 0.8
        if number % 2:
            outputs = task.outputs(inputs)
            calls.append(partial(dist.all_gather, outputs, task.input(own), group, async_op))
        else:
            tensor = task.input(own) if task.rank == root else task.output(inputs[root], count)
            source = task.members[root]
            calls.append(partial(dist.broadcast, tensor, source, group, async_op))
    return _coalesce(task, calls, CPU)


# Operations without tensors.


def barrier(task: Task) -> object:
    return task.call(dist.barrier, task.group)


def monitored_barrier(task: Task) -> None:
    # The function of torch.distributed supports only groups named "gloo".
    task.group.monitored_barrier()


def _object(task: Task, rank: int, part: int = 0) -> object:
    number = task.operation.number
    return {"number": number, "from": rank, "to": part, "text": "x" * (number * (rank + 1) % 3000)}


def broadcast_objects(task: Task) -> None:
    expected = [_object(task, task.root), None, _object(task, task.root, 1)]
    objects = list(expected) if task.is_root else [None] * 3
    dist.broadcast_object_list(objects, task.source, task.group)
    task.check_equal(objects, expected, "objects")


def all_gather_object(task: Task) -> None:
    objects: list[object] = [None] * task.size
    dist.all_gather_object(objects, _object(task, task.rank), task.group)
    task.check_equal(objects, [_object(task, rank) for rank in range(task.size)], "objects")


def gather_object(task: Task) -> None:
    objects: list[object] | None = [None] * task.size if task.is_root else None
    dist.gather_object(_object(task, task.rank), objects, task.source, task.group)
    if task.is_root:
        task.check_equal(objects, [_object(task, rank) for rank in range(task.size)], "objects")


def scatter_objects(task: Task) -> None:
    parts = [_object(task, task.root, rank) for rank in range(task.size)]
    output: list[object] = [None]
    dist.scatter_object_list(output, parts if task.is_root else None, task.source, task.group)
    task.check_equal(output, [parts[task.rank]], "object")
