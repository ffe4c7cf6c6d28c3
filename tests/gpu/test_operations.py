"""Every operation on tensors of a GPU, against Gloo on the CPU.

One rank uses NCCL; several ranks share the GPU, so that their tensors go through host memory.
"""

from __future__ import annotations

import pytest

from tests.conformance import cases, operations
from tests.ranks import RankServer
from tests.seeds import fresh_seed

# NCCL has no other dtypes, and no bitwise operators.
NCCL_DTYPES = ("bool", "uint8", "int8", "int32", "int64", *cases.FLOATS)
BITWISE = (" BAND ", " BOR ", " BXOR ")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_results_agree(ranks: RankServer, device: str, dtype: str, world_size: int) -> None:
    results = ranks.run(world_size, operations.compare, dtype, fresh_seed(), device)
    for count, rejected in results:
        assert count >= 6
        print("\n".join(f"NCCL lacks {each}" for each in rejected))
        unexpected = [each for each in rejected if not any(op in each for op in BITWISE)]
        if device == "cpu" or world_size > 1:
            assert not rejected
        elif dtype in NCCL_DTYPES:
            assert not unexpected
