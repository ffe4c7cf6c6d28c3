"""Compiled code that communicates gives the same results as eager code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ecosystem.oracle import adam, check_trained, fresh, mesh_of, new_model, train
from tests.ecosystem.programs import alone_on_a_core
from tests.ranks import RankServer

PRELOAD = (
    "torch._dynamo.backends.distributed",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)

# The graphs of Dynamo and AOTAutograd, run directly; and compiled to C++, which takes most of a
# minute.
COMPILERS = ("aot_eager", pytest.param("inductor", marks=pytest.mark.long))


class Network(nn.Module):
    """Layers in a separate class, since Dynamo does not start in torch's code (`nn.Sequential`)."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layers(inputs)
        return result


def counted(compiler: str) -> tuple[list[object], Callable[..., object]]:
    """Return a compiler, and the list of the graphs that it got."""
    graphs = list[object]()

    def compile_part(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(compiler)(graph, inputs)

    return graphs, compile_part


def functional(compiler: str, seed: int) -> None:
    import torch.distributed._functional_collectives as collectives

    alone_on_a_core()
    rank, world = dist.get_rank(), dist.group.WORLD

    def exchange(value: Tensor) -> tuple[Tensor, ...]:
        total = collectives.all_reduce(value * 2, "sum", world)
        rows = collectives.all_gather_tensor(value + 1, 0, world)
        part = collectives.reduce_scatter_tensor(rows.sin(), "sum", 0, world)
        swapped = collectives.all_to_all_single(part.cos(), None, None, world)
        return (
            total * 3,
            rows.exp(),
            part - 1,
            swapped * value,
            collectives.broadcast(value, 0, world) + 1,
        )

    compiled = torch.compile(exchange, backend=compiler, fullgraph=True)
    for step in range(2):
        value = fresh(seed + 10 * step + rank, 4, 3)
        for one, other in zip(compiled(value), exchange(value), strict=True):
            torch.testing.assert_close(one, other)


def bucketed(compiler: str, seed: int) -> None:
    """Let the compiler bucket collectives: its all_gather writes into its own tensor."""
    import torch._inductor.config as inductor
    import torch.distributed._functional_collectives as collectives

    alone_on_a_core()
    inductor.bucket_all_gathers_fx = inductor.bucket_reduce_scatters_fx = "all"
    world = dist.group.WORLD

    def exchange(one: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        rows = [collectives.all_gather_tensor(x + 1, 0, world) for x in (one, other)]
        parts = [collectives.reduce_scatter_tensor(x.sin(), "sum", 0, world) for x in (one, other)]
        return tuple(x * 2 for x in rows + parts)

    values = [fresh(seed + 10 * number + dist.get_rank(), 4, 3) for number in range(2)]
    expected = exchange(*values)
    compiled = torch.compile(exchange, backend=compiler, fullgraph=True)
    for mine, other in zip(compiled(*values), expected, strict=True):
        torch.testing.assert_close(mine, other)


def data_parallel(compiler: str, seed: int) -> None:
    """Split the graph at the ends of buckets, so that they are sent during backward."""
    alone_on_a_core()
    parts, compile_part = counted(compiler)
    wide, plain = (
        Network(nn.Sequential(*(nn.Linear(400, 400, bias=False) for _ in range(4)))).double()
        for _ in range(2)
    )
    model = nn.parallel.DistributedDataParallel(wide, bucket_cap_mb=1.2)
    plain.load_state_dict(wide.state_dict())
    compiled = torch.compile(model, backend=compile_part)
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = fresh(seed, 4 * size, 400)
    compiled(rows[rank::size]).pow(2).mean().backward()
    plain(rows).pow(2).mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert len(parts) == 4  # one for each bucket, which holds a layer of 1.22 MiB


def fully_sharded(compiler: str, seed: int) -> None:
    """Compile each block, but not the code of FSDP between them."""
    from torch.distributed.fsdp import fully_shard

    alone_on_a_core()
    parts, compile_part = counted(compiler)
    first, second, last = new_model(seed)
    blocks = Network(nn.Sequential(first, second)), Network(nn.Sequential(last))
    model = nn.Sequential(*blocks)
    for block in blocks:
        block.compile(backend=compile_part)
        fully_shard(block)
    fully_shard(model)
    train(model, adam(model.parameters()), seed)
    check_trained(model, seed)
    assert len(parts) >= 2


def tensor_parallel(compiler: str, seed: int) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    alone_on_a_core()
    model, alone = Network(new_model(seed)), new_model(seed)
    plan = {"layers.0": ColwiseParallel(), "layers.2": RowwiseParallel()}
    parallelize_module(model, mesh_of(dist.get_world_size()), plan)
    parts, compile_part = counted(compiler)
    model.compile(backend=compile_part, fullgraph=True)
    rows = fresh(seed + 9, 5, 10)
    torch.testing.assert_close(model(rows), alone(rows))
    assert len(parts) == 1


Check = Callable[[str, int], None]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("check", [functional, data_parallel, fully_sharded, tensor_parallel])
def test_compiled(ranks: RankServer, seed: int, check: Check, compiler: str) -> None:
    ranks.run(2, check, compiler, seed, timeout=120, limit=280)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_bucketed(ranks: RankServer, seed: int) -> None:
    ranks.run(2, bucketed, "inductor", seed, timeout=120, limit=280)
