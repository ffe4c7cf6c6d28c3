"""The seed of a test: the same at every run, unless fresh data is asked for."""

from __future__ import annotations

import os
import zlib

__all__ = ["fresh_seed"]


def fresh_seed() -> int:
    """Return the seed of this test, and print it.

    It follows from the test's name, so that each run repeats the one before. PHALANX_TEST_SEED is
    another seed, or "random" for a new one at every call, as in `make explore`.
    """
    chosen = os.environ.get("PHALANX_TEST_SEED", "")
    if chosen == "random":
        seed = int.from_bytes(os.urandom(4), "little")
    elif chosen:
        seed = int(chosen)
    else:
        # "path::test[case] (call)"; the name without the phase.
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        seed = zlib.crc32(test.encode())
    print(f"seed {seed}: repeat with PHALANX_TEST_SEED={seed}")
    return seed
