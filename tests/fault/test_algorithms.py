"""An all-reduce by messages in which a rank dies: all other ranks raise an error that names it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from phalanx.parallel.algorithms import ALGORITHMS

if TYPE_CHECKING:
    from tests.ranks import RankServer


def without_a_rank(name: str) -> None:
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match=r"rank 2 .*was killed by SIGKILL"):
        ALGORITHMS[name](torch.ones(1 << 20))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_death_is_reported_on_every_rank(ranks: RankServer, name: str) -> None:
    ended = ranks.start(4, without_a_rank, name).join()
    assert [rank.code for rank in ended] == [0, 0, -signal.SIGKILL, 0], ended[0].report()
