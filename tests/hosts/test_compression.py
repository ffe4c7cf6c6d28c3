"""Reductions that cross between hosts in fewer bits, against float64 and each other."""

from __future__ import annotations

import gc
import math
import os
import signal
import weakref
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import phalanx
from phalanx.errors import PhalanxError, UsageError
from phalanx.hierarchical import bandwidth
from phalanx.hierarchical import encoding as encodings
from phalanx.parallel import average_gradients
from tests.conformance import cases
from tests.ranks import RankServer, connect_ranks
from tests.seeds import fresh_seed

ENCODINGS = ("bfloat16", "int8", "int4")
LEVELS = {"bfloat16": 256, "int8": 127, "int4": 7}
LAYOUTS = ("ab", "aabb", "aab", "abcb", "abc")
COUNTS = (16_384, 50_021, 1_300_007)


def make_group(compress: str) -> Any:
    options = phalanx.Options(compress=compress)
    return dist.new_group(backend="phalanx", pg_options=options)


def draw(seed: int, rank: int, count: int) -> torch.Tensor:
    generator = np.random.default_rng((seed, rank, count))
    return torch.from_numpy(generator.standard_normal(count, np.float32))


def most_error(encoding: str, inputs: list[torch.Tensor]) -> float:
    """The error of one encoding of each partial result, and of the sum: half a level, or one."""
    largest = sum(float(each.abs().max()) for each in inputs)
    return 2 * largest / LEVELS[encoding]


def reduces(seed: int, encoding: str) -> list[str]:
    """Return a digest of the result of each all-reduce."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group, digests = make_group(encoding), []
    for count in COUNTS:
        inputs = [draw(seed, each, count) for each in range(size)]
        exact = torch.stack([each.double() for each in inputs]).sum(0)
        for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, size)):
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, op, group=group)
            limit = most_error(encoding, inputs) / divisor
            assert (tensor.double() - exact / divisor).abs().max() <= limit
            digests.append(cases.digest([tensor]))
        whole = torch.cat([each + rank for each in inputs])
        part = torch.full((count,), float("nan"))
        dist.reduce_scatter_tensor(part, whole, group=group)
        expected = size * inputs[rank].double() + sum(range(size))
        bound = most_error(encoding, [inputs[rank] + each for each in range(size)])
        assert (part.double() - expected).abs().max() <= bound
        part.fill_(float("nan"))
        dist.reduce_scatter(part, [each + rank for each in inputs], group=group)
        assert (part.double() - expected).abs().max() <= bound
    return digests


@pytest.mark.parametrize("hosts", LAYOUTS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_results(ranks: RankServer, encoding: str, hosts: str) -> None:
    """They are close to the exact ones, and the same on all ranks, bit for bit."""
    seed = fresh_seed()
    digests = ranks.run(len(hosts), reduces, seed, encoding, timeout=60, hosts=hosts)
    assert len({tuple(each) for each in digests}) == 1


def is_exact(seed: int) -> None:
    """Small tensors, other dtypes and other operators are not compressed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = make_group("int4")
    for dtype, count, op in (
        (torch.float32, 16_383, dist.ReduceOp.SUM),
        (torch.float64, 20_000, dist.ReduceOp.SUM),
        (torch.int32, 20_000, dist.ReduceOp.SUM),
        (torch.float32, 20_000, dist.ReduceOp.MAX),
    ):
        inputs = [(100 * draw(seed, each, count)).to(dtype) for each in range(size)]
        tensor, plain = inputs[rank].clone(), inputs[rank].clone()
        dist.all_reduce(tensor, op, group=group)
        dist.all_reduce(plain, op)
        assert torch.equal(tensor, plain), (dtype, count, op)
    tensor = draw(seed, 0, 50_000)
    expected = tensor.clone()
    dist.broadcast(tensor, 0, group=group)
    assert torch.equal(tensor, expected)


@pytest.mark.parametrize("hosts", ("aabb", "aab"))
def test_what_is_not_compressed(ranks: RankServer, hosts: str) -> None:
    ranks.run(len(hosts), is_exact, fresh_seed(), hosts=hosts)


def is_exact_on_one_host(seed: int) -> None:
    tensor, plain = draw(seed, dist.get_rank(), 50_000), draw(seed, dist.get_rank(), 50_000)
    dist.all_reduce(tensor, group=make_group("int4"))
    dist.all_reduce(plain)
    assert torch.equal(tensor, plain)


def test_one_host(ranks: RankServer) -> None:
    ranks.run(3, is_exact_on_one_host, fresh_seed(), hosts="aaa")


def feeds_errors_back(seed: int, encoding: str) -> None:
    """The sum over rounds stays within a few errors of one round, however many there are."""
    rank, size, count, rounds = dist.get_rank(), dist.get_world_size(), 40_003, 40
    group = make_group(encoding)
    kept, exact, done = torch.empty(count), torch.zeros(count), torch.zeros(count)
    forgotten = torch.zeros(count)
    for number in range(rounds):
        inputs = [draw(seed + number, each, count) + 0.3 for each in range(size)]
        exact += torch.stack(inputs).sum(0)
        kept.copy_(inputs[rank])
        dist.all_reduce(kept, group=group)
        done += kept
        fresh = inputs[rank].clone()
        dist.all_reduce(fresh, group=group)
        forgotten += fresh
        del fresh
        gc.collect()
    one_round = most_error(encoding, inputs)
    assert (done - exact).abs().max() <= 1.5 * one_round + 1e-2
    if encoding == "int4":
        assert (forgotten - exact).abs().mean() > 2 * (done - exact).abs().mean()
    compression = group._membership.native.compression
    assert compression.residual(0, 1) == (0, None)  # what belongs to freed memory is dropped
    assert len(compression._residuals) == 1, "a tensor that is gone has a residual"


@pytest.mark.parametrize("hosts", ("ab", "aabb", "aab"))
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_errors_are_fed_back(ranks: RankServer, encoding: str, hosts: str) -> None:
    seed = fresh_seed()
    ranks.run(len(hosts), feeds_errors_back, seed, encoding, timeout=60, hosts=hosts)


def keeps_blocks_apart(seed: int, encoding: str) -> None:
    """Values that fill blocks of 256 elements do not affect the others, wherever they are."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), make_group(encoding)
    for count in (50_003, 1_300_007):
        large = torch.zeros(count, dtype=torch.bool)
        for begin in (0, 256 * 100, count // 256 * 256):
            large[begin : begin + 256] = True
        inputs = [torch.where(large, 1e4, draw(seed, each, count)) for each in range(size)]
        dist.all_reduce(tensor := inputs[rank].clone(), group=group)
        expected = torch.stack(inputs).sum(0)
        small = [each[~large] for each in inputs]
        error = float((tensor - expected)[~large].abs().max())
        assert error <= most_error(encoding, small), (count, error)


@pytest.mark.parametrize("encoding", ("int8", "int4"))
@pytest.mark.parametrize("hosts", LAYOUTS)
def test_blocks_of_large_values(ranks: RankServer, hosts: str, encoding: str) -> None:
    ranks.run(len(hosts), keeps_blocks_apart, fresh_seed(), encoding, hosts=hosts)


def averages_gradients(encoding: str) -> None:
    """It is known exactly which parameters have gradients, and small gradients are not lost."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), make_group(encoding)
    parameters = [torch.nn.Parameter(torch.zeros(1_000)) for _ in range(30)]
    for number, parameter in enumerate(parameters):
        if number % size == rank or number < 20:
            parameter.grad = torch.full((1_000,), 1e-4)
    parameters[7].grad.fill_(1e4)  # type: ignore[union-attr]
    average_gradients(parameters, group=group)
    for number, parameter in enumerate(parameters):
        value = 1e4 if number == 7 else 1e-4 if number < 20 else 1e-4 / size
        assert parameter.grad is not None, number
        if number != 7:  # two blocks contain large values, too
            assert float(parameter.grad[300:700].mean()) == pytest.approx(value, rel=0.02)
    assert float(parameters[7].grad[300:700].mean()) == pytest.approx(1e4, rel=0.02)  # type: ignore[index]


@pytest.mark.parametrize("hosts", ("ab", "aabb"))
@pytest.mark.parametrize("encoding", ("int8", "int4"))
def test_average_gradients(ranks: RankServer, encoding: str, hosts: str) -> None:
    ranks.run(len(hosts), averages_gradients, encoding, hosts=hosts)


def reduces_with_another_default(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    rank, size, group = dist.get_rank(), dist.get_world_size(), make_group("int8")
    inputs = [draw(5, each, 50_021) for each in range(size)]
    for _ in range(3):
        dist.all_reduce(tensor := inputs[rank].clone(), group=group)
        error = float((tensor - torch.stack(inputs).sum(0)).abs().max())
        assert error <= 2 * most_error("int8", inputs)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64))
def test_default_dtype(ranks: RankServer, dtype: torch.dtype) -> None:
    ranks.run(2, reduces_with_another_default, dtype, hosts="ab")


def test_what_is_lost_is_kept_while_the_tensor_exists() -> None:
    compression = encodings.Compression("int8")
    tensor = torch.zeros(20_000)
    address = tensor.data_ptr()
    compression.keep_residual(tensor)
    assert compression.residual(address + 400, 19_900)[0]
    assert not compression.residual(address - 400, 100)[0]
    del tensor
    assert not compression.residual(address + 400, 19_900)[0]
    other = torch.zeros(20_000)
    compression.keep_residual(other)
    alive = weakref.ref(compression)
    del compression
    assert alive() is None


def keeps_nan(encoding: str) -> None:
    group = make_group(encoding)
    tensor = torch.ones(20_000)
    if dist.get_rank() == 1:
        tensor[17_000] = float("nan")
    dist.all_reduce(tensor, group=group)
    assert tensor[17_000].isnan()
    assert tensor.isfinite().sum() >= 20_000 - 256
    tensor.fill_(1.0)  # the residual is finite
    dist.all_reduce(tensor, group=group)
    assert torch.allclose(tensor, torch.tensor(float(dist.get_world_size())), atol=1.0)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_values_that_are_not_finite(ranks: RankServer, encoding: str) -> None:
    ranks.run(3, keeps_nan, encoding, hosts="aab")


def chooses(slow: float) -> None:
    encodings.SLOW = slow
    group, count = make_group("auto"), 50_000
    tensor = draw(3, dist.get_rank(), count)
    exact = torch.stack([draw(3, each, count) for each in range(dist.get_world_size())]).sum(0)
    dist.all_reduce(tensor, group=group)
    is_exact = bool(torch.allclose(tensor, exact, rtol=0, atol=1e-5))
    assert is_exact == (slow == 0)
    assert (group._membership.native.compression is None) == (slow == 0)


@pytest.mark.parametrize("hosts", ("ab", "aabb", "abca"))
@pytest.mark.parametrize("slow", (0.0, math.inf))
def test_the_encoding_is_chosen_by_the_links(ranks: RankServer, slow: float, hosts: str) -> None:
    """The limit is set so that all links are slower, or none."""
    ranks.run(len(hosts), chooses, slow, hosts=hosts)


def trains_with_power_sgd() -> None:
    """PyTorch's hook for DDP gives the same on a group of Phalanx as on Gloo."""
    gloo = dist.new_group(backend="gloo")
    results = []
    for group in (dist.group.WORLD, gloo):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
        wrapped = DistributedDataParallel(model, process_group=group)
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, random_seed=5)
        state.start_powerSGD_iter = 2
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(6):
            optimizer.zero_grad()
            inputs = torch.randn(8, 64, generator=generator)
            (wrapped(inputs) - inputs.sin()).square().mean().backward()
            optimizer.step()
        results.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hosts", ("ab", "aab"))
def test_power_sgd(ranks: RankServer, hosts: str) -> None:
    ranks.run(len(hosts), trains_with_power_sgd, hosts=hosts)


def loses_a_rank_while_it_measures() -> None:
    connect_ranks()
    if dist.get_rank() == 1:
        bandwidth._measure = lambda *_arguments: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, return-value]
    with pytest.raises(PhalanxError, match="compress='auto' cannot measure the links"):
        dist.new_group(
            backend="phalanx",
            pg_options=phalanx.Options(compress="auto"),
            timeout=timedelta(seconds=5),
        )


def test_a_rank_is_lost_during_the_measurement(ranks: RankServer) -> None:
    ended = ranks.start(3, loses_a_rank_while_it_measures, hosts="abc").join()
    assert [each.code for each in ended] == [0, -signal.SIGKILL, 0], ended[0].report()


def disagrees() -> None:
    words = "compress='int7': expected one of bfloat16, int8, int4, auto"
    with pytest.raises(UsageError, match=words):
        make_group("int7")
    with pytest.raises(PhalanxError, match="compress='int8'"):
        make_group("int8" if dist.get_rank() else "")


def test_bad_options(ranks: RankServer) -> None:
    ranks.run(2, disagrees, hosts="ab")
