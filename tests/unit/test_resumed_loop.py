"""The documented loop, stopped after each step and resumed: it is the uninterrupted run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from phalanx.data import EvaluationSampler, GlobalBatchSampler, ResumableSampler
from phalanx.train import Checkpointer, random_states, restore_random_states
from tests.documented_loop import FORMS, STEPS_PER_EPOCH, read_program

EPOCHS = 2
# `make test` runs these.
SHORT = ("batches", "workers, samples")


class Stopped(Exception):
    """Ends a run, as a kill would after a checkpoint."""


def freeze(value: Any) -> Any:
    """Return a copy of a state that compares bit for bit."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.detach().numpy().tobytes()
    if isinstance(value, Mapping):
        return {key: freeze(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [freeze(each) for each in value]
    return value


def train(
    form: str, folder: Path, monkeypatch: pytest.MonkeyPatch, stop: int | None = None
) -> dict[int, Any]:
    """Run the program, which saves each step; return the loss and the state of each.

    Args:
        form: The form of the program.
        folder: The directory in which the program runs.
        monkeypatch: The fixture.
        stop: The step after which the run is stopped; None for a whole run.
    """
    steps = {}
    names: dict[str, Any] = {"__name__": "__main__"}
    write = Checkpointer.save

    def save(self: Checkpointer, step: int, state: dict[str, Any]) -> Path:
        path = write(self, step, state)
        steps[step] = freeze([names["loss"], state])
        if step == stop:
            raise Stopped
        return path

    folder.mkdir(exist_ok=True)
    with monkeypatch.context() as patch, contextlib.suppress(Stopped):
        patch.chdir(folder)
        patch.setattr(Checkpointer, "save", save)
        exec(compile(read_program(form, epochs=EPOCHS, every=1), "train.py", "exec"), names)
    return steps


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form in SHORT else pytest.mark.slow) for form in FORMS]
)
def test_each_step_in_a_run_of_its_own(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(form, tmp_path / "whole", monkeypatch)
    assert list(whole) == list(range(1, EPOCHS * STEPS_PER_EPOCH + 1))
    for step, expected in whole.items():
        assert train(form, tmp_path / "stopped", monkeypatch, step) == {step: expected}
    assert train(form, tmp_path / "stopped", monkeypatch) == {}


# That each step resumes is shown above; here, that all later ones follow.
STOPS = (1, STEPS_PER_EPOCH // 2, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stop",
    [
        pytest.param(stop, marks=() if stop in STOPS else pytest.mark.long)
        for stop in range(1, STEPS_PER_EPOCH + 2)
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_stopped_once(
    form: str, stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(form, tmp_path / "whole", monkeypatch)
    first = train(form, tmp_path / "stopped", monkeypatch, stop)
    assert list(first) == list(range(1, stop + 1))
    assert first | train(form, tmp_path / "stopped", monkeypatch) == whole


class Noise(Dataset[Tensor]):
    """A data set that draws random numbers for each sample, as random augmentation does."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        return index + torch.rand(2)


def draw(workers: int, state: Any = None, stop: int = 0) -> tuple[list[tuple[Tensor, Tensor]], Any]:
    """Make the steps that are left of two epochs.

    Returns:
        The batch and the random numbers of each step, and the state after `stop` steps.
    """
    sampler = GlobalBatchSampler(range(20), 4, seed=3)
    loader = DataLoader(Noise(), batch_sampler=sampler, num_workers=workers)
    if state is not None:
        restore_random_states(state[1])
        sampler.load_state_dict(state[0])
    steps = []
    for epoch in range(sampler.epoch, 2):
        sampler.set_epoch(epoch)
        for batch in loader:
            steps.append((batch, torch.rand(3)))
            sampler.advance()
            if len(steps) == stop:
                state = sampler.state_dict(), random_states()
    return steps, state


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("done", [1, 4, 5, 6])
def test_random_augmentation(workers: int, done: int) -> None:
    """It resumes exactly without workers, and with workers from the next epoch on."""
    whole, state = draw(workers, stop=done)
    resumed, _ = draw(workers, state)
    differing = (-done) % 5 if workers else 0  # steps of the resumed epoch, whose workers restart
    assert len(whole) == 10
    for number, (one, other) in enumerate(zip(resumed, whole[done:], strict=True)):
        assert one[0].equal(other[0]) == (number >= differing)
        assert one[0].long().equal(other[0].long()), "the samples are the same in any case"
        assert one[1].equal(other[1])


def make_loaders(sampler: Any, generator: torch.Generator | None) -> Iterator[DataLoader[Any]]:
    """Yield the loaders that users make for a sampler, with and without workers."""
    data = TensorDataset(torch.arange(40))
    by_batches = isinstance(sampler, GlobalBatchSampler)
    for workers in (0, 2):
        options: Any = {"num_workers": workers, "generator": generator}
        yield DataLoader(data, sampler=sampler, batch_size=None, **options)
        if by_batches:
            yield DataLoader(data, batch_sampler=sampler, **options)
        else:
            yield DataLoader(data, sampler=sampler, batch_size=4, **options)
            batches = torch.utils.data.BatchSampler(sampler, 4, drop_last=True)
            yield DataLoader(data, batch_sampler=batches, **options)


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("kind", ["batches", "samples", "evaluation"])
def test_only_an_epoch_that_continues_keeps_the_generator(
    kind: str, *, own_generator: bool
) -> None:
    generator = torch.Generator() if own_generator else None
    drawn_from = generator or torch.default_generator
    sampler: Any = {
        "batches": lambda: GlobalBatchSampler(range(40), 4),
        "samples": lambda: ResumableSampler(
            torch.utils.data.DistributedSampler(range(40), num_replicas=1, rank=0)  # type: ignore[arg-type]
        ),
        "evaluation": lambda: EvaluationSampler(range(40)),
    }[kind]()
    for loader in make_loaders(sampler, generator):
        before = drawn_from.get_state()
        iter(loader)
        after = drawn_from.get_state()
        drawn_from.set_state(before)
        torch.empty((), dtype=torch.int64).random_(generator=generator)
        assert drawn_from.get_state().equal(after), "an epoch that begins draws one number"
        assert not after.equal(before)
        sampler.advance()
        both = drawn_from.get_state(), torch.get_rng_state()
        iterator = iter(loader)
        assert drawn_from.get_state().equal(both[0])
        torch.rand(1)  # what is drawn between the beginning and the first batch stays drawn
        moved = torch.get_rng_state()
        next(iterator)
        assert not moved.equal(both[1])
        assert torch.get_rng_state().equal(moved)
        sampler.set_epoch(sampler.epoch + 1)


def test_two_loaders_at_once() -> None:
    samplers = [GlobalBatchSampler(range(40), 4, seed=seed) for seed in range(2)]
    loaders = [DataLoader(TensorDataset(torch.arange(40)), batch_sampler=s) for s in samplers]
    for sampler in samplers:
        sampler.advance(3)
    before = torch.get_rng_state()
    assert len(list(zip(*loaders, strict=True))) == 7
    assert torch.get_rng_state().equal(before)


def test_other_samplers_draw_as_before() -> None:
    loader = DataLoader(TensorDataset(torch.arange(9)), batch_size=3)
    before = torch.get_rng_state()
    iter(loader)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.get_rng_state().equal(after)
