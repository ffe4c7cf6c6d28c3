"""Partitions and global batches: no sample is lost or repeated, at any world size."""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from phalanx.data import DataPartitioner, GlobalBatchSampler, Partition, per_rank_batch_size
from phalanx.errors import UsageError


def make_data(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(n))


def all_indices(partitioner: DataPartitioner, parts: int) -> list[Sequence[int]]:
    return [partitioner.use(part).indices for part in range(parts)]


class TestPartition:
    def test_samples_are_in_given_order(self) -> None:
        part = Partition(make_data(10), [7, 0, 7])
        assert [int(sample) for (sample,) in (part[i] for i in range(len(part)))] == [7, 0, 7]

    def test_fetches_list_of_indices(self) -> None:
        part = Partition(make_data(10), [9, 8, 1])
        assert part[[2, 0]][0].tolist() == [1, 9]

    def test_works_in_data_loader(self) -> None:
        part = Partition(make_data(10), range(1, 10, 2))
        batches = [batch.tolist() for (batch,) in DataLoader(part, batch_size=2)]
        assert batches == [[1, 3], [5, 7], [9]]

    def test_repr(self) -> None:
        assert repr(Partition(make_data(10), [3, 4])) == "Partition(2 of 10 samples)"

    @pytest.mark.parametrize("index", [-1, 10])
    def test_index_out_of_range(self, index: int) -> None:
        with pytest.raises(UsageError, match=rf"index {index} given, expected 0 to 9"):
            Partition(make_data(10), [0, index])

    def test_data_without_a_length(self) -> None:
        class Stream(IterableDataset[int]):
            def __iter__(self) -> Iterator[int]:
                return iter([])

        with pytest.raises(UsageError, match="Stream given, expected a data set with a length"):
            Partition(Stream(), [0])


class TestDataPartitioner:
    @given(
        shares=st.lists(st.integers(1, 100), min_size=1, max_size=9),
        unused=st.integers(0, 50),
        samples=st.integers(900, 3000),
        seed=st.integers(0, 2**63 - 1),
    )
    def test_parts_are_disjoint_complete_and_of_the_right_size(
        self, shares: list[int], unused: int, samples: int, seed: int
    ) -> None:
        # The oracle counts in exact fractions.
        whole = sum(shares) + unused
        partitioner = DataPartitioner(make_data(samples), [share / whole for share in shares], seed)
        parts = all_indices(partitioner, len(shares))
        merged = [index for part in parts for index in part]
        assert len(set(merged)) == len(merged)
        assert set(merged) <= set(range(samples))
        if not unused:
            assert len(merged) == samples
        for share, part in zip(shares, parts, strict=True):
            assert abs(len(part) - Fraction(share * samples, whole)) < 1

    @pytest.mark.parametrize("parts", [1, 2, 3, 7, 10, 49, 97])
    def test_equal_fractions_lose_no_sample(self, parts: int) -> None:
        sizes = [
            len(part)
            for part in all_indices(DataPartitioner(make_data(97), [1 / parts] * parts), parts)
        ]
        assert sum(sizes) == 97
        assert sizes == [per_rank_batch_size(97, parts, part) for part in range(parts)]

    def test_default_fractions(self) -> None:
        partitioner = DataPartitioner(make_data(101))
        assert [len(partitioner.use(part)) for part in range(len(partitioner))] == [71, 20, 10]

    def test_seed_determines_split(self) -> None:
        first, again, other = (
            all_indices(DataPartitioner(make_data(50), [0.5, 0.5], seed), 2) for seed in (1, 1, 2)
        )
        assert first == again != other

    def test_shuffles(self) -> None:
        (part,) = all_indices(DataPartitioner(make_data(50), [1.0]), 1)
        assert list(part) != sorted(part) == list(range(50))

    def test_does_not_use_global_generator(self) -> None:
        before = torch.random.get_rng_state()
        DataPartitioner(make_data(50), [0.5, 0.5]).use(1)
        assert torch.equal(torch.random.get_rng_state(), before)

    @pytest.mark.parametrize(
        ("samples", "sizes", "message"),
        [
            (10, [], "no sizes given"),
            (10, [0.5, -0.1], r"fraction -0.1 given for part 1, expected a number above 0"),
            (10, [0.0, 1.0], r"fraction 0.0 given for part 0"),
            (10, [math.nan], "fraction nan given"),
            (10, [0.6, 0.6], "fractions that sum to 1.2 given, expected at most 1"),
            (2, [0.3, 0.3, 0.4], "3 partitions of 2 samples requested"),
            (0, [1.0], "1 partitions of 0 samples requested"),
            (10, [0.99, 0.01], "part 1 would be empty: 0.01 of 10 samples given"),
        ],
    )
    def test_invalid_sizes(self, samples: int, sizes: list[float], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            DataPartitioner(make_data(samples), sizes)

    @pytest.mark.parametrize("rank", [-1, 2])
    def test_rank_out_of_range(self, rank: int) -> None:
        with pytest.raises(UsageError, match=f"rank {rank} given, expected 0 to 1"):
            DataPartitioner(make_data(10), [0.5, 0.5]).use(rank)


class TestPerRankBatchSize:
    @given(world_size=st.integers(1, 100), more=st.integers(0, 1000))
    def test_sums_to_the_global_batch_evenly(self, world_size: int, more: int) -> None:
        batch = world_size + more
        sizes = [per_rank_batch_size(batch, world_size, rank) for rank in range(world_size)]
        assert sum(sizes) == batch
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((3, 4, 0), "global batch 3 given for world size 4, expected at least one sample"),
            ((0, 1, 0), "global batch 0 given"),
            ((8, 0, 0), "world size 0 given"),
            ((8, 2, 2), "rank 2 given, expected 0 to 1"),
            ((8, 2, -1), "rank -1 given, expected 0 to 1"),
        ],
    )
    def test_invalid_arguments(self, arguments: tuple[int, int, int], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            per_rank_batch_size(*arguments)


class TestGlobalBatchSampler:
    @given(
        samples=st.integers(1, 60),
        world_size=st.integers(1, 5),
        more=st.integers(0, 10),
        epoch=st.integers(0, 3),
        seed=st.integers(0, 1000),
        shuffle=st.booleans(),
    )
    def test_ranks_split_batches_of_one_rank(
        self, samples: int, world_size: int, more: int, epoch: int, seed: int, shuffle: bool
    ) -> None:
        batch = world_size + more

        def sampler(world_size: int, rank: int) -> GlobalBatchSampler:
            made = GlobalBatchSampler(
                range(samples), batch, world_size=world_size, rank=rank, seed=seed, shuffle=shuffle
            )
            made.set_epoch(epoch)
            return made

        whole = list(sampler(1, 0))
        assert sorted(chain(*whole)) == list(range(samples))
        assert [len(step) for step in whole[:-1]] == [batch] * (len(whole) - 1)
        ranks = [sampler(world_size, rank) for rank in range(world_size)]
        shares = [list(rank) for rank in ranks]
        for step, expected in enumerate(whole):
            weights = [rank.weight(step) for rank in ranks]
            assert math.isclose(sum(weights), 1)
            weighted = [
                share[step] if weight else [] for share, weight in zip(shares, weights, strict=True)
            ]
            assert list(chain(*weighted)) == expected
            for share, weight in zip(weighted, weights, strict=True):
                assert weight == len(share) / len(expected)
        assert {len(share) for share in shares} == {len(whole)} == {len(rank) for rank in ranks}

    def test_rank_without_samples_gets_one_with_weight_0(self) -> None:
        rank = GlobalBatchSampler(range(9), 4, world_size=4, rank=3, shuffle=False)
        assert list(rank) == [[3], [7], [8]]
        assert [rank.weight(step) for step in range(3)] == [0.25, 0.25, 0.0]

    def test_drop_last(self) -> None:
        rank = GlobalBatchSampler(range(11), 4, world_size=2, rank=1, shuffle=False, drop_last=True)
        assert list(rank) == [[2, 3], [6, 7]]

    def test_epochs_and_seeds_differ(self) -> None:
        sampler = GlobalBatchSampler(range(40), 40, seed=3)
        (first,), (again,) = list(sampler), list(sampler)
        sampler.set_epoch(1)
        (second,) = list(sampler)
        (other,) = list(GlobalBatchSampler(range(40), 40, seed=7))
        assert first == again
        assert len({tuple(order) for order in (first, second, other)}) == 3

    def test_does_not_use_global_generator(self) -> None:
        before = torch.random.get_rng_state()
        list(GlobalBatchSampler(range(40), 8))
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_in_data_loader(self) -> None:
        data = Partition(make_data(20), range(19, -1, -1))
        sampler = GlobalBatchSampler(data, 6, world_size=2, rank=1)
        by_sample = [batch.tolist() for (batch,) in DataLoader(data, batch_sampler=sampler)]
        by_list = [
            batch.tolist() for (batch,) in DataLoader(data, sampler=sampler, batch_size=None)
        ]
        assert by_sample == by_list == [[19 - i for i in step] for step in sampler]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"global_batch": 1, "world_size": 2, "rank": 0}, "global batch 1 given"),
            ({"world_size": 2, "rank": 2}, "rank 2 given, expected 0 to 1"),
            ({"world_size": 2}, "world size 2 and rank None given, expected both or none"),
            ({"data": range(0)}, "0 samples given, expected at least 1"),
            ({"data": range(3), "drop_last": True}, "3 samples given, expected at least 4"),
        ],
    )
    def test_invalid_arguments(self, arguments: dict[str, object], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            GlobalBatchSampler(**{"data": range(10), "global_batch": 4, **arguments})

    @pytest.mark.parametrize("step", [-1, 3])
    def test_weight_of_step_out_of_range(self, step: int) -> None:
        with pytest.raises(UsageError, match=f"step {step} given, expected 0 to 2"):
            GlobalBatchSampler(range(9), 4).weight(step)
