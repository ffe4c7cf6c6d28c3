"""Operations as operators of PyTorch's dispatcher, beside those of Gloo."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import phalanx
from tests.ranks import RankServer


class RecordingMode(TorchDispatchMode):
    """A mode that records the operators of `c10d`, the kinds of their arguments, and the groups."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[str]]] = []
        self.groups: list[dist.ProcessGroup] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen.append((str(func), [type(each).__name__ for each in args]))
            boxed = [each for each in args if isinstance(each, torch.ScriptObject)]
            self.groups.append(dist.ProcessGroup.unbox(boxed[0]))
        return func(*args, **(kwargs or {}))


def every_operation(group: dist.ProcessGroup) -> list[torch.Tensor]:
    rank, size = group.rank(), group.size()
    other = (rank + 1) % size
    one = torch.full((2,), float(rank + 1))
    whole = torch.arange(2.0 * size) + rank
    parts = lambda: [torch.zeros(2) for _ in range(size)]  # noqa: E731
    results: list[torch.Tensor] = []

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        results.append(tensor.clone())
        return results[-1]

    def kept(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        results.extend(tensors)
        return tensors

    dist.broadcast(fresh(one), 0, group=group)
    dist.all_reduce(fresh(one), group=group)
    dist.all_reduce(fresh(one), op=dist.ReduceOp.MAX, group=group)
    work = dist.all_reduce(fresh(one), group=group, async_op=True)
    work.wait()
    work.get_future().wait()
    dist.all_reduce_coalesced([fresh(one), fresh(whole)], group=group)
    dist.reduce(one.clone(), 0, group=group)
    dist.all_gather(kept(parts()), one, group=group)
    dist.all_gather_into_tensor(fresh(whole), one, group=group)
    dist.all_gather_coalesced([kept(parts()[:1]) for _ in range(size)], [one], group=group)
    dist.gather(one, kept(parts()) if rank == 0 else None, 0, group=group)
    dist.scatter(fresh(one), list(whole.split(2)) if rank == 0 else None, 0, group=group)
    dist.reduce_scatter(fresh(one), list(whole.split(2)), group=group)
    dist.reduce_scatter_tensor(fresh(one), whole, group=group)
    dist.all_to_all(kept(parts()), list(whole.split(2)), group=group)
    dist.all_to_all_single(fresh(whole), whole, group=group)
    dist.all_to_all_single(fresh(whole), whole, [2] * size, [2] * size, group=group)
    dist.barrier(group=group)
    dist.monitored_barrier(group=group)
    if rank == 0:
        dist.send(one, other, group=group)
        dist.isend(one, other, group=group).wait()
        dist.send(one, other, group=group)
    elif rank == 1:
        dist.recv(fresh(one), 0, group=group)
        dist.irecv(fresh(one), 0, group=group).wait()
        assert dist.recv(fresh(one), group=group) == 0
    return results


def the_same_operators() -> None:
    ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    assert ours is not None
    results, seen, events = [], [], []
    for group in (ours, gloo):
        with warnings.catch_warnings(action="ignore"):
            with RecordingMode() as outer, RecordingMode() as inner:
                results.append(every_operation(group))
            with torch.profiler.profile() as recorded:
                every_operation(group)
        assert outer.seen == inner.seen
        assert all(each is group for each in (*outer.groups, *inner.groups))
        seen.append(inner.seen)
        names = Counter(event.name for event in recorded.events())
        events.append({name: n for name, n in names.items() if name.startswith("c10d::")})
    assert seen[0] == seen[1]
    assert len(seen[0]) > 18
    assert events[0] == events[1]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_modes_and_the_profiler_see_the_same_as_on_gloo(ranks: RankServer) -> None:
    ranks.run(2, the_same_operators)


def operations_on(make: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    results: list[torch.Tensor] = []

    def fresh(count: int = 2) -> torch.Tensor:
        results.append(make(torch.arange(float(count)) + rank + 1))
        return results[-1]

    parts = lambda: [fresh() for _ in range(size)]  # noqa: E731
    dist.broadcast(fresh(), 0)
    dist.all_reduce(fresh())
    work = dist.all_reduce(fresh(), op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    dist.reduce(fresh(), 0)
    if rank:
        results.pop()  # undefined except on the root
    dist.all_gather(parts(), fresh())
    dist.all_gather_into_tensor(fresh(2 * size), fresh())
    dist.gather(fresh(), parts() if rank == 0 else None, 0)
    dist.scatter(fresh(), parts() if rank == 0 else None, 0)
    dist.reduce_scatter(fresh(), parts())
    dist.all_to_all(parts(), parts())
    dist.all_to_all_single(fresh(2 * size), fresh(2 * size))
    if rank == 0:
        dist.send(fresh(), 1)
    elif rank == 1:
        dist.recv(fresh(), 0)
    return results


def wrappers_are_unwrapped() -> None:
    expected = operations_on(lambda held: held), operations_on(lambda held: held * 10)

    def check() -> None:
        found = operations_on(lambda held: TwoTensor(held, held * 10))
        held = [each.a for each in found], [each.b for each in found]
        torch.testing.assert_close(held, expected, rtol=0, atol=0)

    check()
    with RecordingMode() as mode:
        check()
    assert len(mode.seen) > 11


def test_wrapper_tensors_are_handled_by_their_class(ranks: RankServer) -> None:
    ranks.run(2, wrappers_are_unwrapped)


def wrappers_in_lists() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.randn(2)
    every = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(every, own)

    def wrappers() -> list[TwoTensor]:
        return [TwoTensor(torch.zeros(2), torch.zeros(2)) for _ in range(size)]

    def check() -> None:
        # The dispatcher finds wrappers in a list, but not in a list of lists.
        outputs = wrappers()
        dist.all_to_all(outputs, [own] * size)
        for each, expected in zip(outputs, every, strict=True):
            torch.testing.assert_close([each.a, each.b], [expected, expected], rtol=0, atol=0)
        mixed, inputs = [own.clone(), wrappers()[0]], [torch.ones(2), *wrappers()[1:]]
        for call in (
            lambda: dist.all_gather(wrappers(), own),
            lambda: dist.all_gather(mixed, own),
            lambda: dist.all_gather(wrappers(), own, async_op=True),
            lambda: dist.gather(own, wrappers(), rank),
            lambda: dist.scatter(torch.zeros(2), inputs, rank),
            lambda: dist.reduce_scatter(torch.zeros(2), wrappers()),
            lambda: dist.reduce_scatter(torch.zeros(2), inputs),
            lambda: dist.all_gather_coalesced([wrappers()[:1] for _ in range(size)], [own]),
        ):
            with pytest.raises(phalanx.UsageError, match="a wrapper without memory, TwoTensor "):
                call()

    check()
    with RecordingMode():
        check()
    # The group is whole: nothing was sent.
    dist.all_reduce(own)
    torch.testing.assert_close(own, torch.stack(every).sum(0))


def test_wrappers_in_lists_are_handled_by_their_class_or_rejected(ranks: RankServer) -> None:
    ranks.run(2, wrappers_in_lists)


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))


def with_ddp(mesh: Any) -> None:
    model = DistributedDataParallel(network(), process_group=mesh.get_group())
    model(torch.ones(2, 8)).sum().backward()


def with_fsdp(mesh: Any) -> None:
    model: Any = network()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.ones(2, 8)).sum().backward()


def with_dtensor(mesh: Any) -> None:
    tensor = DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)])
    tensor.redistribute(mesh, [Replicate()]).redistribute(mesh, [Shard(1)])
    (tensor @ torch.distributed.tensor.distribute_tensor(torch.ones(4, 4), mesh)).full_tensor()


def the_same_counts(program: Callable[[Any], None]) -> None:
    counts = []
    for backend in ("phalanx", "gloo"):
        mesh: Any = init_device_mesh("cpu", (2,), backend_override={0: backend})
        assert dist.get_backend(mesh.get_group()) == backend
        with CommDebugMode() as mode:
            program(mesh)
        counts.append({str(op): count for op, count in mode.get_comm_counts().items() if count})
    assert counts[0] == counts[1]
    assert counts[0]


@pytest.mark.parametrize("program", (with_ddp, with_fsdp, with_dtensor))
def test_comm_debug_mode_counts_as_on_gloo(ranks: RankServer, program: Any) -> None:
    ranks.run(2, the_same_counts, program)


class FailingMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ArithmeticError(str(func))


class SwallowingMode(TorchDispatchMode):
    """A mode that does not pass operators on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return None if func is torch.ops.c10d.monitored_barrier_.default else func(*args)


def modes_that_interfere() -> None:
    tensor = torch.ones(3)
    with pytest.raises(ArithmeticError, match="allreduce_"), FailingMode():
        dist.all_reduce(tensor)
    with RecordingMode() as mode:
        if dist.get_rank() == 0:
            with SwallowingMode():
                dist.monitored_barrier()  # the other rank does not call it
        with pytest.raises(ValueError, match="expected one per rank"):
            dist.all_gather([torch.ones(3)], tensor)
        dist.all_reduce(tensor)
    assert [name for name, _ in mode.seen] == ["c10d.allreduce_.default"]
    assert tensor.tolist() == [2, 2, 2]


def test_modes_that_raise_or_swallow_an_operator(ranks: RankServer) -> None:
    ranks.run(2, modes_that_interfere)
