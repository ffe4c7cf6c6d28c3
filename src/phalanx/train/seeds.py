"""Seeds that differ between ranks, derived from the seed that the user gives."""

from __future__ import annotations

import random

import numpy as np
import torch

__all__ = ["rank_seeds", "seed_rank"]


def rank_seeds(seed: int, rank: int, index: int) -> list[int]:
    """Return three numbers below 2^63 that are specific to a rank and an index.

    Args:
        seed: The seed that the user gave.
        rank: A rank.
        index: The number of a step or an epoch.
    """
    words = np.random.SeedSequence([abs(seed), rank, index]).generate_state(3, np.uint64)
    return [int(word) >> 1 for word in words]


def seed_rank(seed: int, rank: int, step: int = 0) -> None:
    """Seed the generators of Python, NumPy and PyTorch, differently on each rank and step."""
    first, second, third = rank_seeds(seed, rank, step)
    random.seed(first)
    np.random.seed(second % 2**32)
    torch.manual_seed(third)
