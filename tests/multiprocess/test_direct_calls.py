"""Direct calls: plain operations go to the core at once, all others to the general methods."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx import _native
from phalanx.backend import direct_calls
from phalanx.backend.process_group import ProcessGroup
from phalanx.errors import CollectiveTimeout, UsageError
from phalanx.torch_layouts import OPTIONS
from tests.conformance import cases
from tests.ranks import RankServer
from tests.seeds import fresh_seed

COUNT = 6  # divisible by the world sizes

_METHODS = {name for name, method in vars(ProcessGroup).items() if hasattr(method, "__wrapped__")}


@contextmanager
def general_calls() -> Iterator[list[str]]:
    """The names of the operations that the general methods run meanwhile."""
    group: Any = dist.group.WORLD
    names: list[str] = []

    def recorded(call: Callable[..., Any], name: str = "") -> Callable[..., Any]:
        def run(first: Any, *arguments: Any) -> Any:
            names.append(name or first)
            return call(first, *arguments)

        return run

    executor, messages = group._executor, group._messages
    executor.run = recorded(executor.run)
    messages.send, messages.recv = (
        recorded(messages.send, "send"),
        recorded(messages.recv, "recv"),
    )
    try:
        yield names
    finally:
        del executor.run, messages.send, messages.recv


def call_function(function: Callable[..., object], *arguments: Any, **options: Any) -> None:
    function(*arguments, **options)


def operations(
    own: Tensor, op: Any, run: Callable[..., None] = call_function
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Return all blocking operations: each returns its result, which no tensor of the next has.

    `run` gets a function of `torch.distributed` and its arguments.
    """
    rank, size = dist.get_rank(), dist.get_world_size()

    def parts() -> list[Tensor]:
        return [cases.poisoned(own) for _ in range(size)]

    def in_place(call: Callable[[Tensor], object]) -> Tensor:
        tensor = own.clone()
        call(tensor)
        return tensor

    def into(output: Tensor | list[Tensor], call: Callable[[Any], object]) -> Tensor:
        call(output)
        return output if isinstance(output, Tensor) else torch.cat([o.view(-1) for o in output])

    row, inputs = cases.poisoned(own), list(own.repeat(size, 1))
    large, whole = cases.poisoned(own.repeat(size)), own.repeat(size)

    def exchange() -> Tensor:
        tensor = own.clone()
        if rank == 0:
            run(dist.send, tensor, size - 1, tag=3)
        if rank == size - 1:
            run(dist.recv, tensor, 0, tag=3)
        return tensor

    yield "barrier", lambda: in_place(lambda _: run(dist.barrier))
    yield "broadcast", lambda: in_place(lambda t: run(dist.broadcast, t, 1))
    yield "all_reduce", lambda: in_place(lambda t: run(dist.all_reduce, t, op))
    yield "reduce", lambda: in_place(lambda t: run(dist.reduce, t, 1, op))
    yield "all_gather", lambda: into(parts(), lambda o: run(dist.all_gather, o, own))
    yield (
        "gather",
        lambda: into(parts(), lambda o: run(dist.gather, own, o if rank == 1 else None, 1)),
    )
    yield (
        "scatter",
        lambda: into(row.clone(), lambda o: run(dist.scatter, o, inputs if rank == 1 else None, 1)),
    )
    yield (
        "reduce_scatter",
        lambda: into(row.clone(), lambda o: run(dist.reduce_scatter, o, inputs, op)),
    )
    yield (
        "all_gather_single",
        lambda: into(large.clone(), lambda o: run(dist.all_gather_into_tensor, o, own)),
    )
    yield (
        "reduce_scatter_single",
        lambda: into(row.clone(), lambda o: run(dist.reduce_scatter_tensor, o, whole, op)),
    )
    yield (
        "all_to_all_single",
        lambda: into(row.clone(), lambda o: run(dist.all_to_all_single, o, own)),
    )
    yield (
        "all_to_all",
        lambda: into(parts(), lambda o: run(dist.all_to_all, o, inputs)),
    )
    yield "message", exchange


def direct_equals_general(seed: int) -> None:
    membership = dist.group.WORLD._membership  # type: ignore[union-attr]
    for name in cases.DTYPES:
        for operator in cases.operators(name):
            own = cases.data(name, COUNT, seed, dist.get_rank())
            if operator == "AVG" and not own.dtype.is_floating_point:
                continue  # complex numbers: torch.distributed passes real views
            op = cases.reduce_op(operator)
            with general_calls() as general:
                direct = {name: call() for name, call in operations(own, op)}
            assert not general, (name, operator)
            membership.is_direct = False
            with general_calls() as general:
                expected = {name: call() for name, call in operations(own, op)}
            membership.is_direct = True
            assert len(general) >= len(expected) - 1  # a rank in the middle has no message
            for operation, result in expected.items():
                cases.check_bits(direct[operation], result, f"{operation} {operator} of {name}")


@pytest.mark.parametrize("size", [2, 3])
def test_direct_calls_have_the_results_of_general_ones(ranks: RankServer, size: int) -> None:
    ranks.run(size, direct_equals_general, fresh_seed())


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Subclass(Tensor):
    pass


def unusual_tensors() -> dict[str, Tensor]:
    base = torch.arange(12.0).view(3, 4)
    return {
        "with gaps": base[:, :2],
        "transposed": base.t(),
        "negated": torch._neg_view(base),
        "conjugated": torch.ones(4, dtype=torch.complex64).conj(),
        "of a subclass": base.as_subclass(_Subclass),
        "sparse": base.to_sparse(),
    }


def goes_to_the_general_method() -> None:
    group: Any = dist.group.WORLD
    own = torch.ones(3)
    plain = dist.AllreduceOptions()
    plain.asyncOp = False

    def general(call: Callable[[], Any]) -> bool:
        with general_calls() as names:
            result = call()
            if result is not None:
                result.wait()
        return bool(names)

    assert not general(lambda: group.allreduce([own], plain))
    parameter = torch.nn.Parameter(own)
    assert general(lambda: group.allreduce([parameter], plain))
    with torch.no_grad():
        assert not general(lambda: group.allreduce([parameter], plain))
    assert not general(lambda: group.allreduce([torch.ones(0, 3)], plain))
    assert not general(lambda: group.allreduce([torch.tensor(1.0)], plain))
    for name, tensor in unusual_tensors().items():
        assert general(lambda tensor=tensor: group.allreduce([tensor], plain)), name  # type: ignore[misc]
    assert general(lambda: group.allreduce(own))
    assert general(lambda: group.allreduce((own,), plain))
    assert general(lambda: group.allreduce([own], opts=plain))
    assert general(lambda: group.allreduce([own.int()], dist.ReduceOp.AVG))
    assert general(lambda: dist.all_reduce(own, dist._make_nccl_premul_sum(2.0)))  # type: ignore[attr-defined]
    assert general(lambda: dist.all_reduce(own, async_op=True))
    with _Mode():  # type: ignore[no-untyped-call]
        assert general(lambda: dist.all_reduce(own))
    with torch.profiler.profile():
        assert general(lambda: dist.all_reduce(own))
    # An operation that is queued comes first.
    large = torch.ones(2**20)
    work = dist.all_reduce(large, async_op=True)
    dist.all_reduce(large)
    work.wait()
    assert (large == dist.get_world_size() ** 2).all()


def test_unusual_operations_take_the_general_methods(ranks: RankServer) -> None:
    ranks.run(2, goes_to_the_general_method)


def rejects() -> None:
    group: Any = dist.group.WORLD
    plain = dist.AllreduceOptions()
    plain.asyncOp = False
    with pytest.raises(UsageError, match="on meta"):
        group.allreduce([torch.ones(3, device="meta")], plain)
    with pytest.raises(UsageError, match="share memory"):
        group.allreduce([torch.ones(1).expand(3)], plain)
    with pytest.raises(UsageError, match="got 2 tensors"):
        group.allreduce([torch.ones(3), torch.ones(3)], plain)
    plain.reduceOp = dist.ReduceOp.BAND
    with pytest.raises(UsageError, match="BAND has no meaning for float32"):
        group.allreduce([torch.ones(3)], plain)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)  # the group is intact
    assert (tensor == dist.get_world_size()).all()


def test_wrong_arguments_have_the_general_errors(ranks: RankServer) -> None:
    ranks.run(2, rejects)


def own_timeout() -> None:
    group: Any = dist.group.WORLD
    if dist.get_rank() == 1:
        group.get_group_store().wait(["ended"], timedelta(seconds=20))
    else:
        opts = dist.BarrierOptions()
        opts.asyncOp = False
        opts.timeout = timedelta(milliseconds=150)
        with general_calls() as names, pytest.raises(CollectiveTimeout) as caught:
            group.barrier(opts=opts)
        assert not names
        assert caught.value.seconds == pytest.approx(0.15)
        assert "test_direct_calls.py:" in str(caught.value)
        group.get_group_store().set("ended", "")


def test_the_timeout_of_options_holds(ranks: RankServer) -> None:
    ranks.run(2, own_timeout)


def test_methods_look_like_the_general_ones() -> None:
    assert {"allreduce", "_allgather_base", "send", "recv", "barrier"} <= _METHODS
    method: Any = ProcessGroup.allreduce
    assert method.__name__ == "allreduce"
    assert method.__doc__ == method.__wrapped__.__doc__
    assert list(inspect.signature(ProcessGroup.broadcast).parameters)[-1] == "timeout"


def test_all_options_are_known() -> None:
    for name in direct_calls._OPTIONS:
        assert direct_calls._layout(name) is not None, name


def test_options_with_an_unknown_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    known = direct_calls._KNOWN_ATTRIBUTES - {"reduceOp"}
    monkeypatch.setattr(direct_calls, "_KNOWN_ATTRIBUTES", known)
    assert direct_calls._layout("broadcast") is not None
    assert direct_calls._layout("all_reduce") is None


SWITCHED_OFF = """
import os, torch, torch.distributed as dist
from phalanx.backend.process_group import ProcessGroup
dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.arange(4.0)
dist.all_reduce(tensor)
assert tensor.tolist() == [0, 1, 2, 3]
assert not hasattr(ProcessGroup.allreduce, "__wrapped__")
dist.destroy_process_group()
"""


def test_the_switch() -> None:
    environment = {**os.environ, "PHALANX_DIRECT_CALLS": "0", "PHALANX_JOB": "none"}
    subprocess.run([sys.executable, "-c", SWITCHED_OFF], env=environment, check=True)
    environment["PHALANX_DIRECT_CALLS"] = "2"
    ended = subprocess.run(
        [sys.executable, "-c", SWITCHED_OFF], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert "PHALANX_DIRECT_CALLS=2 in the environment: expected an integer" in ended.stderr


def test_positions_are_confirmed() -> None:
    options = [dist.ReduceOptions() for _ in range(3)]
    roots = [11, 22, 33]
    for each, root in zip(options, roots, strict=True):
        each.rootRank = root
    position = OPTIONS["ReduceOptions"]["root"]
    assert _native.has_field(options, roots, position, 8)
    assert not _native.has_field(options, [1, 2, 3], position, 8)
    assert not _native.has_field(options, roots[:2], position, 8)
    assert not _native.has_field(options, roots, position + 8, 8)
    assert not _native.has_field(options, roots, 2**30, 8)  # where there is no memory


_WRONG_LAYOUTS = """
from phalanx import _native, torch_versions
from phalanx.backend import direct_calls

layout = dict(torch_versions.TENSOR_LAYOUT)
assert _native.set_tensor_layout(layout, *direct_calls._samples())
for name in layout.keys() - {"bytes", "storage_bytes"}:  # which no field shows
    for more in (8, -8, 2**20):
        wrong = {**layout, name: max(layout[name] + more, 0)}
        assert not _native.set_tensor_layout(wrong, *direct_calls._samples()), wrong
"""


def test_a_wrong_layout_is_found() -> None:
    """In a process of its own, since the layout is that of all groups in it."""
    subprocess.run([sys.executable, "-c", _WRONG_LAYOUTS], check=True)
