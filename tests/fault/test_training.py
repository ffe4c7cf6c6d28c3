"""Training that is killed at random moments and restarted ends like an undisturbed run."""

from __future__ import annotations

import pytest

from tests.fault_injection import training
from tests.seeds import fresh_seed


@pytest.mark.slow
def test_random_kills() -> None:
    """The short form of `make faults ARGS=training`."""
    seed = fresh_seed() % 2**31
    effective_kills = 0
    with training.TrainingRunner(epochs=8) as runner:
        for number in range(3):
            trial = runner.run(training.draw(seed, number, kills=2))
            assert trial.wrong == [], f"trial {number}, {trial}"
            effective_kills += trial.effective_kills
    assert effective_kills, "no kill hit a running rank"
