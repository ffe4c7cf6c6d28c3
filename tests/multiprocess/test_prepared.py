"""Prepared operations and plans: results, changed tensors, phases, other backends."""

from __future__ import annotations

import gc
import logging
import signal
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d  # type: ignore[attr-defined]

import phalanx
from phalanx.errors import ArgumentTypeError, CollectiveMismatch, CollectiveTimeout, UsageError
from tests.conformance import cases
from tests.multiprocess.test_direct_calls import COUNT, general_calls, operations
from tests.ranks import RankServer
from tests.seeds import fresh_seed

RUNS = 3


def peer() -> int:
    """Return the other one of two ranks."""
    return 1 - dist.get_rank()


def barrier_of_store(name: str) -> None:
    """Wait until all ranks are here, without an operation of the group."""
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    if store.add(name, 1) == dist.get_world_size():
        store.set(f"{name}/all", "")
    store.wait([f"{name}/all"], timedelta(seconds=20))


def run_prepared(function: Callable[..., object], *arguments: Any, **options: Any) -> None:
    operation = phalanx.prepare(function, *arguments, **options)
    assert operation.is_native, operation
    operation()


def run_in_halves(function: Callable[..., object], *arguments: Any, **options: Any) -> None:
    operation = phalanx.prepare(function, *arguments, **options)
    operation.start()
    operation.wait()


def run_in_plan(function: Callable[..., object], *arguments: Any, **options: Any) -> None:
    plan = phalanx.plan([phalanx.prepare(function, *arguments, **options)])
    assert plan.is_native
    plan()


# ---- results ----


def has_results_of_plain_calls(seed: int) -> None:
    ways = {"whole": run_prepared, "in halves": run_in_halves, "in a plan": run_in_plan}
    for name in cases.DTYPES:
        for operator in cases.operators(name):
            own = cases.data(name, COUNT, seed, dist.get_rank())
            if operator == "AVG" and not own.dtype.is_floating_point:
                continue
            op = cases.reduce_op(operator)
            expected = {name: call() for name, call in operations(own, op)}
            for way, run in ways.items():
                results = {name: call() for name, call in operations(own, op, run)}
                for operation, result in expected.items():
                    text = f"{operation} {operator} of {name} {way}"
                    cases.check_bits(results[operation], result, text)


@pytest.mark.parametrize("size", [2, 3])
def test_prepared_operations_have_the_results_of_plain_ones(ranks: RankServer, size: int) -> None:
    ranks.run(size, has_results_of_plain_calls, fresh_seed())


def runs_with_new_values(seed: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(size)))
    for turn, count in enumerate((0, 1, 1000, 65_537, cases.LARGE)):
        tensor = torch.empty(count)
        # Ranks that prepare and ranks that call plainly match each other.
        operation = (
            phalanx.prepare(dist.all_reduce, tensor, group=group)
            if (rank + turn) % 2
            else lambda tensor=tensor: dist.all_reduce(tensor, group=group)
        )
        for run in range(RUNS):
            inputs = [cases.data("float32", count, seed, turn, run, r) for r in range(size)]
            tensor.copy_(inputs[rank])
            operation()
            cases.check_bits(tensor, cases.folded("SUM", inputs), f"run {run} of {count}")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_runs_take_the_values_of_their_time(ranks: RankServer, size: int) -> None:
    ranks.run(size, runs_with_new_values, fresh_seed())


def exchanges_messages(seed: int) -> None:
    for turn, count in enumerate((0, 1, 4097, 300_000)):
        own = cases.data("int64", count, seed, turn, dist.get_rank())
        other = cases.poisoned(own)
        send = phalanx.prepare(dist.isend, own, peer(), tag=turn)
        recv = phalanx.prepare(dist.irecv, other, peer(), tag=turn)
        for run in range(RUNS):
            own.copy_(cases.data("int64", count, seed, turn, run, dist.get_rank()))
            recv.start()
            send.start()
            send.wait()
            recv.wait()
            expected = cases.data("int64", count, seed, turn, run, peer())
            cases.check_bits(other, expected, f"run {run} of {count}")
        both = phalanx.plan([send, recv])
        for run in range(RUNS):
            other.zero_()
            both()
            cases.check_bits(other, expected, f"plan {run} of {count}")


def test_messages_cross_when_they_are_started(ranks: RankServer) -> None:
    ranks.run(2, exchanges_messages, fresh_seed())


def runs_behind_queued_operations() -> None:
    size = dist.get_world_size()
    large = torch.ones(2**20)
    scale = phalanx.prepare(dist.all_reduce, large)
    plan = phalanx.plan([scale, phalanx.prepare(dist.barrier)])
    work = dist.all_reduce(large, async_op=True)
    scale()
    assert work is not None
    work.wait()
    assert (large == size**2).all()
    work = dist.all_reduce(large, async_op=True)
    plan()
    work.wait()
    assert (large == size**4).all()
    scale.start()
    plan.start()  # starts end in their order
    plan.wait()
    scale.wait()
    assert (large == size**6).all()


def test_runs_come_after_queued_operations(ranks: RankServer) -> None:
    ranks.run(2, runs_behind_queued_operations)


def is_seen_by_a_profiler() -> None:
    tensor = torch.ones(3)
    operation = phalanx.prepare(dist.all_reduce, tensor)
    plan = phalanx.plan([operation, operation])
    with torch.profiler.profile() as profile:
        operation()
        plan()
    names = {event.name for event in profile.events()}  # type: ignore[no-untyped-call]
    assert {"phalanx:all_reduce", "phalanx:plan"} <= names
    with general_calls() as general:
        operation()
    assert not general
    assert (tensor == 2.0**4).all()


def test_a_profiler_sees_runs(ranks: RankServer) -> None:
    ranks.run(2, is_seen_by_a_profiler)


def is_part_of_a_compiled_function() -> None:
    tensor = torch.ones(4)
    operation = phalanx.prepare(dist.all_reduce, tensor)

    @torch.compile(backend="eager")
    def scale(values: Tensor) -> Tensor:
        tensor.copy_(values * 2)
        operation()
        return tensor + 1

    for value in range(RUNS):
        result = scale(torch.full((4,), float(value)))
        assert (result == 2 * value * dist.get_world_size() + 1).all()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # none for each call


def test_compiled_functions_contain_runs(ranks: RankServer) -> None:
    ranks.run(2, is_part_of_a_compiled_function)


# ---- plans ----


def merges(seed: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    values = [cases.data("float32", 5, seed, turn, rank) for turn in range(8)]
    results = [[value.clone() for value in values] for _ in range(2)]

    def calls(tensors: list[Tensor], run: Callable[..., Any]) -> list[Any]:
        parts = [cases.poisoned(tensors[3]) for _ in range(size)]
        tensors += parts
        more = [cases.poisoned(tensors[6]) for _ in range(size)]
        everywhere = cases.poisoned(tensors[4].repeat(size))
        tensors += [*more, everywhere]
        return [
            run(dist.all_reduce, tensors[0]),
            run(dist.all_reduce, tensors[1], dist.ReduceOp.MAX),
            run(dist.broadcast, tensors[2], size - 1),
            run(dist.all_gather, parts, tensors[3]),
            run(dist.all_gather_into_tensor, everywhere, tensors[4]),
            run(dist.barrier),
            run(dist.reduce, tensors[5], 0),
            # Depends on the first.
            run(dist.all_reduce, tensors[0], dist.ReduceOp.PRODUCT),
            run(dist.broadcast, tensors[6], 0),
            # Depends on the broadcast, which reads at its root and writes elsewhere.
            run(dist.all_gather, more, tensors[6]),
        ]

    plan = phalanx.plan(calls(results[0], phalanx.prepare))
    assert plan.plain.sizes == [7, 2, 1]
    plan()
    calls(results[1], lambda function, *arguments: function(*arguments))
    for index, (own, expected) in enumerate(zip(*results, strict=True)):
        if index != 5 or rank == 0:
            cases.check_bits(own, expected, f"tensor {index}")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_plan_merges_what_is_small_and_independent(ranks: RankServer, size: int) -> None:
    ranks.run(size, merges, fresh_seed())


def merges_up_to_a_limit() -> None:
    tensors = [torch.ones(1) for _ in range(300)]
    plan = phalanx.plan([phalanx.prepare(dist.all_reduce, each) for each in tensors])
    assert plan.plain.sizes == [128, 128, 44]
    plan()
    large = [torch.ones(1000) for _ in range(6)]
    wide = phalanx.plan([phalanx.prepare(dist.all_reduce, each) for each in large])
    assert wide.plain.sizes == [4, 2]
    wide()
    size = dist.get_world_size()
    assert all((each == size).all() for each in (*tensors, *large))


def test_a_plan_merges_up_to_its_limits(ranks: RankServer) -> None:
    ranks.run(2, merges_up_to_a_limit)


def names_the_part_that_differs() -> str:
    own = torch.ones(3 + dist.get_rank())
    plan = phalanx.plan(
        [
            phalanx.prepare(dist.all_reduce, torch.ones(2)),
            phalanx.prepare(dist.all_reduce, own),
        ]
    )
    with pytest.raises(CollectiveMismatch) as caught:
        plan()
    return str(caught.value)


def test_a_mismatch_in_a_plan_names_the_operation(ranks: RankServer) -> None:
    for text in ranks.run(2, names_the_part_that_differs):
        assert "all_reduce" in text, text
        assert "float32[3]" in text, text
        assert "float32[4]" in text, text
        assert text.count("at test_prepared.py:") == 3, text


def plan_against_one_operation() -> str:
    operation = phalanx.prepare(dist.all_reduce, torch.ones(2))
    run: Any = phalanx.plan([operation, phalanx.prepare(dist.barrier)])
    with pytest.raises(CollectiveMismatch) as caught:
        (operation if dist.get_rank() else run)()
    return str(caught.value)


def test_a_plan_does_not_match_its_first_operation(ranks: RankServer) -> None:
    for text in ranks.run(2, plan_against_one_operation):
        assert "in all_reduce #1 float32[2] SUM at test_prepared.py:" in text, text
        assert "in plan #1 of 2 operations at test_prepared.py:" in text, text


def rejects_plans() -> None:
    operation = phalanx.prepare(dist.all_reduce, torch.ones(2))
    other = phalanx.prepare(dist.barrier, group=dist.new_group([0, 1]))
    with pytest.raises(UsageError, match="got no operations"):
        phalanx.plan([])
    with pytest.raises(ArgumentTypeError, match="operation 1 is <built-in"):
        phalanx.plan([operation, len])  # type: ignore[list-item]
    with pytest.raises(ArgumentTypeError, match="operation 0 is <plan of 1"):
        phalanx.plan([phalanx.plan([operation])])
    with pytest.raises(UsageError, match=r"operation 1, barrier .* is of another group"):
        phalanx.plan([operation, other])


def test_wrong_plans_are_rejected(ranks: RankServer) -> None:
    ranks.run(2, rejects_plans)


# ---- changed tensors ----


def refuses_changed_tensors() -> None:
    rank = dist.get_rank()

    def refused(change: Callable[[Tensor], object], message: str) -> None:
        tensor = torch.ones(6)
        for make in (
            lambda operation: operation,
            lambda operation: phalanx.plan([operation, phalanx.prepare(dist.barrier)]),
        ):
            operation = make(phalanx.prepare(dist.all_reduce, tensor))
            operation()
            if rank == 0:
                change(tensor)
                for call in (operation, operation.start):
                    with pytest.raises(UsageError, match=message) as caught:
                        call()
                    assert "all_reduce float32[6] prepared at test_prepared.py:" in str(
                        caught.value
                    )
                tensor = torch.ones(6)
                operation = make(phalanx.prepare(dist.all_reduce, tensor))
            operation()  # nothing is lost

    refused(lambda t: t.untyped_storage().resize_(0), "the memory of its tensor was freed")
    refused(lambda t: t.resize_(3), r"was float32\[6\].*, and is float32\[3\]")
    refused(lambda t: t.resize_(300_000), r"and is float32\[300000\]")
    refused(lambda t: t.set_(torch.ones(6)), "the memory of its tensor was replaced")
    refused(lambda t: setattr(t, "data", torch.ones(6)), "was replaced")
    refused(lambda t: setattr(t, "data", torch.ones(6).double()), "is float64")
    refused(lambda t: torch.utils.swap_tensors(t, torch.ones(6, device="meta")), "on meta")
    refused(lambda t: torch.utils.swap_tensors(t, torch.ones(6)), "was replaced")
    refused(lambda t: t.t_().unsqueeze_(0), r"is float32\[1, 6\]")
    refused(lambda t: t.as_strided_((6,), (0,)), r"strides \[0\]")


def test_a_changed_tensor_is_an_error_on_its_rank_alone(ranks: RankServer) -> None:
    ranks.run(2, refuses_changed_tensors)


def continues_with_gradients() -> None:
    tensor = torch.ones(6)
    operation = phalanx.prepare(dist.all_reduce, tensor)
    operation()
    tensor.requires_grad_()
    operation()
    with torch.no_grad():
        tensor.mul_(2)
        assert (tensor == 8).all()
    tensor.grad = torch.ones(6)
    operation()
    assert (tensor == 16).all()


def test_a_tensor_may_come_to_require_gradients(ranks: RankServer) -> None:
    ranks.run(2, continues_with_gradients)


# ---- arguments ----


def refuses_arguments() -> None:
    ones = torch.ones(3, 4)

    def refused(error: type[Exception], message: str, *arguments: Any, **options: Any) -> None:
        with pytest.raises(error, match=message):
            phalanx.prepare(*arguments, **options)

    refused(UsageError, "expected one of the functions of torch.distributed", print)
    refused(UsageError, "expected one of the functions", dist.all_gather_object, [], 1)
    refused(UsageError, r"async_op is True.*start\(\)", dist.all_reduce, ones, async_op=True)
    refused(ArgumentTypeError, "missing a required argument", dist.all_reduce)
    refused(ArgumentTypeError, "unexpected keyword", dist.all_reduce, ones, root=1)
    refused(UsageError, "got no source", dist.recv, ones)
    refused(UsageError, "strides .* contiguous", dist.all_reduce, ones.t())
    refused(UsageError, "negative", dist.all_reduce, torch._neg_view(ones))
    refused(UsageError, "PREMUL|lacks", dist.all_reduce, ones, dist._make_nccl_premul_sum(2.0))  # type: ignore[attr-defined]
    refused(UsageError, "lacks the operator", dist.all_reduce, ones.int(), dist.ReduceOp.AVG)
    refused(UsageError, "BAND has no meaning", dist.all_reduce, ones, dist.ReduceOp.BAND)
    refused(UsageError, "share memory", dist.all_gather, [ones, ones], ones)
    refused(UsageError, "root 7|rank 7|7", dist.broadcast, ones, 7)
    refused((TypeError, ValueError, UsageError), "", dist.all_reduce, 3)  # type: ignore[arg-type]
    dist.all_reduce(ones)  # the group is intact
    with pytest.raises(TypeError, match="takes no arguments"):
        phalanx.prepare(dist.all_reduce, ones)(ones)  # type: ignore[call-arg]


def test_wrong_arguments_are_rejected_at_once(ranks: RankServer) -> None:
    ranks.run(2, refuses_arguments)


def keeps_its_lists() -> None:
    parts = [torch.zeros(2) for _ in range(dist.get_world_size())]
    own, outputs = torch.full((2,), float(dist.get_rank())), list(parts)
    operation = phalanx.prepare(dist.all_gather, outputs, own)
    outputs.clear()
    operation()
    assert [int(part[1]) for part in parts] == [0, 1]


def a_handler_comes_between() -> None:
    """A signal handler runs a collective while one is being prepared."""
    own, others = torch.ones(3), torch.ones(3)
    check = distributed_c10d._check_single_tensor

    def disturbed(*arguments: Any) -> Any:
        distributed_c10d._check_single_tensor = check
        signal.raise_signal(signal.SIGUSR1)
        return check(*arguments)

    signal.signal(signal.SIGUSR1, lambda *_: dist.all_reduce(others))
    distributed_c10d._check_single_tensor = disturbed
    try:
        operation = phalanx.prepare(dist.broadcast, own, 0)
    finally:
        distributed_c10d._check_single_tensor = check
    assert (others == 2).all()
    own.fill_(5.0 - dist.get_rank())
    operation()
    assert (own == 5).all()


def test_a_signal_handler_is_not_prepared(ranks: RankServer) -> None:
    ranks.run(2, a_handler_comes_between)


def test_lists_are_copied(ranks: RankServer) -> None:
    ranks.run(2, keeps_its_lists)


# ---- phases ----


def has_phases() -> None:
    operation = phalanx.prepare(dist.all_reduce, torch.ones(3))
    with pytest.raises(UsageError, match=r"wait\(\): it has not been started"):
        operation.wait()
    operation.start()
    for call in (operation, operation.start):
        with pytest.raises(UsageError, match=r"it has been started: call wait\(\) first"):
            call()
    operation.wait()
    operation()


def test_the_order_of_start_and_wait_is_checked(ranks: RankServer) -> None:
    ranks.run(2, has_phases)


def refuses_two_threads() -> None:
    tensor = torch.ones(1)
    operation = phalanx.prepare(dist.recv, tensor, peer())
    if dist.get_rank() == 0:
        barrier_of_store("refused")
        dist.send(torch.zeros(1), 1)
        return
    thread = threading.Thread(target=operation)
    thread.start()
    refused = ""
    while not refused:  # at once, when the thread runs; a run that came first would hang
        try:
            operation.wait()
        except UsageError as error:
            refused = str(error) if "running" in str(error) else ""
    with pytest.raises(UsageError, match="running in another thread: prepare an operation for"):
        operation()
    barrier_of_store("refused")
    thread.join(60)
    assert tensor.item() == 0


def test_a_run_in_a_second_thread_is_an_error(ranks: RankServer) -> None:
    ranks.run(2, refuses_two_threads)


# ---- the life of operations and groups ----


def is_refused_after_the_group() -> None:
    group = dist.new_group([0, 1])
    tensor = torch.ones(3)
    operation = phalanx.prepare(dist.all_reduce, tensor, group=group)
    plan = phalanx.plan([operation])
    operation()
    dist.destroy_process_group(group)
    for call in (operation, operation.start, plan):
        with pytest.raises((UsageError, ValueError)) as caught:
            call()
        assert "group" in str(caught.value)
    dist.all_reduce(tensor)
    assert (tensor == 4).all()


def test_a_destroyed_group_is_an_error(ranks: RankServer) -> None:
    ranks.run(2, is_refused_after_the_group)


def is_collected() -> None:
    tensor = torch.ones(3)
    operation = phalanx.prepare(dist.all_reduce, tensor)
    plan = phalanx.plan([operation])
    plan.plain.itself = plan  # a cycle
    seen = weakref.ref(tensor), weakref.ref(operation), weakref.ref(plan)
    plan()
    assert gc.is_tracked(plan)
    del plan, operation, tensor
    gc.collect()
    assert [each() for each in seen] == [None] * 3


def test_operations_are_collected(ranks: RankServer) -> None:
    ranks.run(2, is_collected)


def deletes_what_is_in_flight() -> None:
    count = 10**6
    if dist.get_rank() == 0:
        tensor = torch.arange(count)
        operation = phalanx.prepare(dist.isend, tensor, 1)
        operation.start()
        del operation, tensor
        gc.collect()
        decoys = [torch.zeros(count, dtype=torch.int64) for _ in range(4)]  # take freed memory
        barrier_of_store("deleted")
        dist.barrier()
        assert all((decoy == 0).all() for decoy in decoys)
    else:
        barrier_of_store("deleted")
        tensor = torch.empty(count, dtype=torch.int64)
        dist.recv(tensor, 0)
        assert (tensor == torch.arange(count)).all()
        dist.barrier()


def test_a_message_in_flight_keeps_its_memory(ranks: RankServer) -> None:
    ranks.run(2, deletes_what_is_in_flight)


def times_out() -> str:
    operation = phalanx.prepare(dist.all_reduce, torch.ones(3))
    text = ""
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveTimeout) as caught:
            operation()
        text = str(caught.value)
    barrier_of_store("ended")
    return text


def test_a_timeout_names_the_call_site_of_prepare(ranks: RankServer) -> None:
    text, _ = ranks.run(2, times_out, timeout=0.5)
    assert "all_reduce #1 float32[3] SUM at test_prepared.py:" in text, text


# ---- without the core ----


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def falls_back(reason: str, kind: str) -> None:
    handler = Lines()
    logging.getLogger("phalanx").addHandler(handler)
    group = dist.new_group(backend="gloo") if kind == "gloo" else dist.group.WORLD
    size = dist.get_world_size()
    tensor = torch.ones(3)
    operations = [phalanx.prepare(dist.all_reduce, tensor, group=group) for _ in range(2)]
    assert not operations[0].is_native
    operations[0]()
    operations[0].start()
    operations[0].wait()
    plan = phalanx.plan(operations)
    plan()
    plan.start()
    plan.wait()
    assert (tensor == size**6).all()
    assert [line for line in handler.lines if "prepared operations" in line] == [
        f"prepared operations run as plain calls: {reason}"
    ]


def test_other_backends_run_plain_calls(ranks: RankServer) -> None:
    reason = "their group is of another backend, or without this rank"
    ranks.run(2, falls_back, reason, "gloo")


def test_several_hosts_run_plain_calls(ranks: RankServer) -> None:
    ranks.run(3, falls_back, "the ranks of their group are on several hosts", "hosts", hosts="aab")
