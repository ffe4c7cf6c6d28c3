"""Edge cases of groups that span hosts: mismatches, exits, interrupts, read-only memory."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.hierarchical.messages import MessageMatcher
from tests.ranks import RankServer, marker_file, wait_for_file
from tests.waiting import once_blocked

pytestmark = pytest.mark.slow

LIMIT = 20.0


def mismatch_between_hosts(kind: str) -> str:
    """Ranks 0 and 1 pass a different size than the other ranks."""
    rank = dist.get_rank()
    tensor = torch.ones(10 if rank < 2 else 1000)
    lists = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    ours = lists if rank == 1 else None
    call = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "reduce": lambda: dist.reduce(tensor, 1),
        "gather": lambda: dist.gather(tensor, ours, 1),
        "scatter": lambda: dist.scatter(tensor, ours, 1),
    }[kind]
    with pytest.raises(phalanx.CollectiveMismatch) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("hosts", ("abcd", "aaabb"))
@pytest.mark.parametrize("kind", ("all_reduce", "reduce", "gather", "scatter"))
def test_no_data_are_sent_between_hosts_that_disagree(
    ranks: RankServer, hosts: str, kind: str
) -> None:
    """A transport would end a process that receives more than it expects."""
    texts = ranks.run(len(hosts), mismatch_between_hosts, kind, hosts=hosts)
    assert all("ranks disagree" in text or " called " in text for text in texts), texts


def mismatched_message() -> tuple[str, list[float]]:
    """The recv is posted and waited for before its message arrives."""
    tensor = torch.full((3,), -1.0)
    if dist.get_rank() == 0:
        caught: list[str] = []

        def receive() -> None:
            try:
                dist.recv(tensor, 1)
            except phalanx.CollectiveMismatch as error:
                caught.append(str(error))

        thread = threading.Thread(target=receive)
        thread.start()
        marker_file("posted").touch()
        thread.join(LIMIT)
        return (caught or ["nothing was raised"])[0], tensor.tolist()
    wait_for_file("posted")
    with pytest.raises(phalanx.CollectiveMismatch):
        _ = [dist.send(torch.ones(4), 0), dist.recv(tensor, 0)]
    return "", []


def test_message_of_a_different_size(ranks: RankServer) -> None:
    for _ in range(5):
        (text, values), _ = ranks.run(2, mismatched_message, hosts="ab")
        assert "float32[3]" in text
        assert "float32[4]" in text
        assert values == [-1.0] * 3


def interrupt_recv() -> list[float]:
    tensor, other = torch.full((3,), -1.0), torch.zeros(3)
    if dist.get_rank() == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        once_blocked(lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            dist.recv(tensor, 1)
        marker_file("interrupted").touch()
        with pytest.raises(phalanx.Aborted):
            dist.recv(other, 1)
        return tensor.tolist()
    wait_for_file("interrupted")
    with pytest.raises(phalanx.Aborted):
        _ = [dist.send(torch.ones(3), 0), dist.recv(other, 0)]
    return [-1.0] * 3


def test_interrupted_recv_writes_nothing_later(ranks: RankServer) -> None:
    assert ranks.run(2, interrupt_recv, hosts="ab") == [[-1.0] * 3] * 2


def broadcast_read_only() -> None:
    folder = Path(os.environ["FOLDER"])
    count, root = 600_000, 1
    if dist.get_rank() == root:
        np.arange(count, dtype=np.float32).tofile(folder / "data")
        tensor = torch.from_numpy(np.memmap(folder / "data", np.float32, "r"))
    else:
        tensor = torch.full((count,), -1.0)
    dist.broadcast(tensor, root)
    assert torch.equal(tensor, torch.arange(count, dtype=torch.float32))


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("hosts", ("aabb", "aab"))
def test_read_only_root_tensor(ranks: RankServer, hosts: str) -> None:
    ranks.run(len(hosts), broadcast_read_only, hosts=hosts)


def unknown_interface() -> str:
    rank = int(os.environ["RANK"])
    if rank == 1:
        os.environ["PHALANX_INTERFACE"] = "nosuch0"
    method = f"file://{os.environ['FOLDER']}/store"
    with pytest.raises(phalanx.PhalanxError if rank == 0 else phalanx.UsageError) as caught:
        dist.init_process_group("phalanx", init_method=method, rank=rank, world_size=2)
    return str(caught.value)


def test_transport_failure_is_reported_on_all_ranks(ranks: RankServer) -> None:
    first, second = ranks.run(2, unknown_interface, timeout=None, hosts="ab")
    assert "PHALANX_INTERFACE='nosuch0'" in second
    assert first.startswith(
        "[rank 0/2] on rank 1 the transport gloo is not available: PHALANX_INTERFACE"
    )


def exit_without_leaving() -> list[float]:
    """Rank 2 has done its part and exits without leaving; no rank needs it any more."""
    import phalanx.testing.fork_server  # noqa: F401 - these ranks end as scripts do

    rank = int(os.environ["RANK"])
    method = f"file://{os.environ['FOLDER']}/store"
    dist.init_process_group("phalanx", init_method=method, rank=rank, world_size=3)
    tensor = torch.full((3,), float(rank))
    if rank == 2:
        dist.send(tensor, 0)
        return []
    if rank == 1:
        wait_for_file("gone")
        dist.send(tensor, 0)
        return []
    dist.recv(tensor, 2)
    pid = int(dist.group.WORLD._membership.native.pid(2))  # type: ignore[union-attr]
    end = time.monotonic() + LIMIT
    while Path(f"/proc/{pid}").exists() and _process_state(pid) != "Z":
        assert time.monotonic() < end
        time.sleep(0.01)
    marker_file("gone").touch()
    dist.recv(tensor, 1)
    return tensor.tolist()


def _process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_unneeded_rank_may_exit_without_leaving(ranks: RankServer) -> None:
    assert ranks.run(3, exit_without_leaving, timeout=None, hosts="abc")[0] == [1.0] * 3


def leave_while_waiting() -> str:
    """The group is left while another thread waits in it."""
    if dist.get_rank() == 1:
        wait_for_file("left")
        return ""
    errors: list[Any] = []

    def wait() -> None:
        try:
            dist.recv(torch.empty(3), 1)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    matcher: MessageMatcher = dist.group.WORLD._membership.native._matcher  # type: ignore[union-attr]
    thread.start()
    end = time.monotonic() + LIMIT
    while not matcher._posted:
        assert time.monotonic() < end
    dist.destroy_process_group()
    marker_file("left").touch()
    thread.join(LIMIT)
    return type(errors[0]).__name__ if errors else "nothing"


def test_leave_while_a_thread_waits(ranks: RankServer) -> None:
    assert ranks.run(2, leave_while_waiting, hosts="ab")[0] == "Aborted"


def many_local_recvs() -> tuple[int, int]:
    """Recvs from any source that match messages of this host are removed."""
    rank = dist.get_rank()
    for number in range(50):
        if rank == 0:
            dist.recv(torch.empty(1), tag=number)
        elif rank == 1:
            dist.send(torch.ones(1), 0, tag=number)
    dist.barrier()
    matcher: MessageMatcher = dist.group.WORLD._membership.native._matcher  # type: ignore[union-attr]
    return len(matcher._posted), len(matcher._unexpected)


def test_matcher_keeps_no_completed_recvs(ranks: RankServer) -> None:
    assert ranks.run(3, many_local_recvs, hosts="aab") == [(0, 0)] * 3
