"""Functional collectives, those with gradients, and the kernel that PyTorch's compiler calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ecosystem.oracle import fresh, mesh_of
from tests.ranks import RankServer


def functional_collectives(seed: int) -> None:
    import torch.distributed._functional_collectives as functional

    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = [fresh(seed + peer, 4 * size, 6) for peer in range(size)]
    mine, total = everyone[rank], sum(everyone)
    world = dist.group.WORLD
    kept = mine.clone()
    for group in (world, list(range(size)), mesh_of(size), (mesh_of(size), 0)):
        torch.testing.assert_close(functional.all_reduce(mine, "sum", group), total)
    torch.testing.assert_close(functional.all_reduce(mine, "avg", world), total / size)
    for dim in (0, 1):
        gathered = functional.all_gather_tensor(mine, dim, world)
        assert torch.equal(gathered + 0, torch.cat(everyone, dim))
    part = functional.reduce_scatter_tensor(mine, "sum", 0, world)
    torch.testing.assert_close(part + 0, total[4 * rank : 4 * rank + 4])
    taken = functional.all_to_all_single(mine, None, None, world)
    assert torch.equal(taken + 0, torch.cat([t[4 * rank : 4 * rank + 4] for t in everyone]))
    splits = [4 * size if peer == 0 else 0 for peer in range(size)]  # everything to rank 0
    taken = functional.all_to_all_single(mine, [4 * size if rank == 0 else 0] * size, splits, world)
    assert torch.equal(taken + 0, torch.cat(everyone) if rank == 0 else mine[:0])
    assert torch.equal(functional.broadcast(mine, size - 1, world) + 0, everyone[-1])
    # Only one dimension is supported.
    ring = [(peer + 1) % size for peer in range(size)]
    moved = functional.permute_tensor(mine.flatten(), ring, world)
    assert torch.equal(moved + 0, everyone[rank - 1].flatten())
    for result in functional.all_reduce_coalesced([mine, mine], "sum", world):
        torch.testing.assert_close(result + 0, total)
    for result in functional.all_gather_into_tensor_coalesced([mine, mine], world):
        assert torch.equal(result + 0, torch.cat(everyone))
    for result in functional.reduce_scatter_tensor_coalesced([mine], "sum", [0], world):
        torch.testing.assert_close(result + 0, total[4 * rank : 4 * rank + 4])
    assert torch.equal(mine, kept)


def gather_of_the_compiler(seed: int) -> None:
    """Call the kernel that requires a registered backend in PyTorch, on Phalanx and on Gloo."""
    operations = torch.ops._c10d_functional
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = [fresh(seed + peer, 3, 5) for peer in range(size)]
    gloo = dist.new_group(backend="gloo")
    for group in (dist.group.WORLD, gloo):
        for given in (group, group.group_name):
            out = torch.full((3 * size, 5), float("nan"), dtype=torch.float64)
            returned = operations.all_gather_into_tensor_out(everyone[rank], size, given, out=out)
            assert returned is out
            assert torch.equal(operations.wait_tensor(out), torch.cat(everyone))
    with pytest.raises(ValueError, match=r"all_gather_single.*has 2 elements, expected 30"):
        operations.all_gather_into_tensor_out(
            everyone[rank], size, dist.group.WORLD.group_name, out=torch.empty(2).double()
        )
    dist.destroy_process_group(gloo)


Math = Callable[[list[Tensor]], list[Tensor]]
Ours = Callable[[Tensor, int, int], Tensor]


def operations_with_gradients() -> dict[str, tuple[Math, Ours]]:
    """Return pairs of the expected result of each rank, as arithmetic, and the operation."""
    from torch.distributed.nn import functional

    def at_root(results: list[Tensor], root: int) -> list[Tensor]:
        return [result if rank == root else result * 0 for rank, result in enumerate(results)]

    return {
        "all_reduce": (
            lambda xs: [sum(xs)] * len(xs),
            lambda x, rank, size: functional.all_reduce(x),
        ),
        "reduce": (
            lambda xs: at_root([sum(xs)] * len(xs), 1),
            lambda x, rank, size: functional.reduce(x, 1) * (rank == 1),
        ),
        "broadcast": (
            lambda xs: [xs[1]] * len(xs),
            lambda x, rank, size: functional.broadcast(x, 1),
        ),
        "gather": (
            lambda xs: at_root([torch.cat(xs)] * len(xs), 0),
            lambda x, rank, size: torch.cat(functional.gather(x, 0)) * (rank == 0),
        ),
        "scatter": (
            lambda xs: [xs[0][4 * r : 4 * r + 4] for r in range(len(xs))],
            lambda x, rank, size: functional.scatter(list(x.split(4)), 0),
        ),
        "all_gather": (
            lambda xs: [torch.cat(xs)] * len(xs),
            lambda x, rank, size: torch.cat(functional.all_gather(x)),
        ),
        "reduce_scatter": (
            lambda xs: [sum(xs)[4 * r : 4 * r + 4] for r in range(len(xs))],
            lambda x, rank, size: functional.reduce_scatter(torch.zeros_like(x[:4]), [*x.split(4)]),
        ),
        "all_to_all": (
            lambda xs: [torch.cat([x[4 * r : 4 * r + 4] for x in xs]) for r in range(len(xs))],
            lambda x, rank, size: torch.cat(
                functional.all_to_all([torch.zeros_like(p) for p in x.split(4)], [*x.split(4)])
            ),
        ),
        "all_to_all_single": (
            lambda xs: [torch.cat([x[4 * r : 4 * r + 4] for x in xs]) for r in range(len(xs))],
            lambda x, rank, size: functional.all_to_all_single(torch.zeros_like(x), x),
        ),
    }


def collectives_with_gradients(seed: int) -> None:
    """Compare the gradient of a sum over ranks with autograd of the same arithmetic."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, (math, operation) in operations_with_gradients().items():
        xs = [fresh(seed + peer, 4 * size, 3).requires_grad_() for peer in range(size)]
        expected = math(xs)
        weights = [fresh(seed + 50 + peer, *y.shape) for peer, y in enumerate(expected)]
        total = sum((w * y).sum() for w, y in zip(weights, expected, strict=True))
        assert isinstance(total, Tensor)
        gradients = torch.autograd.grad(total, xs, allow_unused=True)
        mine = xs[rank].detach().clone().requires_grad_()
        result = operation(mine, rank, size)
        torch.testing.assert_close(result, expected[rank], msg=lambda text, n=name: f"{n}: {text}")
        (weights[rank] * result).sum().backward()
        wanted = gradients[rank] if gradients[rank] is not None else torch.zeros_like(mine)
        torch.testing.assert_close(mine.grad, wanted, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    ("check", "world_size"),
    [
        (functional_collectives, 3),
        (gather_of_the_compiler, 2),
        (collectives_with_gradients, 2),
        (collectives_with_gradients, 3),
    ],
)
def test_functional(
    ranks: RankServer, seed: int, check: Callable[[int], None], world_size: int
) -> None:
    ranks.run(world_size, check, seed)
