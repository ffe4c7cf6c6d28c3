"""Side effects of an operation that autograd sees: versions of tensors, and warnings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import phalanx
from phalanx.backend.process_group import ProcessGroup
from phalanx.torch_versions import all_gather_single, reduce_scatter_single
from tests.ranks import RankServer

COUNT = 4

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[Tensor]]


def calls() -> Iterator[tuple[str, Call]]:
    """Yield operations: function, arguments, and the tensors that it writes on this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def one() -> Tensor:
        return torch.ones(COUNT)

    def several() -> list[Tensor]:
        return [one() for _ in range(size)]

    def whole() -> Tensor:
        return torch.ones(COUNT * size)

    own, parts, all_parts = one(), several(), whole()
    yield "all_reduce", (dist.all_reduce, (own,), {}, [own])
    own = one()
    yield "broadcast", (dist.broadcast, (own, 0), {}, [own][:rank])
    own = one()
    yield "reduce", (dist.reduce, (own, 0), {}, [own][: 1 - rank])
    yield "all_gather", (dist.all_gather, (parts, one()), {}, parts)
    parts = several() if rank == 0 else []
    yield "gather", (dist.gather, (one(), parts or None, 0), {}, parts)
    own, parts = one(), several()
    yield "scatter", (dist.scatter, (own, parts if rank == 0 else None, 0), {}, [own])
    own = one()
    yield "reduce_scatter", (dist.reduce_scatter, (own, several()), {}, [own])
    yield "all_gather_single", (all_gather_single, (all_parts, one()), {}, [all_parts])
    own = one()
    yield "reduce_scatter_single", (reduce_scatter_single, (own, whole()), {}, [own])
    parts, all_parts = several(), whole()
    yield "all_to_all", (dist.all_to_all, (parts, several()), {}, parts)
    yield "all_to_all_single", (dist.all_to_all_single, (all_parts, whole()), {}, [all_parts])
    own = one()
    message: Call = (dist.recv, (own, 0), {}, [own]) if rank else (dist.send, (one(), 1), {}, [])
    yield "message", message


def run_at_once(function: Callable[..., Any], *arguments: Any) -> None:
    function(*arguments)


def run_asynchronously(function: Callable[..., Any], *arguments: Any) -> None:
    functions = {dist.send: dist.isend, dist.recv: dist.irecv}
    if function in functions:
        functions[function](*arguments).wait()
    else:
        function(*arguments, async_op=True).wait()


def run_generally(function: Callable[..., Any], *arguments: Any) -> None:
    group: Any = dist.group.WORLD
    group._membership.is_direct = False
    function(*arguments)
    group._membership.is_direct = True


def run_prepared(function: Callable[..., Any], *arguments: Any) -> None:
    phalanx.prepare(function, *arguments)()


def run_in_plan(function: Callable[..., Any], *arguments: Any) -> None:
    phalanx.plan([phalanx.prepare(function, *arguments)])()


WAYS = [run_at_once, run_asynchronously, run_generally, run_prepared, run_in_plan]


def changes_versions() -> None:
    for way in WAYS:
        for name, (function, arguments, options, written) in calls():
            before = [each._version for each in written]
            way(function, *arguments, **options)
            after = [each._version for each in written]
            assert all(map(int.__lt__, before, after)), (name, way)


def test_an_operation_changes_the_version_of_what_it_writes(ranks: RankServer) -> None:
    ranks.run(2, changes_versions)


def reuses_a_buffer() -> None:
    weight, buffer = torch.ones(2, requires_grad=True), torch.zeros(4)
    loss = torch.zeros(())
    for step in (1.0, 2.0):
        all_gather_single(buffer, torch.full((2,), step))
        loss = loss + (buffer[:2] * weight).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_buffer_that_a_backward_pass_needs(ranks: RankServer) -> None:
    ranks.run(2, reuses_a_buffer)


def writes_inference_tensors() -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
    for way in (run_at_once, run_asynchronously, run_generally):
        with torch.inference_mode():
            tensor.fill_(1)
        way(dist.all_reduce, tensor)
        assert tensor.tolist() == [2, 2, 2]


def test_inference_tensors_have_no_version(ranks: RankServer) -> None:
    ranks.run(2, writes_inference_tensors)


def backward_warnings(backend: str) -> dict[str, list[str]]:
    """Return, by operation on tensors that require gradients, the warnings of a backward pass."""
    group = dist.group.WORLD if backend == "phalanx" else dist.new_group(backend=backend)
    told: dict[str, list[str]] = {}
    for name, (function, arguments, options, written) in calls():
        weight = torch.full((), 2.0, requires_grad=True)

        def graded(value: Any, weight: Tensor = weight) -> Any:
            if isinstance(value, list):
                return [graded(each) for each in value]
            return value * weight if isinstance(value, Tensor) else value

        kept = {id(each) for each in written if name not in ("all_reduce", "broadcast")}

        def replaced(value: Any, kept: set[int] = kept) -> Any:
            if isinstance(value, list):
                return value if any(id(each) in kept for each in value) else graded(value)
            return value if id(value) in kept else graded(value)

        inputs = [replaced(value) for value in arguments]
        # The thread of Gloo writes to views of the output, an error if autograd follows it by then.
        may_fail = backend == "gloo" and name == "all_gather_single"
        with suppress(RuntimeError) if may_fail else nullcontext():
            function(*inputs, group=group, **options)
        outputs = [inputs[0]] if name in ("all_reduce", "broadcast") else written
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for each in outputs:
                if each.requires_grad:
                    each.sum().backward(retain_graph=True)
        told[name] = [
            str(each.message).partition(":: ")[0].partition("::")[2][:70] for each in caught
        ]
    return told


def test_a_backward_pass_warns_as_on_gloo(ranks: RankServer) -> None:
    for ours, theirs in zip(
        ranks.run(2, backward_warnings, "phalanx"),
        ranks.run(2, backward_warnings, "gloo"),
        strict=True,
    ):
        assert ours == theirs
        assert any(ours.values())


def without_gradients() -> None:
    """Without gradients, also a tensor that requires them takes the direct way."""
    weight = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        dist.all_reduce(weight)
    assert weight.is_leaf
    assert weight.tolist() == [2, 2, 2]
    (weight * 2).sum().backward()
    assert isinstance(dist.group.WORLD, ProcessGroup)


def test_nothing_is_followed_without_gradients(ranks: RankServer) -> None:
    ranks.run(2, without_gradients)
