"""The training loop of the page on checkpoints, and forms of it that users write."""

from __future__ import annotations

from pathlib import Path

from tests.docs.fences import read_fences

_PAGE = Path(__file__).parents[1] / "docs" / "checkpoints.md"

STEPS_PER_EPOCH = 10

_BY_SAMPLES = {
    "GlobalBatchSampler(data, 180, seed=1)": "ResumableSampler(DistributedSampler(data, seed=1))",
    "batch_sampler=sampler": "batch_size=180, sampler=sampler",
    "sampler.advance()": "sampler.advance(len(labels))",
    ", weight=sampler.weight(number)": "",
    "import GlobalBatchSampler": "import ResumableSampler",
    "import DataLoader": "import DistributedSampler, DataLoader",
}
_LOADER = "DataLoader(data, "
FORMS: dict[str, dict[str, str]] = {
    "batches": {},
    "lists": {"batch_sampler=sampler": "batch_size=None, sampler=sampler"},
    "samples": _BY_SAMPLES,
    "workers": {_LOADER: f"{_LOADER}num_workers=2, "},
    "persistent workers": {_LOADER: f"{_LOADER}num_workers=2, persistent_workers=True, "},
    "workers, samples": {**_BY_SAMPLES, _LOADER: f"{_LOADER}num_workers=2, "},
    "other schedules": {
        "ExponentialLR, LinearLR": "MultiStepLR, OneCycleLR",
        "LinearLR(optimizer, total_iters=20)": "OneCycleLR(optimizer, 0.01, total_steps=999)",
        "ExponentialLR(optimizer, gamma=0.9)": "MultiStepLR(optimizer, [1, 3])",
    },
}
"""The replacements in the program that make each form of it."""


def read_program(form: str = "batches", *, epochs: int = 10, every: int = 25) -> str:
    """Return the program of the page in one of its forms.

    Args:
        form: A key of `FORMS`.
        epochs: The number of epochs to train for.
        every: The number of steps between checkpoints.
    """
    (program,) = (fence.text for fence in read_fences(_PAGE) if fence.file_name == "train.py")
    changes = {
        "range(sampler.epoch, 10)": f"range(sampler.epoch, {epochs})",
        "step % 25": f"step % {every}",
        **FORMS[form],
    }
    for old, new in changes.items():
        assert program.count(old) == 1, f"the program has {old!r} {program.count(old)} times"
        program = program.replace(old, new)
    return program
