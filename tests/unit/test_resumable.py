"""Resumable samplers: completed and remaining samples form the epoch, at any world size."""

import json
import math
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

from phalanx.data import EvaluationSampler, GlobalBatchSampler, ResumableSampler
from phalanx.errors import UsageError


def make_data(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(n))


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(state))
    return copy


def run_steps(samplers: list[GlobalBatchSampler], steps: int | None = None) -> list[int]:
    """Return the samples of all ranks in a number of steps, in order, without those of weight 0."""
    iterators = [iter(sampler) for sampler in samplers]
    seen = []
    for step in range(len(samplers[0]) if steps is None else steps):
        weights = [sampler.weight(step) for sampler in samplers]
        assert math.isclose(sum(weights), 1)
        shares = [next(iterator) for iterator in iterators]
        whole = sum(len(share) for share, weight in zip(shares, weights, strict=True) if weight)
        for share, weight in zip(shares, weights, strict=True):
            assert weight in (0, len(share) / whole)
            seen += share if weight else []
        for sampler in samplers:
            sampler.advance()
    assert steps is not None or all(list(iterator) == [] for iterator in iterators)
    return seen


class TestGlobalBatchSampler:
    @given(data=st.data(), samples=st.integers(1, 60), epoch=st.integers(0, 3))
    def test_resumes_at_other_world_size_and_batch(
        self, data: st.DataObject, samples: int, epoch: int
    ) -> None:
        worlds = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
        seed, shuffle = data.draw(st.integers(0, 9)), data.draw(st.booleans())
        state, seen = None, []
        for world_size in worlds:
            batch = data.draw(st.integers(world_size, world_size + 9))
            ranks = [
                GlobalBatchSampler(
                    range(samples),
                    batch,
                    world_size=world_size,
                    rank=rank,
                    seed=seed,
                    shuffle=shuffle,
                )
                for rank in range(world_size)
            ]
            for rank in ranks:
                if state is not None:
                    rank.load_state_dict(state)
                else:
                    rank.set_epoch(epoch)
            if ranks[0].epoch == epoch:
                seen += run_steps(ranks, data.draw(st.integers(0, len(ranks[0]))))
            states = [through_json(rank.state_dict()) for rank in ranks]
            assert all(other == states[0] for other in states)
            state = states[0]
            expected = (epoch, len(seen)) if len(seen) < samples else (epoch + 1, 0)
            assert (state["epoch"], state["position"]) == expected
        last = GlobalBatchSampler(range(samples), 7, seed=seed, shuffle=shuffle)
        last.load_state_dict(state)
        seen += chain(*last) if last.epoch == epoch else []
        whole = GlobalBatchSampler(range(samples), samples, seed=seed, shuffle=shuffle)
        whole.set_epoch(epoch)
        assert seen == next(iter(whole))

    @pytest.mark.parametrize("workers", [0, 2])
    def test_prefetched_samples_are_not_counted(self, workers: int) -> None:
        data = make_data(50)
        sampler = GlobalBatchSampler(data, 4)
        loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
        done = []
        for (batch,) in islice(loader, 3):
            done += batch.tolist()
            sampler.advance()
        resumed = GlobalBatchSampler(data, 4)
        resumed.load_state_dict(sampler.state_dict())
        remaining = [batch.tolist() for (batch,) in DataLoader(data, batch_sampler=resumed)]
        assert len(remaining) == len(resumed) == 10
        assert done + list(chain(*remaining)) == list(chain(*GlobalBatchSampler(data, 4)))

    def test_end_of_epoch(self) -> None:
        sampler = GlobalBatchSampler(range(10), 4, shuffle=False)
        for _ in sampler:
            sampler.advance()
        ended = sampler.state_dict()
        assert (sampler.epoch, sampler.at_end) == (1, True)
        assert (ended["epoch"], ended["position"]) == (1, 0)
        assert [len(step) for step in sampler] == [4, 4, 2], "the next iteration is a whole epoch"
        assert not sampler.at_end
        resumed = GlobalBatchSampler(range(10), 4, shuffle=False)
        resumed.load_state_dict(ended)
        assert (resumed.epoch, resumed.at_end) == (1, False)
        resumed.set_epoch(1)
        assert len(resumed) == len(list(resumed)) == 3

    def test_at_end(self) -> None:
        sampler = GlobalBatchSampler(range(10), 4)
        seen = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            assert not sampler.at_end
            for _ in sampler:
                assert (sampler.epoch, sampler.at_end) == (epoch, False)
                sampler.advance()
                seen.append(sampler.at_end)
                sampler.advance(0)
                assert sampler.at_end == seen[-1]
            assert (sampler.epoch, sampler.at_end) == (epoch + 1, True)
            with pytest.raises(UsageError, match=rf"1 given, .* 0 to 0, .* left in epoch {epoch}:"):
                sampler.advance()
        assert seen == 3 * [False, False, True]

    def test_epochs_without_set_epoch_follow_each_other(self) -> None:
        counted, named = (GlobalBatchSampler(range(10), 4) for _ in range(2))
        for epoch in range(3):
            named.set_epoch(epoch)
            for one, other in zip(counted, named, strict=True):
                assert one == other
                counted.advance()

    @pytest.mark.parametrize(("position", "batch"), [(11, 4), (9, 4), (8, 4)])
    def test_a_state_without_steps_left_is_of_the_next_epoch(
        self, position: int, batch: int
    ) -> None:
        """So it is with another batch too: with `drop_last` a larger one may have no step left."""
        saved = GlobalBatchSampler(range(11), 1).state_dict()
        sampler = GlobalBatchSampler(range(11), batch, drop_last=True)
        sampler.load_state_dict({**saved, "position": position})
        assert sampler.epoch == 1
        assert len(sampler) == len(list(sampler)) == 2

    def test_resumed_loop(self) -> None:
        def losses(sampler: GlobalBatchSampler, stop: int) -> Iterator[list[int]]:
            for epoch in range(sampler.epoch, 3):
                sampler.set_epoch(epoch)
                for batch in sampler:
                    if stop == 0:
                        return
                    yield batch
                    sampler.advance()
                    stop -= 1

        whole = list(losses(GlobalBatchSampler(range(11), 4, seed=5), -1))
        for stop in range(10):
            first, second = (GlobalBatchSampler(range(11), 4, seed=5) for _ in range(2))
            done = list(losses(first, stop))
            second.load_state_dict(through_json(first.state_dict()))
            assert done + list(losses(second, -1)) == whole

    def test_without_advance_epochs_are_whole(self) -> None:
        sampler = GlobalBatchSampler(range(10), 4, shuffle=False)
        next(iter(sampler))
        assert len(list(sampler)) == len(list(sampler)) == 3

    def test_drop_last(self) -> None:
        sampler = GlobalBatchSampler(range(11), 4, shuffle=False, drop_last=True)
        sampler.advance()
        resumed = GlobalBatchSampler(range(11), 3, shuffle=False, drop_last=True)
        resumed.load_state_dict(sampler.state_dict())
        assert list(resumed) == [[4, 5, 6], [7, 8, 9]]

    def test_length_is_that_of_iteration(self) -> None:
        """The length is that of the current iteration, or else of the next."""
        first = GlobalBatchSampler(range(10), 4, shuffle=False)
        first.advance()
        assert len(first) == len(list(first)) == 2
        resumed = GlobalBatchSampler(range(10), 4, shuffle=False)
        resumed.load_state_dict(first.state_dict())
        for step, batch in enumerate(resumed):
            assert len(resumed) == 2
            assert resumed.weight(step) == 1
            assert batch == [[4, 5, 6, 7], [8, 9]][step]
            resumed.advance()
            assert resumed.weight(step) == 1
        assert len(resumed) == 3
        resumed.advance(0)  # changes nothing
        assert len(resumed) == 3
        assert [len(batch) for batch in resumed] == [4, 4, 2]

    def test_other_epoch_starts_at_first_sample(self) -> None:
        sampler = GlobalBatchSampler(range(10), 4)
        sampler.advance(2)
        sampler.set_epoch(0)
        assert sampler.state_dict()["position"] == 8
        sampler.set_epoch(1)
        assert sampler.state_dict()["position"] == 0

    @pytest.mark.parametrize("steps", [-1, 4])
    def test_advancing_too_far(self, steps: int) -> None:
        sampler = GlobalBatchSampler(range(10), 4)
        with pytest.raises(UsageError, match=rf"{steps} given, expected 0 to 3, the steps left"):
            sampler.advance(steps)

    def test_warns_once_about_missing_advance(self, caplog: pytest.LogCaptureFixture) -> None:
        sampler = GlobalBatchSampler(range(10), 4)
        list(sampler)
        sampler.state_dict()
        sampler.state_dict()
        (record,) = caplog.records
        assert "3 items have been drawn, but advance() was not called" in record.getMessage()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"samples": 11}, "a state with samples 11 given, expected samples 10.*the data set"),
            ({"seed": 1}, "a state with seed 1 given, expected seed 0 .*with the seed"),
            ({"shuffle": False}, "a state with shuffle False given, expected shuffle True"),
            ({"order": 5}, "a state with order 5 given, expected order .*PyTorch shuffle"),
            ({"sampler": "Other"}, "a state with sampler 'Other' given, expected sampler 'Global"),
            ({"position": 11}, "position 11 given, expected 0 to 10: the state is damaged"),
            ({"position": -1}, "position -1 given, expected 0 to 10"),
            ({"position": 1.5}, "expected a result of state_dict.., with integers"),
            ({"epoch": None}, "expected a result of state_dict.."),
        ],
    )
    def test_invalid_states(self, change: dict[str, Any], message: str) -> None:
        sampler = GlobalBatchSampler(range(10), 4)
        sampler.set_epoch(3)
        sampler.advance()
        before = sampler.state_dict()
        other = GlobalBatchSampler(range(10), 4).state_dict()
        with pytest.raises(UsageError, match=message):
            sampler.load_state_dict({**other, **change})
        assert sampler.state_dict() == before

    def test_states_of_other_samplers(self) -> None:
        sampler = GlobalBatchSampler(range(10), 4)
        for other in (
            GlobalBatchSampler(range(9), 4),
            GlobalBatchSampler(range(10), 4, seed=1),
            GlobalBatchSampler(range(10), 4, shuffle=False),
            EvaluationSampler(range(10)),
        ):
            with pytest.raises(UsageError, match=r"load_state_dict: a state with"):
                sampler.load_state_dict(other.state_dict())
        for invalid in (None, {}, [1]):
            with pytest.raises(UsageError, match="expected a result of state_dict"):
                sampler.load_state_dict(invalid)  # type: ignore[arg-type]


class TestEvaluationSampler:
    @given(samples=st.integers(1, 40), world_size=st.integers(1, 9))
    def test_every_sample_is_on_one_rank(self, samples: int, world_size: int) -> None:
        ranks = [
            EvaluationSampler(range(samples), world_size=world_size, rank=rank)
            for rank in range(world_size)
        ]
        shares = [list(rank) for rank in ranks]
        assert sorted(chain(*shares)) == list(range(samples))
        assert all(share == sorted(share) for share in shares)
        assert [len(rank) for rank in ranks] == [len(share) for share in shares]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1

    def test_in_data_loader(self) -> None:
        for rank, expected in enumerate([[[0, 3], [6]], [[1, 4]], [[2, 5]]]):
            sampler = EvaluationSampler(make_data(7), world_size=3, rank=rank)
            loader = DataLoader(make_data(7), batch_size=2, sampler=sampler)
            assert [batch.tolist() for (batch,) in loader] == expected
        none = EvaluationSampler(make_data(1), world_size=3, rank=2)
        assert list(DataLoader(make_data(1), batch_size=2, sampler=none)) == []

    @given(data=st.data(), samples=st.integers(1, 40), world_size=st.integers(1, 5))
    def test_resumes_at_another_world_size(
        self, data: st.DataObject, samples: int, world_size: int
    ) -> None:
        ranks = [
            EvaluationSampler(range(samples), world_size=world_size, rank=rank)
            for rank in range(world_size)
        ]
        steps = data.draw(st.integers(0, len(ranks[0])))
        seen: list[int] = []
        for rank in ranks:
            own = list(rank)[:steps]
            rank.advance(len(own))
            seen += own
        state = through_json(ranks[0].state_dict())
        after = data.draw(st.integers(1, 5))
        for number in range(after):
            resumed = EvaluationSampler(range(samples), world_size=after, rank=number)
            resumed.load_state_dict(state)
            expected = len(resumed)
            # Loaders with workers begin to iterate a sampler twice.
            workers = [iter(resumed), iter(resumed)]
            remaining = list(workers[1])
            assert len(remaining) == expected
            seen += remaining if resumed.epoch == 0 else []  # else the state is at the end
            assert len(list(resumed)) == len(resumed)
        assert sorted(seen) == list(range(samples))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"data": range(0)}, "0 samples given, expected at least 1"),
            ({"world_size": 2, "rank": 2}, "rank 2 given, expected 0 to 1"),
            ({"world_size": 2}, "world size 2 and rank None given, expected both or none"),
            ({"data": iter([])}, "expected a data set with a length"),
        ],
    )
    def test_invalid_arguments(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            EvaluationSampler(**{"data": range(10), **arguments})


class TestResumableSampler:
    def sampler(
        self, rank: int = 0, data: TensorDataset | None = None, **options: Any
    ) -> ResumableSampler[int]:
        options = {"num_replicas": 2, "seed": 4, **options}
        inner = DistributedSampler(data or make_data(21), rank=rank, **options)
        return ResumableSampler(inner)

    @pytest.mark.parametrize("done", range(0, 12, 3))
    def test_resumes_distributed_sampler(self, done: int) -> None:
        for rank in range(2):
            oracle = DistributedSampler(make_data(21), num_replicas=2, rank=rank, seed=4)
            oracle.set_epoch(6)
            whole = list(oracle)
            sampler = self.sampler(rank)
            sampler.set_epoch(6)
            assert list(sampler) == whole
            sampler.advance(done)
            resumed = self.sampler(rank)
            resumed.load_state_dict(through_json(sampler.state_dict()))
            loader = DataLoader(make_data(21), batch_size=4, sampler=resumed)
            assert len(resumed) == 11 - done
            assert list(chain(*(batch.tolist() for (batch,) in loader))) == whole[done:]
            resumed.set_epoch(7)
            oracle.set_epoch(7)
            assert list(resumed) == list(oracle)

    def test_state_is_the_same_on_all_ranks(self) -> None:
        assert self.sampler(0).state_dict() == self.sampler(1).state_dict()

    def test_batch_samplers_and_samplers_without_epochs(self) -> None:
        sampler = ResumableSampler(BatchSampler(SequentialSampler(range(7)), 3, False))
        sampler.advance()
        assert list(sampler) == [[3, 4, 5], [6]]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"num_replicas": 3},
                "state with world_size 2 given, expected world_size 3.*the same number",
            ),
            ({"seed": 5}, "state with seed 4 given, expected seed 5"),
            ({"shuffle": False}, "state with shuffle True given, expected shuffle False"),
            ({"data": make_data(22)}, "state with samples 21 given, expected samples 22"),
            ({"drop_last": True}, "state with items 11 given, expected items 10"),
        ],
    )
    def test_states_of_other_orders(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            self.sampler(**options).load_state_dict(self.sampler().state_dict())

    def test_samplers_that_cannot_resume(self) -> None:
        class Endless(Sampler[int]):
            def __iter__(self) -> Iterator[int]:
                return iter([1])

        with pytest.raises(UsageError, match="Endless given, expected a sampler with a length"):
            ResumableSampler(Endless())
        for inner in (RandomSampler(range(9)), BatchSampler(RandomSampler(range(9)), 3, False)):
            with pytest.raises(
                UsageError, match="RandomSampler given, which draws a different order"
            ):
                ResumableSampler(inner)
