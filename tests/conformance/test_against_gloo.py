"""The same operations on the same data by Gloo, in the same processes: results must agree."""

from __future__ import annotations

import pytest

from tests.conformance import operations
from tests.ranks import RankServer
from tests.seeds import fresh_seed


@pytest.mark.sampled(16)
@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
@pytest.mark.parametrize("dtype", operations.GLOO_DTYPES)
def test_results_agree(ranks: RankServer, dtype: str, world_size: int) -> None:
    results = ranks.run(world_size, operations.compare, dtype, fresh_seed())
    assert all(count >= 6 and not rejected for count, rejected in results)
