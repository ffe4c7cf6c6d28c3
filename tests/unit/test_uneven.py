"""Uneven inputs and combined means in one process; tests/multiprocess tests them on ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from phalanx.data import count_samples, join_uneven_inputs, mean_over_ranks, truncate_uneven_inputs
from phalanx.errors import UsageError


class TestWithoutAGroup:
    def test_loops_are_plain(self) -> None:
        batches = [torch.ones(3), torch.ones(1)]
        for loop in (join_uneven_inputs, truncate_uneven_inputs):
            assert [(len(batch), weight) for batch, weight in loop(batches)] == [(3, 1), (1, 1)]

    def test_means_are_plain(self) -> None:
        assert mean_over_ranks(torch.tensor([3]), 4) == 0.75
        assert mean_over_ranks({"b": True, "a": 1}, 2) == {"b": 0.5, "a": 0.5}

    @pytest.mark.parametrize(
        ("total", "count", "message"),
        [
            ("1", 1, "'1' given for 'total', expected a number"),
            (torch.ones(2), 1, r"torch.float32\[2\] given for 'total'.*sum it over the rank's"),
            (1, -1, "count -1.0 given for 'total', expected a number of samples"),
            (1, math.nan, "count nan given"),
            ({"a": 1}, {"b": 1}, r"totals \['a'\] and counts \['b'\] given"),
            ({}, 1, "expected a count for each total, and at least one"),
        ],
    )
    def test_invalid_numbers(self, total: Any, count: Any, message: str) -> None:
        with pytest.raises(UsageError, match=message):
            mean_over_ranks(total, count)

    @pytest.mark.parametrize(
        ("batch", "samples"),
        [
            (torch.ones(4, 2), 4),
            ([torch.tensor(1.0), {"x": ("words", torch.ones(3))}], 3),
            ({"ids": torch.ones(0, 7), "mask": torch.ones(5)}, 0),
        ],
    )
    def test_count_samples(self, batch: Any, samples: int) -> None:
        assert count_samples(batch) == samples

    @pytest.mark.parametrize("batch", ["words", torch.tensor(1.0), [], {"a": 3}])
    def test_batches_without_size(self, batch: Any) -> None:
        with pytest.raises(UsageError, match="given, expected a batch with a tensor"):
            count_samples(batch)
