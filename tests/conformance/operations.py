"""Operations on random data by a group of Phalanx and, in the same processes, by another one.

Integers and moved data must agree to the bit; reduced floats as closely as their dtype allows,
since Gloo adds in another order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tests.conformance import cases

# Gloo has no uint16, int16, uint32 and uint64.
GLOO_DTYPES = [name for name in cases.DTYPES if name not in ("uint16", "int16", "uint32", "uint64")]
SIZES = (1, 3, 1000, 4097, 70_000)


def all_reduce(own: Tensor, root: int, group: dist.ProcessGroup, op: str) -> list[Tensor]:
    dist.all_reduce(own, cases.reduce_op(op), group)
    return [own]


def reduce(own: Tensor, root: int, group: dist.ProcessGroup, op: str) -> list[Tensor]:
    dist.reduce(own, root, cases.reduce_op(op), group)
    # On the other ranks, Gloo leaves arbitrary values.
    return [own] if dist.get_rank() == root else []


def broadcast(own: Tensor, root: int, group: dist.ProcessGroup, op: str) -> list[Tensor]:
    dist.broadcast(own, root, group)
    return [own]


def all_gather(own: Tensor, root: int, group: dist.ProcessGroup, op: str) -> list[Tensor]:
    outputs = [cases.poisoned(own) for _ in range(dist.get_world_size())]
    dist.all_gather(outputs, own, group)
    return outputs


def gather(own: Tensor, root: int, group: dist.ProcessGroup, op: str) -> list[Tensor]:
    outputs = [cases.poisoned(own) for _ in range(dist.get_world_size())]
    dist.gather(own, outputs if dist.get_rank() == root else None, root, group)
    return [own, *outputs]


def scatter(own: Tensor, root: int, group: dist.ProcessGroup, op: str) -> list[Tensor]:
    output = cases.poisoned(own)
    inputs = rolled(own)
    dist.scatter(output, inputs if dist.get_rank() == root else None, root, group)
    return [own, output]


def all_gather_single(own: Tensor, root: int, group: dist.ProcessGroup, op: str) -> list[Tensor]:
    output = cases.poisoned(own, len(own) * dist.get_world_size())
    dist.all_gather_into_tensor(output, own, group)
    return [own, output]


def all_to_all_single(own: Tensor, root: int, group: dist.ProcessGroup, op: str) -> list[Tensor]:
    """Send everything to the root, except for one element that each rank keeps."""
    rank, size = dist.get_rank(), dist.get_world_size()
    given, taken = [0] * size, [0] * size
    given[root] += len(own) - 1
    given[rank] += 1
    taken[rank] += 1
    if rank == root:
        taken = [count + len(own) - 1 for count in taken]
    output = cases.poisoned(own, sum(taken))
    dist.all_to_all_single(output, own, taken, given, group)
    return [own, output]


def exchange(own: Tensor, root: int, group: dist.ProcessGroup, op: str) -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    received = cases.poisoned(own)
    works = [dist.isend(own, (rank + 1) % size, group, tag=3)]
    works.append(dist.irecv(received, (rank - 1) % size, group, tag=3))
    for work in works:
        work.wait()
    return [own, received]


def reduce_scatter(own: Tensor, root: int, group: dist.ProcessGroup, op: str) -> list[Tensor]:
    inputs = rolled(own)
    output = cases.poisoned(own)
    dist.reduce_scatter(output, inputs, cases.reduce_op(op), group)
    return [output]


def reduce_scatter_single(
    own: Tensor, root: int, group: dist.ProcessGroup, op: str
) -> list[Tensor]:
    whole = torch.cat(rolled(own.cpu())).to(own.device)
    output = cases.poisoned(own)
    dist.reduce_scatter_tensor(output, whole, cases.reduce_op(op), group)
    return [output]


def rolled(own: Tensor) -> list[Tensor]:
    """Return different data for each rank. The CPU makes them: CUDA cannot roll every dtype."""
    count = dist.get_world_size()
    return [own.cpu().roll(part).to(own.device) for part in range(count)]


Operation = Callable[[Tensor, int, dist.ProcessGroup, str], list[Tensor]]
MOVES: list[Operation] = [
    broadcast,
    all_gather,
    gather,
    scatter,
    all_gather_single,
    all_to_all_single,
]
REDUCTIONS: list[Operation] = [all_reduce, reduce, reduce_scatter, reduce_scatter_single]


def compare(dtype: str, seed: int, device: str = "cpu") -> tuple[int, list[str]]:
    """Compare every operation on tensors of a device with Gloo, or ours, on the CPU.

    Returns:
        How many were compared, and the names of those that NCCL lacks.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    in_gloo = dtype in GLOO_DTYPES
    other_group = dist.new_group(backend="gloo" if in_gloo else "phalanx")
    operations = [(move, "") for move in MOVES]
    if world_size > 1:
        operations.append((exchange, ""))
    operations += [(name, op) for name in REDUCTIONS for op in cases.operators(dtype)]
    if dtype in cases.COMPLEX:
        operations.remove((gather, ""))  # not in Gloo
    rejected = []
    for number, size in enumerate(SIZES):
        root = number % world_size
        own = cases.data(dtype, size, seed, rank, size)
        # Each at every other size, since Gloo is slow.
        for operation, op in operations[number % 2 :: 2]:
            what = f"{operation.__name__} {op} of {dtype}[{size}], {world_size} ranks"
            try:
                ours = operation(own.clone().to(device), root, dist.group.WORLD, op)
            except (RuntimeError, ValueError) as error:
                if "NCCL" not in str(error):
                    raise
                rejected.append(what)
                continue
            theirs = operation(own.clone(), root, other_group, op)
            for result, other in zip(ours, theirs, strict=True):
                assert result.device.type == device, what
                one = result.cpu()
                if op and in_gloo and dtype == "bool":
                    # Gloo adds bytes, so its True may be 2.
                    other = other.view(torch.uint8) != 0  # noqa: PLW2901
                if op and (one.is_floating_point() or one.is_complex()):
                    check_near(one, other, world_size, what)
                else:
                    cases.check_bits(one, other, what)
    return len(operations), rejected


def check_near(ours: Tensor, theirs: Tensor, world_size: int, what: str) -> None:
    # Gloo rounds to the dtype after every step; sums of normal numbers stay below about 8.
    bound = 16 * world_size * torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound, msg=lambda m: f"{what}: {m}")
