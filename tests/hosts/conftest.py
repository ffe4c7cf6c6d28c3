"""Fixtures for the tests of this folder: forked ranks, and ranks that `mpirun` starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import mpi
from tests.ranks import ranks

__all__ = ["ranks"]


@pytest.fixture(scope="package", params=mpi.LIBRARIES)
def under_mpirun(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[mpi.MpiRanks]:
    """Four ranks under the `mpirun` of each library: `under_mpirun.run(2, function, argument)`."""
    with mpi.MpiRanks(request.param, 4, tmp_path_factory) as started:
        yield started
