"""Fixtures of this folder: the ranks, a seed, and preloaded modules."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import RankServer
from tests.ranks import ranks as ranks  # noqa: PLC0414 - makes the fixture known here


@pytest.fixture
def seed() -> int:
    """Return a new seed for every test; pytest shows it when the test fails."""
    number = int(torch.randint(2**31, ()))
    print(f"seed {number}")
    return number


@pytest.fixture(autouse=True, scope="module")
def preloaded(request: pytest.FixtureRequest, ranks: RankServer) -> None:
    """Import the modules in the test module's `PRELOAD` once, rather than in each rank."""
    for module in ("torch._dynamo", *getattr(request.module, "PRELOAD", ())):
        ranks.preload(module)
