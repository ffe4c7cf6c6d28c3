"""Embedding tables in one process, compared with PyTorch's modules and optimizers."""

from __future__ import annotations

import functools
import gc
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from phalanx.embedding import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingServer,
    EmbeddingTable,
    HashSharding,
    RangeSharding,
    ShardedEmbeddingBag,
)
from phalanx.embedding.optimizers import RowOptimizer
from phalanx.errors import CheckpointError, CollectiveTimeout, PeerLost, PhalanxError, UsageError

DTYPES = [torch.float32, torch.float64]
OPTIMIZERS = {
    "sgd": (SGD(0.3), torch.optim.SGD, {"lr": 0.3}),
    "adagrad": (
        Adagrad(0.2, lr_decay=0.1, initial_accumulator_value=0.5, eps=1e-3),
        torch.optim.Adagrad,
        {"lr": 0.2, "lr_decay": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-3},
    ),
    "adam": (
        Adam(0.1, betas=(0.8, 0.95), eps=1e-4),
        torch.optim.SparseAdam,
        {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-4},
    ),
}


def assert_close(a: Tensor, b: Tensor) -> None:
    tolerance = 1e-12 if a.dtype == torch.float64 else 2e-5
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def make_bags(rows: int, count: int) -> tuple[Tensor, Tensor]:
    """Return random bags, some of them empty, including the first and the last."""
    sizes = torch.randint(0, 6, (count,))
    sizes[0] = sizes[-1] = 0
    offsets = torch.cat([torch.zeros(1).long(), sizes.cumsum(0)])
    return torch.randint(0, rows, (int(offsets[-1]),)), offsets


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 64])
def test_gather(dtype: torch.dtype, width: int) -> None:
    weight = torch.randn(101, width, dtype=dtype)
    table = EmbeddingTable(101, width, Adam(), dtype=dtype, weight=weight)
    for shape in [(0,), (1,), (33,), (5, 3), (1000,)]:
        indices = torch.randint(0, 101, shape)
        out = torch.full((*shape, width), -7, dtype=dtype)
        assert torch.equal(table.gather(indices, out=out), weight[indices])
        assert torch.equal(table.gather(indices.int()), weight[indices])
    strided = torch.randint(0, 101, (40,))[::3]
    assert torch.equal(table.gather(strided), weight[strided])
    assert torch.equal(table.view(), weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_pool_matches_embedding_bag(dtype: torch.dtype, mode: str) -> None:
    weight = torch.randn(50, 13, dtype=dtype)
    table = EmbeddingTable(50, 13, dtype=dtype, weight=weight)
    indices, ends = make_bags(50, 40)
    expected = functional.embedding_bag(indices, weight, ends[:-1], mode=mode)
    assert_close(table.pool(indices, ends[:-1], mode=mode), expected)
    assert_close(table.pool(indices, ends, mode=mode, include_last_offset=True), expected)
    matrix = torch.randint(0, 50, (9, 4))
    assert_close(table.pool(matrix, mode=mode), functional.embedding_bag(matrix, weight, mode=mode))
    if mode == "sum":
        factors = torch.randn(len(indices), dtype=dtype)
        pooled = table.pool(indices, ends[:-1], mode=mode, per_sample_weights=factors)
        assert_close(
            pooled,
            functional.embedding_bag(
                indices, weight, ends[:-1], mode=mode, per_sample_weights=factors
            ),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_update_matches_torch_optimizers(name: str, dtype: torch.dtype) -> None:
    optimizer_config, optimizer_class, options = OPTIMIZERS[name]
    weight = torch.randn(40, 9, dtype=dtype)
    table = EmbeddingTable(40, 9, optimizer_config, dtype=dtype, weight=weight)
    oracle = nn.Parameter(weight.clone())
    optimizer = optimizer_class([oracle], **options)
    for count in [1, 7, 60, 0, 25]:
        indices = torch.randint(0, 40, (count,))  # with duplicates
        gradients = torch.randn(count, 9, dtype=dtype)
        oracle.grad = torch.sparse_coo_tensor(indices[None], gradients, (40, 9))
        optimizer.step()
        table.update(indices, gradients)
        assert_close(table.view(), oracle.detach())
    for part, key in enumerate(optimizer_config.state_names, 1):
        assert_close(table.view(part), optimizer.state[oracle][key])
    assert table.step == 5


def test_load_state_dict_resumes_training() -> None:
    gradients = torch.randn(6, 4)
    indices = torch.randint(0, 30, (6,))
    first, second = EmbeddingTable(30, 4, Adam()), EmbeddingTable(30, 4, Adam())
    first.update(indices, gradients)
    second.load_state_dict(first.state_dict())
    for table in (first, second):
        table.update(indices, gradients)
    for part in range(3):
        assert torch.equal(first.view(part), second.view(part))
    with pytest.raises(UsageError, match=r"a state of .* given, expected .*exp_avg"):
        second.load_state_dict(EmbeddingTable(30, 4).state_dict())
    with pytest.raises(UsageError, match=r"\(29, 4\)"):
        second.load_state_dict(EmbeddingTable(29, 4, Adam()).state_dict())
    assert torch.equal(first.view(), second.view())


def test_out_of_range_index_names_table_index_and_limit() -> None:
    table = EmbeddingTable(10, 2, name="clicks")
    before = table.view().clone()
    server = EmbeddingServer(table)
    bag = ShardedEmbeddingBag(10, 2, [server])
    gradients, offsets = torch.ones(3, 2), torch.tensor([0])
    calls: list[Callable[[Tensor], object]] = [
        table.gather,
        lambda indices: table.pool(indices, offsets),
        lambda indices: table.update(indices, gradients),
        lambda indices: server.update(indices, gradients),
        lambda indices: bag(indices, offsets),
        bag.prefetch,
    ]
    for invalid in (-1, 10, 2**40):
        message = rf"'clicks': index {invalid} is out of range, expected 0 to 9"
        for call in calls:
            with pytest.raises(UsageError, match=message):
                call(torch.tensor([3, invalid, 4]))
    assert torch.equal(table.view(), before)
    assert table.step == 0


def test_invalid_arguments_are_rejected() -> None:
    table = EmbeddingTable(10, 2, name="clicks")
    indices = torch.arange(4)
    bag = ShardedEmbeddingBag(10, 2, [EmbeddingServer(table)])
    summing = ShardedEmbeddingBag(10, 2, [EmbeddingServer(table)], mode="sum")
    for offsets in ([1, 2], [0, 3, 2], [0, 5], [-1, 2], [0, -1], [5, 5], [3]):
        with pytest.raises(UsageError, match="'clicks': offset"):
            table.pool(indices, torch.tensor(offsets))
        with pytest.raises(UsageError, match="'clicks': offset"):
            bag(indices, torch.tensor(offsets))
    for call, message in (
        (lambda: table.gather(indices.float()), "torch.float32 on cpu given"),
        (lambda: table.gather(indices, out=torch.empty(3, 2)), r"out of \(3, 2\)"),
        (lambda: table.gather(indices.to("meta")), "torch.int64 on meta"),
        (lambda: table.gather(indices.to_sparse()), "sparse_coo"),
        (lambda: table.gather(indices, out=torch.empty(4, 2, device="meta")), "on meta"),
        (lambda: table.gather(indices, out=torch.empty(2, 4).t()), "contiguous"),
        (lambda: table.pool(indices, torch.zeros(1)), "offsets of torch.float32"),
        (lambda: table.pool(indices, indices[None]), "with offsets of 2 given"),
        (lambda: table.pool(indices[0], indices), "indices of 0 dimensions"),
        (lambda: table.update(indices, torch.ones(4, 2, device="meta")), "on meta"),
        (lambda: table.update(indices, torch.ones(4, 2).to_sparse()), "sparse_coo"),
        (lambda: bag(indices), "without offsets"),
        (lambda: bag(indices.float(), indices), "indices of torch.float32"),
        (lambda: bag(indices[None], indices), "with offsets"),
        (lambda: bag(indices[None], None, torch.ones(1, 4)), "per_sample_weights .* 'mean'"),
        (lambda: summing(indices[None], None, torch.ones(4)), r"of \(4,\) .* expected \(1, 4\)"),
        (lambda: summing(indices[None], None, torch.ones(1, 4).double()), "float64"),
        (lambda: table.pool(indices), "without offsets"),
        (lambda: table.pool(indices[None], torch.zeros(1).long()), "with offsets"),
        (lambda: table.pool(indices, indices, mode="min"), "mode='min'"),
        (lambda: table.pool(indices, indices, include_last_offset=True), "must be 4"),
        (lambda: table.pool(indices, indices, per_sample_weights=torch.ones(4)), "'mean'"),
        (lambda: table.update(indices, torch.ones(4, 3)), r"\(4, 3\)"),
        (lambda: table.update(indices, torch.ones(4, 2).double()), "float64"),
        (
            lambda: EmbeddingTable.open(replace(table.handle, optimizer=Adam())),
            "has 0 state tensors",
        ),
        (lambda: EmbeddingTable(0, 2), "0 rows"),
        (lambda: EmbeddingTable(2, 2, dtype=torch.int32), "int32"),
        (lambda: EmbeddingTable(2, 2, weight=torch.ones(2, 3)), r"\(2, 3\)"),
        (lambda: SGD(-1.0), "lr=-1"),
        (lambda: Adam(betas=(0.9, 1.0)), "betas"),
        (lambda: Adagrad(eps=float("nan")), "eps=nan"),
        (lambda: RangeSharding(3, 4), "3 rows over 4"),
        (lambda: EmbeddingServer(table, 0), "trainers=0"),
        (lambda: EmbeddingServer(table).update(indices, torch.ones(4, 2), 1), "trainer=1"),
        (lambda: EmbeddingServer(table).update(indices, torch.ones(3, 2)), r"\(3, 2\)"),
        (lambda: ShardedEmbeddingBag(10, 3, [EmbeddingServer(table)]), "embedding_dim=3"),
        (lambda: ShardedEmbeddingBag(11, 2, [EmbeddingServer(table)]), "10 rows of 2"),
        (lambda: ShardedEmbeddingBag(10, 2, [EmbeddingServer(table)], mode="min"), "mode='min'"),
    ):
        with pytest.raises(UsageError, match=message):
            call()


def test_insufficient_memory_is_an_error() -> None:
    with pytest.raises(PhalanxError, match="no shared memory for table 'large'"):
        EmbeddingTable(1 << 36, 1 << 10, name="large")


@pytest.mark.parametrize("split", [RangeSharding, HashSharding])
@pytest.mark.parametrize("servers", [1, 3, 7])
def test_sharding_assigns_every_row_to_one_server(
    split: type[RangeSharding | HashSharding], servers: int
) -> None:
    sharding = split(23, servers)
    rows_by_server = [sharding.list_rows(server) for server in range(servers)]
    assert torch.cat(rows_by_server).sort().values.tolist() == list(range(23))
    for server, rows in enumerate(rows_by_server):
        assert len(rows) == sharding.count_rows(server)
        owners, local = sharding.locate(rows)
        assert set(owners.tolist()) == {server}
        assert local.tolist() == list(range(len(rows)))


def create_servers(
    weight: Tensor, split: str, count: int, optimizer_config: RowOptimizer, trainers: int = 1
) -> list[EmbeddingServer]:
    sharding = (RangeSharding if split == "range" else HashSharding)(len(weight), count)
    return [
        EmbeddingServer.create_shard(
            sharding,
            server,
            weight.shape[1],
            optimizer_config,
            trainers=trainers,
            timeout=20.0,
            dtype=weight.dtype,
            weight=lambda rows: weight[rows],
        )
        for server in range(count)
    ]


@pytest.mark.parametrize(
    ("name", "mode", "split", "count"),
    [
        ("sgd", "mean", "range", 1),
        ("adagrad", "max", "hash", 3),
        ("adam", "sum", "range", 3),
        ("adam", "mean", "hash", 2),
        ("adam", "max", "range", 2),
    ],
)
def test_sharded_bag_trains_like_embedding_bag(
    name: str, split: str, count: int, mode: str
) -> None:
    optimizer_config, optimizer_class, options = OPTIMIZERS[name]
    weight = torch.randn(31, 5, dtype=torch.float64)
    servers = create_servers(weight, split, count, optimizer_config)
    bag = ShardedEmbeddingBag(31, 5, servers, mode=mode, sharding=split)
    oracle = nn.Parameter(weight.clone())
    optimizer = optimizer_class([oracle], **options)
    target = torch.randn(12, 5, dtype=torch.float64)
    batches = [make_bags(31, 12) for _ in range(5)]
    batches[3] = torch.empty(0, dtype=torch.int64), torch.zeros(13, dtype=torch.int64)
    for number, (indices, ends) in enumerate(batches):
        weights = [None, None]
        if mode == "sum":
            factors = torch.randn(len(indices), dtype=torch.float64)
            weights = [factors.clone().requires_grad_(), factors.clone().requires_grad_()]
        out = bag(indices, ends[:-1], weights[0])
        if number % 2:  # alternately the next batch and another one
            next_batch = batches[(number + 1 + number // 3) % 5][0].clone()
            bag.prefetch(next_batch)
            next_batch.zero_()
        expected = functional.embedding_bag(
            indices, oracle, ends[:-1], mode=mode, per_sample_weights=weights[1]
        )
        assert_close(out, expected)
        for result in (out, expected):
            (result - target).square().mean().backward()
        if weights[0] is not None and len(indices):
            assert_close(weights[0].grad, weights[1].grad)
        assert oracle.grad is not None
        rows = indices.unique()  # including those whose gradient is zero
        oracle.grad = torch.sparse_coo_tensor(rows[None], oracle.grad[rows], (31, 5))
        optimizer.step()
        optimizer.zero_grad()
        bag.step()
        with torch.no_grad():
            all_rows = torch.arange(31)[:, None]
            assert_close(
                bag(all_rows, None, torch.ones(31, 1).double() if mode == "sum" else None), oracle
            )


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_empty_bags(mode: str) -> None:
    table = EmbeddingTable(6, 3)
    bag = ShardedEmbeddingBag(6, 3, [EmbeddingServer(table)], mode=mode)
    for lookup in (functools.partial(table.pool, mode=mode), bag.forward):
        for shape in [(0, 4), (2, 0), (0, 0)]:
            out = lookup(torch.empty(shape, dtype=torch.int32))
            assert out.shape == (shape[0], 3)
            assert not out.any()
        empty = torch.empty(0, dtype=torch.int64)
        assert lookup(empty, empty).shape == (0, 3)
        assert not lookup(empty, torch.zeros(3, dtype=torch.int32)).any()
    out = bag(torch.empty(2, 0).long())
    out.sum().backward()
    bag.step()
    assert table.step == 1


@pytest.mark.parametrize("count", [1, 3])
def test_step_sums_its_batches_and_ignores_others(count: int) -> None:
    weight = torch.randn(20, 3, dtype=torch.float64)
    servers = create_servers(weight, "hash", count, SGD(1.0))
    bag = ShardedEmbeddingBag(20, 3, servers, mode="sum", sharding="hash")
    first, second = torch.randint(0, 20, (4, 2)), torch.randint(0, 20, (4, 2))
    bag(first)  # without a backward pass
    bag(first).sum().backward()
    bag.zero_grad()
    buffer = torch.empty_like(first)
    for batch in (first, second):
        bag(buffer.copy_(batch)).sum().backward()  # the caller reuses its tensor
    buffer.zero_()
    bag.step()
    bag.step()  # without a batch
    expected = weight.clone()
    ones = torch.ones(16, 3, dtype=torch.float64)
    expected.index_add_(0, torch.cat([first, second]).view(-1), ones, alpha=-1)
    with torch.no_grad():
        assert_close(bag(torch.arange(20)[:, None]), expected)
    assert [server.table.step for server in servers] == [2] * count


def test_synchronous_trainers_match_a_single_trainer() -> None:
    weight = torch.randn(20, 3, dtype=torch.float64)
    optimizer_config = Adam(0.1)
    servers = create_servers(weight, "range", 2, optimizer_config, trainers=3)
    single = EmbeddingTable(20, 3, optimizer_config, dtype=torch.float64, weight=weight)
    batches = torch.randint(0, 20, (6, 3, 8, 2))
    failures: list[BaseException] = []

    def train(trainer: int) -> None:
        bag = ShardedEmbeddingBag(20, 3, servers, trainer=trainer)
        try:
            for step in range(len(batches)):
                bag(batches[step, trainer]).square().mean().backward()
                bag.step()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(trainer,)) for trainer in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    single_bag = ShardedEmbeddingBag(20, 3, [EmbeddingServer(single)])
    for step in range(len(batches)):
        single_bag(batches[step].view(24, 2)).square().mean().backward()
        single_bag.step()
    for server, rows in zip(servers, RangeSharding(20, 2)._starts, strict=False):
        assert_close(server.table.view(), single.view()[rows : rows + 10])


def test_timeout_names_missing_trainers() -> None:
    server = EmbeddingServer(EmbeddingTable(5, 2, name="clicks"), trainers=3, timeout=0.2)
    before = server.table.view().clone()
    message = r"'clicks': trainer 1 has waited 0.2 s in step 1 for trainers \[0, 2\]"
    with pytest.raises(CollectiveTimeout, match=message):
        server.update(torch.tensor([1]), torch.ones(1, 2), 1)
    assert torch.equal(server.table.view(), before)


@pytest.mark.parametrize("staleness", [None, 0])
def test_lost_trainer_ends_the_wait(staleness: int | None) -> None:
    server = EmbeddingServer(
        EmbeddingTable(5, 2, name="clicks"), trainers=2, staleness=staleness, timeout=60
    )
    message = "table 'clicks': trainer 1 is lost: pid 7"
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            server.update(torch.tensor([1]), torch.ones(1, 2), 0)
        except PeerLost as error:
            failures.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    server.mark_lost(1, "pid 7")
    waiter.join(60)
    assert [str(failure) for failure in failures] == [message]
    with pytest.raises(PeerLost, match=message):
        server.update(torch.tensor([1]), torch.ones(1, 2), 0)


def test_staleness_bound() -> None:
    server = EmbeddingServer(EmbeddingTable(5, 2), trainers=2, staleness=2, timeout=0.2)
    arguments = torch.tensor([1]), torch.ones(1, 2)
    assert [server.update(*arguments, 0) for _ in range(2)] == [1, 2]
    message = r"trainer 0 has waited .* in step 3 for trainers \[1\], which have made \[0\] steps"
    with pytest.raises(CollectiveTimeout, match=message):
        server.update(*arguments, 0)
    assert server.update(*arguments, 1) == 1
    assert server.table.step == 4


@pytest.mark.parametrize("optimizer_config", [SGD(0.1), Adam(0.1)])
def test_server_saves_and_loads(optimizer_config: RowOptimizer, tmp_path: Path) -> None:
    first, second = (
        EmbeddingServer(EmbeddingTable(30, 4, optimizer_config, name="clicks")) for _ in range(2)
    )
    batches = [(torch.randint(0, 30, (9,)), torch.randn(9, 4)) for _ in range(4)]
    for batch in batches[:2]:
        first.update(*batch)
    first.save(str(tmp_path / "one"))
    second.load(str(tmp_path / "one"))
    for server in (first, second):
        assert [server.update(*batch) for batch in batches[2:]] == [3, 4]
    assert torch.equal(first.table.view(), second.table.view())
    other = EmbeddingServer(EmbeddingTable(31, 4, optimizer_config))
    before = other.table.view().clone()
    with pytest.raises(CheckpointError, match=r"(?s)cannot be loaded: .*\[31, 4\]"):
        other.load(str(tmp_path / "one"))
    with pytest.raises(CheckpointError, match="none cannot be loaded"):
        other.load(str(tmp_path / "none"))
    assert torch.equal(other.table.view(), before)


def test_memory_is_unmapped_with_the_table() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("phalanx-rows")

    gc.collect()
    before = mapped()
    table = EmbeddingTable(1000, 16)
    view = table.view()
    other = EmbeddingTable.open(table.handle)
    assert torch.equal(other.view(), view)
    assert mapped() == before + 2
    handle = table.handle
    del table, other
    assert view[0, 0] == view[0, 0]
    del view
    assert mapped() == before
    with pytest.raises(OSError, match=r"."):
        EmbeddingTable.open(handle)
    assert handle.pid == os.getpid()
