"""Seeds that differ between ranks, drawn from the one that the user gives."""

from __future__ import annotations

import random

import numpy as np
import torch

__all__ = ["rank_seeds", "seed_rank"]


def rank_seeds(seed: int, rank: int, moment: int) -> list[int]:
    """Return three numbers below 2^63 that no other rank or moment has.

    Args:
        seed: The user's.
        rank: A rank.
        moment: A step or an epoch.
    """
    words = np.random.SeedSequence([abs(seed), rank, moment]).generate_state(3, np.uint64)
    return [int(word) >> 1 for word in words]


def seed_rank(seed: int, rank: int, step: int = 0) -> None:
    """Seed Python's, NumPy's and PyTorch's generators, differently on each rank."""
    first, second, third = rank_seeds(seed, rank, step)
    random.seed(first)
    np.random.seed(second % 2**32)
    torch.manual_seed(third)
