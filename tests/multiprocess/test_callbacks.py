"""Collectives in callbacks of futures, which run in the group's own thread."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankServer

Future = torch.futures.Future[list[torch.Tensor]]


def chain_callbacks(how: str) -> None:
    """Start an operation of the same group in each callback, and wait for it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def again(future: Future) -> list[torch.Tensor]:
        tensor = future.value()[0].clone()
        if how == "blocking":
            dist.all_reduce(tensor)
        elif how == "work":
            dist.all_reduce(tensor, async_op=True).wait()
        else:
            dist.all_reduce(tensor, async_op=True).get_future().wait()
        return [tensor]

    if rank == 0:
        dist.recv(torch.zeros(1), 1)
    future = dist.all_reduce(torch.ones(5), async_op=True).get_future().then(again).then(again)
    if rank == 1:
        # Rank 0 enters now: both callbacks on this rank were waiting for it.
        dist.send(torch.zeros(1), 0)
    assert future.wait()[0].tolist() == [world_size**3] * 5
    dist.barrier()


@pytest.mark.parametrize("how", ("blocking", "work", "future"))
def test_collectives_in_callbacks(ranks: RankServer, how: str) -> None:
    ranks.run(2, chain_callbacks, how)
