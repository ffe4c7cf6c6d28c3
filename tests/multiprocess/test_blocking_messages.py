"""Blocking messages take the fast path in every build of torch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from phalanx.backend import cuda
from phalanx.backend import messages as messages_module
from phalanx.backend.messages import Messages
from phalanx.backend.process_group import ProcessGroup
from tests.ranks import RankServer


def messages(as_for_cuda: bool) -> list[str]:
    """Return the numbers of messages posted with a work, blocking and not."""
    if as_for_cuda and torch.version.cuda is None:
        messages_module._IS_WRAPPED = True
        for name in ("send", "recv"):
            setattr(ProcessGroup, name, cuda._delegate_to_nccl(name, getattr(ProcessGroup, name)))
    posted: list[str] = []
    under_way = Messages._make_work

    def post(self: Messages, name: str, *arguments: object) -> dist.Work:
        posted.append(name)
        return under_way(self, name, *arguments)  # type: ignore[arg-type]

    Messages._make_work = post  # type: ignore[method-assign,assignment]
    rank, tensor = dist.get_rank(), torch.full((5,), -1.0)
    for _ in range(3):
        if rank == 0:
            dist.send(torch.arange(5.0), 1)
        else:
            dist.recv(tensor, 0)
    posted.append("|")
    work = dist.isend(torch.arange(5.0), 1) if rank == 0 else dist.irecv(tensor, 0)
    assert work is not None
    work.wait()
    assert rank == 0 or tensor.tolist() == [0, 1, 2, 3, 4]
    return posted


@pytest.mark.parametrize("as_for_cuda", (False, True))
def test_a_work_is_made_for_messages_that_do_not_block(
    ranks: RankServer, as_for_cuda: bool
) -> None:
    assert ranks.run(2, messages, as_for_cuda) == [["|", "send"], ["|", "recv"]]
