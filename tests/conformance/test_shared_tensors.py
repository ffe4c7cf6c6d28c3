"""Tensors of `phalanx.empty_shared`: results are unchanged, and memory is freed."""

from __future__ import annotations

import gc
import os
import random
import re
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx import _native
from phalanx.errors import PhalanxError, UsageError
from tests.ranks import RankServer
from tests.seeds import fresh_seed

# Below and above the limit of inline payloads, and sizes that no slice divides.
COUNTS = (1, 5_000, 100_003, 700_001)


def shared(*size: int) -> torch.Tensor:
    return phalanx.empty_shared(*size, dtype=torch.int64)


def ordinary(*size: int) -> torch.Tensor:
    return torch.empty(*size, dtype=torch.int64)


def value(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count) * (rank + 1) + rank


def filled(make: Callable[..., torch.Tensor], rank: int, count: int) -> torch.Tensor:
    tensor = make(count)
    tensor.copy_(value(rank, count))
    return tensor


def whole(make: Callable[..., torch.Tensor], rank: int, size: int, count: int) -> torch.Tensor:
    """Return a tensor with one part per rank, distinguished by a factor."""
    tensor = make(size * count)
    for to, part in enumerate(tensor.view(size, count)):
        part.copy_(value(rank, count) + 7 * to)
    return tensor


def every_collective(seed: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    script, mine = random.Random(seed), random.Random(seed + rank + 1)
    for count in COUNTS:
        for kind in ("shared", "ordinary", "mixed"):
            makes = {"shared": [shared], "ordinary": [ordinary], "mixed": [shared, ordinary]}[kind]
            root = script.randrange(size)
            check_one(rank, size, count, root, lambda *s: mine.choice(makes)(*s))  # noqa: B023


def check_one(
    rank: int, size: int, count: int, root: int, make: Callable[..., torch.Tensor]
) -> None:
    values = [value(r, count) for r in range(size)]
    total = torch.stack(values).sum(0)

    tensor = filled(make, rank, count)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, total)

    tensor = filled(make, rank, count)
    dist.reduce(tensor, root)
    assert torch.equal(tensor, total if rank == root else values[rank])

    tensor = filled(make, rank, count)
    dist.broadcast(tensor, root)
    assert torch.equal(tensor, values[root])

    output = make(size * count).fill_(-1)
    dist.all_gather_single(output, filled(make, rank, count))
    assert torch.equal(output, torch.cat(values))

    outputs = [make(count).fill_(-1) for _ in range(size)] if rank == root else None
    dist.gather(filled(make, rank, count), outputs, root)
    assert outputs is None or torch.equal(torch.cat(outputs), torch.cat(values))

    parts = list(whole(make, rank, size, count).view(size, count)) if rank == root else None
    output = make(count).fill_(-1)
    dist.scatter(output, parts, root)
    assert torch.equal(output, values[root] + 7 * rank)

    output = make(count).fill_(-1)
    dist.reduce_scatter_single(output, whole(make, rank, size, count))
    assert torch.equal(output, total + size * 7 * rank)

    output = make(size * count).fill_(-1)
    source = whole(make, rank, size, count)
    dist.all_to_all_single(output, source)
    assert torch.equal(output, torch.cat([values[r] + 7 * rank for r in range(size)]))
    assert torch.equal(source, whole(ordinary, rank, size, count))

    dist.all_to_all_single(source, source)
    assert torch.equal(source, output)
    source = whole(make, rank, size, count)
    parts = list(source.view(size, count))
    dist.all_to_all(parts, parts)
    assert torch.equal(source, output)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_collective(ranks: RankServer, size: int) -> None:
    ranks.run(size, every_collective, fresh_seed())


def views_and_groups() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    others = dist.new_group(list(range(size)))
    memory = phalanx.empty_shared(3, 100_000)
    memory.zero_()
    dist.all_reduce(memory[1].fill_(rank), group=others)
    assert (memory[1] == sum(range(size))).all()
    assert (memory[0] == 0).all()
    assert (memory[2] == 0).all()
    columns = memory.t()[:, 0:1]
    columns.fill_(rank + 1.0)
    work = dist.all_reduce(columns, op=dist.ReduceOp.PRODUCT, async_op=True)
    work.wait()
    assert (columns == torch.arange(1, size + 1).prod()).all()
    memory.requires_grad_()
    memory.sum().backward()
    dist.all_reduce(memory.grad)


def test_views_and_other_groups(ranks: RankServer) -> None:
    ranks.run(3, views_and_groups)


def bitwise_like_staged() -> None:
    torch.manual_seed(dist.get_rank())
    for dtype in (torch.float32, torch.bfloat16):
        staged = torch.randn(300_000).to(dtype)
        direct = phalanx.empty_shared(300_000, dtype=dtype)
        direct.copy_(staged)
        dist.all_reduce(staged)
        dist.all_reduce(direct)
        assert torch.equal(staged, direct)


def test_results_are_bitwise_equal_on_both_paths(ranks: RankServer) -> None:
    ranks.run(3, bitwise_like_staged)


def outlive_the_group() -> None:
    tensor = phalanx.empty_shared(200_000).fill_(1.0)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    assert (tensor == 2).all()
    assert _native.shared_bytes_in_use() >= 800_000
    part = tensor[10:20]
    del tensor
    gc.collect()
    assert _native.shared_bytes_in_use() >= 800_000
    del part
    gc.collect()
    assert _native.shared_bytes_in_use() == 0


def test_memory_is_freed_with_the_last_view(ranks: RankServer) -> None:
    ranks.run(2, outlive_the_group)


def a_child_writes() -> None:
    tensor, own = shared(5_000).fill_(1), [shared(2_000).fill_(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork, Python 3.12
        child = os.fork()
    if child == 0:
        was_inherited = bool((tensor == 1).all() and (own[0] == 2).all())
        tensor.fill_(9)
        own.clear()  # frees nothing of the parent's
        os._exit(0 if was_inherited and (tensor == 9).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (tensor == 1).all()
    assert (own[0] == 2).all()
    dist.all_reduce(tensor)
    assert (tensor == dist.get_world_size()).all()


def test_what_a_forked_child_writes_is_its_own(ranks: RankServer) -> None:
    ranks.run(2, a_child_writes)


def test_shapes() -> None:
    assert phalanx.empty_shared(2, 3).shape == (2, 3)
    assert phalanx.empty_shared((2, 3)).shape == (2, 3)
    assert phalanx.empty_shared(torch.Size([4])).shape == (4,)
    assert phalanx.empty_shared().shape == ()
    assert phalanx.empty_shared(0, 5).shape == (0, 5)
    assert phalanx.empty_shared(2).dtype == torch.get_default_dtype()
    for dtype in (torch.bool, torch.bfloat16, torch.complex128):
        tensor = phalanx.empty_shared(3, dtype=dtype)
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 4096 == 0


def test_wrong_sizes() -> None:
    with pytest.raises(UsageError, match=re.escape("got the shape [2, -1]")):
        phalanx.empty_shared(2, -1)
    with pytest.raises(
        PhalanxError, match=r"no shared memory for torch.float32\[.*Cannot allocate"
    ):
        phalanx.empty_shared(2**50)
