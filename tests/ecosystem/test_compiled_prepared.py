"""Prepared operations and plans in compiled functions: results, order, errors, recompilation.

In the tests of the order, one rank compiles the function and the others do not: if the compiler
dropped an operation, or moved it behind another, the ranks would call different operations.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import phalanx
from phalanx.errors import CollectiveMismatch, UsageError
from tests.conformance import cases
from tests.ecosystem.programs import alone_on_a_core
from tests.multiprocess.test_direct_calls import COUNT, operations
from tests.ranks import RankServer

PRELOAD = ("torch._functorch.aot_autograd", "torch._inductor.compile_fx")

# The graph of Dynamo; that of AOTAutograd, whose operators all write new memory; and C++.
COMPILERS = ("eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow))


def with_compilers(*sizes: int) -> pytest.MarkDecorator:
    """Parametrize by world sizes and compilers; Inductor takes long."""
    return pytest.mark.parametrize(
        ("size", "compiler"),
        [(size, compiler) for size in sizes for compiler in ("eager", "aot_eager")]
        + [pytest.param(size, "inductor", marks=pytest.mark.long) for size in sizes],
    )


RUNS = 4
# In seconds: a rank that compiles makes the others wait.
LIMITS = {"timeout": 90.0, "limit": 110.0}

Step = Callable[..., Any]


def compiled(step: Step, compiler: str) -> Step:
    """Compile a function into one graph, and not a second time."""
    alone_on_a_core()
    torch._dynamo.config.error_on_recompile = True
    return torch.compile(step, backend=compiler, fullgraph=True)


def whole_numbers(seed: int, *numbers: int, count: int = 5) -> list[Tensor]:
    """Return the random values of each rank, whose sums are exact."""
    seeds = [(seed, *numbers, rank) for rank in range(dist.get_world_size())]
    return [torch.from_numpy(np.random.default_rng(s).integers(1, 9, count) * 1.0) for s in seeds]


def check(result: Tensor, expected: Any) -> None:
    cases.check_bits(result.detach(), torch.as_tensor(expected).detach(), "compiled")


# ---- results ----


class Values(nn.Module):
    """A module that has prepared tensors."""

    buffer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.empty(5, dtype=torch.float64))
        self.parameter = nn.Parameter(torch.empty(5, dtype=torch.float64))


def reads_and_writes_in_order(compiler: str, seed: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    own, changed, given = (torch.empty(5, dtype=torch.float64) for _ in range(3))
    module = Values()
    tensors = own, changed, given, module.buffer, module.parameter
    sum_own, sum_changed, sum_given, sum_buffer, sum_parameter = (
        phalanx.prepare(dist.all_reduce, each) for each in tensors
    )

    def step(values: Tensor, argument: Tensor) -> tuple[Tensor, ...]:
        before = changed * 2
        changed.copy_(values + own)  # the compiler keeps this in memory of its own
        sum_changed()
        after = changed + before
        sum_own()  # runs in the memory of the tensor
        changed.sub_(own)
        sum_changed()
        argument.mul_(2)
        sum_given()
        sum_buffer()
        with torch.no_grad():
            module.parameter.add_(module.buffer)
        sum_parameter()
        return before, after, changed * 3, argument + 1, module.parameter * 1

    run = compiled(step, compiler)
    for turn in range(RUNS):
        inputs = [whole_numbers(seed, turn, number) for number in range(6)]
        for tensor, values in zip(tensors, inputs, strict=False):
            tensor.detach().copy_(values[rank])
        before, after, last, argument, parameter = run(inputs[5][rank], given)
        first = sum(inputs[5]) + sum(inputs[0])
        check(before, 2 * inputs[1][rank])
        check(after, first + 2 * inputs[1][rank])
        check(own, sum(inputs[0]))
        check(changed, (first - own) * size)
        check(last, 3 * changed)
        check(given, 2 * sum(inputs[2]))
        check(argument, given + 1)
        check(module.buffer, sum(inputs[3]))
        check(module.parameter, sum(inputs[4]) + size * module.buffer)
        check(parameter, module.parameter)


@with_compilers(1, 2, 3)
def test_reads_and_writes_keep_their_order(
    ranks: RankServer, seed: int, size: int, compiler: str
) -> None:
    ranks.run(size, reads_and_writes_in_order, compiler, seed, **LIMITS)


def runs_of(compiler: str, tensors_of_compiler: bool) -> Callable[..., None]:
    """Return a function that prepares an operation and runs it in a compiled function."""

    def run(function: Callable[..., object], *arguments: Any, **options: Any) -> None:
        operation = phalanx.prepare(function, *arguments, **options)
        plan = phalanx.plan([operation])
        tensors = operation.plain.tensors

        def step() -> None:
            if tensors_of_compiler:
                for each in tensors:
                    each.neg_()
            (plan if tensors_of_compiler else operation)()

        if tensors_of_compiler:
            for each in tensors:
                each.neg_()
        compiled(step, compiler)()
        torch._dynamo.reset()

    return run


def every_operation(compiler: str, seed: int) -> None:
    for operator in ("SUM", "MAX"):
        own = cases.data("float32", COUNT, seed, dist.get_rank())
        op = cases.reduce_op(operator)
        expected = {name: call() for name, call in operations(own, op)}
        for is_moved in (False, True):
            results = operations(own, op, runs_of(compiler, is_moved))
            for name, call in results:
                cases.check_bits(call(), expected[name], f"{name} {operator} {is_moved}")


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("size", [2, 3])
def test_every_operation(ranks: RankServer, seed: int, size: int, compiler: str) -> None:
    ranks.run(size, every_operation, compiler, seed, **LIMITS)


def views_of_one_tensor(compiler: str, seed: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.empty(size, 5, dtype=torch.float64)
    rows = list(whole)
    gather = phalanx.prepare(dist.all_gather, rows, rows[rank])  # in place
    other = torch.empty(size, 5, dtype=torch.float64)
    scatter = phalanx.prepare(dist.reduce_scatter_tensor, other[0], whole)
    both = phalanx.plan([gather, scatter])

    def step(values: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
        flat.mul_(2)
        rows[rank].copy_(values)
        both()
        rows[0].add_(1)
        return whole * 1, other.sum(1)

    run = compiled(step, compiler)
    for turn in range(RUNS):
        inputs = whole_numbers(seed, turn)
        other.fill_(turn)
        result, sums = run(inputs[rank], whole.view(-1))
        expected = torch.stack(inputs)
        check(other[0], expected[rank] * size)
        check(sums, other.sum(1))
        expected[0] += 1
        check(result, expected)
        check(whole, expected)


@with_compilers(1, 3)
def test_tensors_that_share_memory(ranks: RankServer, seed: int, size: int, compiler: str) -> None:
    ranks.run(size, views_of_one_tensor, compiler, seed, **LIMITS)


def plan_in_both_memories(compiler: str, seed: int) -> None:
    rank = dist.get_rank()
    loss, correct, stop, late = (torch.empty(n, dtype=torch.float64) for n in (1, 3, 2, 3))
    plan = phalanx.plan(
        [
            phalanx.prepare(dist.all_reduce, loss),
            phalanx.prepare(dist.all_reduce, correct, op=dist.ReduceOp.MAX),
            phalanx.prepare(dist.broadcast, stop, src=0),
            phalanx.prepare(dist.all_reduce, correct),  # depends on the one before
            phalanx.prepare(dist.reduce, late, dst=0),
        ]
    )

    def step(values: Tensor) -> Tensor:
        if rank == 0:  # the others run it in the memory of the tensors
            correct.copy_(values)
            loss.copy_(values[:1])
        plan()
        return loss + correct.sum() + stop.sum()

    run = compiled(step, compiler)
    for turn in range(RUNS):
        inputs = [whole_numbers(seed, turn, number, count=3) for number in range(3)]
        correct.copy_(inputs[0][rank])
        loss.copy_(inputs[0][rank][:1])
        stop.copy_(inputs[1][rank][:2])
        late.copy_(inputs[2][rank])
        result = run(inputs[0][rank])
        largest = torch.stack(inputs[0]).amax(0)
        check(loss, sum(inputs[0])[:1])  # type: ignore[index]
        check(correct, largest * dist.get_world_size())
        check(stop, inputs[1][0][:2])
        check(result, loss + correct.sum() + stop.sum())
        if rank == 0:
            check(late, sum(inputs[2]))


@with_compilers(1, 2, 3)
def test_plans(ranks: RankServer, seed: int, size: int, compiler: str) -> None:
    ranks.run(size, plan_in_both_memories, compiler, seed, **LIMITS)


def trains(compiler: str, seed: int) -> None:
    """Sum a hidden state forward, as tensor parallelism does: the gradient is that of a copy."""
    rank = dist.get_rank()
    inputs, weights = whole_numbers(seed, 0), whole_numbers(seed, 1)
    hidden = torch.empty(5, dtype=torch.float64)
    combine = phalanx.prepare(dist.all_reduce, hidden)
    weight = weights[rank].clone().requires_grad_()

    def step(values: Tensor) -> Tensor:
        with torch.no_grad():
            hidden.copy_(values * weight)
            combine()
        return (hidden * weight).sum()

    run = compiled(step, compiler)
    for _ in range(RUNS):
        weight.grad = None
        run(inputs[rank]).backward()
        assert weight.grad is not None
        total = sum(a * b for a, b in zip(inputs, weights, strict=True))
        check(hidden, total)
        check(weight.grad, total)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_training(ranks: RankServer, seed: int, compiler: str) -> None:
    ranks.run(2, trains, compiler, seed, **LIMITS)


# ---- order ----


def keeps_operations_without_results(compiler: str, seed: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.empty(3, dtype=torch.float64) for _ in range(6)]
    run_all = [
        phalanx.prepare(dist.all_reduce, tensors[0]),
        phalanx.prepare(dist.barrier),
        phalanx.prepare(dist.broadcast, tensors[1], src=size - 1),
        phalanx.prepare(dist.all_reduce, tensors[2], op=dist.ReduceOp.MAX),
        phalanx.prepare(dist.reduce, tensors[3], dst=0),
        phalanx.prepare(dist.send, tensors[4], size - 1)
        if rank == 0
        else phalanx.prepare(dist.recv, tensors[4], 0),
        phalanx.prepare(dist.all_reduce, tensors[5]),
    ]
    if 0 < rank < size - 1:
        del run_all[5]

    def step(values: Tensor) -> Tensor:
        for operation in run_all:
            operation()
        return values + 1

    run = compiled(step, compiler) if rank == 0 else step
    for turn in range(RUNS):
        inputs = [whole_numbers(seed, turn, number, count=3) for number in range(6)]
        for tensor, values in zip(tensors, inputs, strict=True):
            tensor.copy_(values[rank])
        run(tensors[0])
        check(tensors[0], sum(inputs[0]))
        check(tensors[1], inputs[1][size - 1])
        check(tensors[2], torch.stack(inputs[2]).amax(0))
        check(tensors[5], sum(inputs[5]))
        if rank == size - 1:
            check(tensors[4], inputs[4][0])


@with_compilers(2, 3)
def test_operations_stay_in_order(ranks: RankServer, seed: int, size: int, compiler: str) -> None:
    ranks.run(size, keeps_operations_without_results, compiler, seed, **LIMITS)


# ---- the compilation ----


def compiles_once_for_each_memory(seed: int) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def step(operation: phalanx.PreparedOperation, values: Tensor) -> Tensor:
        operation()
        return values + 1

    run = torch.compile(step, backend=counter, fullgraph=True)
    for turn in range(12):
        tensor = whole_numbers(seed, turn)[dist.get_rank()]
        operation = phalanx.prepare(dist.all_reduce, tensor)
        for _ in range(RUNS):
            tensor.copy_(whole_numbers(seed, turn)[dist.get_rank()])
            check(run(operation, tensor), sum(whole_numbers(seed, turn)) + 1)
    # Once, and once more when the operation is another one.
    assert counter.frame_count == 2


def test_another_operation_is_compiled_for_once(ranks: RankServer, seed: int) -> None:
    ranks.run(2, compiles_once_for_each_memory, seed)


def runs_plain_calls(seed: int) -> None:
    group = dist.new_group(backend="gloo")
    tensors = [torch.empty(5, dtype=torch.float64) for _ in range(2)]
    operations = [phalanx.prepare(dist.all_reduce, each, group=group) for each in tensors]
    plan = phalanx.plan(operations)
    assert not plan.is_native

    def step(values: Tensor) -> Tensor:
        tensors[0].copy_(values)
        operations[0]()
        plan()
        return tensors[0] * 2

    run = compiled(step, "aot_eager")
    size = dist.get_world_size()
    for turn in range(RUNS):
        inputs = [whole_numbers(seed, turn, number) for number in range(2)]
        tensors[1].copy_(inputs[1][dist.get_rank()])
        result = run(inputs[0][dist.get_rank()])
        check(result, 2 * size * sum(inputs[0]))
        check(tensors[1], sum(inputs[1]))


def test_operations_of_other_backends(ranks: RankServer, seed: int) -> None:
    ranks.run(2, runs_plain_calls, seed)


def calls_no_python() -> None:
    operation = phalanx.prepare(dist.all_reduce, torch.ones(3))
    operation()
    frames: list[object] = []
    sys.setprofile(lambda frame, event, argument: frames.append((event, frame.f_code.co_name)))
    operation()
    sys.setprofile(None)
    assert [each for each in frames if each[0] == "call"] == []  # type: ignore[index]
    operation.__call__()
    assert (operation.plain.tensors[0] == 1).all()


def test_eager_runs_call_no_python(ranks: RankServer) -> None:
    ranks.run(1, calls_no_python)


# ---- errors ----


def changed_tensor_is_refused(compiler: str) -> None:
    tensor, unused = torch.ones(5), torch.ones(5)
    operation = phalanx.prepare(dist.all_reduce, tensor)

    def writes(values: Tensor) -> Tensor:
        tensor.copy_(values)
        operation()
        return tensor + 1

    def reads(values: Tensor) -> Tensor:
        operation()
        return tensor + values

    for step in (writes, reads):
        tensor.data = torch.ones(5)
        operation = phalanx.prepare(dist.all_reduce, tensor)
        run = compiled(step, compiler)
        run(unused)
        tensor.data = torch.ones(5)
        with pytest.raises(UsageError, match=r"memory of its tensor was replaced: prepare again"):
            run(unused)
        torch._dynamo.reset()


def different_operation_is_a_mismatch(compiler: str) -> None:
    tensor = torch.ones(5)
    operation = phalanx.prepare(dist.all_reduce, tensor)

    def step(values: Tensor) -> Tensor:
        tensor.copy_(values)
        operation()
        return tensor + 1

    run = compiled(step, compiler)
    run(torch.ones(5))
    call = dist.barrier if dist.get_rank() else lambda: run(torch.ones(5))
    with pytest.raises(CollectiveMismatch, match=r"all_reduce .* at test_compiled_prepared\.py"):
        call()


def destroyed_group_is_refused(compiler: str) -> None:
    tensor = torch.ones(5)
    operation = phalanx.prepare(dist.all_reduce, tensor)

    def step(values: Tensor) -> Tensor:
        operation()
        return tensor + values

    run = compiled(step, compiler)
    run(torch.ones(5))
    dist.destroy_process_group()
    with pytest.raises(Exception, match="left the process group") as eager:
        operation()
    with pytest.raises(type(eager.value), match="left the process group"):
        run(torch.ones(5))


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(
    "fails",
    [changed_tensor_is_refused, different_operation_is_a_mismatch, destroyed_group_is_refused],
)
def test_errors(ranks: RankServer, fails: Callable[[str], None], compiler: str) -> None:
    ranks.run(2, fails, compiler, **LIMITS)


def freed_operation_is_refused() -> None:
    tensor = torch.ones(5)
    handle = phalanx.prepare(dist.all_reduce, tensor).plain.handle
    with pytest.raises(UsageError, match="does not exist"):
        torch.ops.phalanx.run_prepared(handle, [torch.empty(0), tensor], [])


def test_a_freed_operation(ranks: RankServer) -> None:
    ranks.run(1, freed_operation_is_refused)
