"""Training that is killed at random moments and started again ends as if nothing had been."""

from __future__ import annotations

import secrets

from tests.drill import training


def test_random_deaths() -> None:
    """The short form of `make drill ARGS=training`."""
    seed = secrets.randbelow(2**31)
    print(f"seed {seed}")
    landed = 0
    with training.Drill(epochs=8) as drill:
        for number in range(3):
            trial = drill.run(training.draw(seed, number, blows=2))
            assert trial.wrong == [], f"trial {number}, {trial}"
            landed += trial.landed
    assert landed, "no blow has struck a rank that still ran"
