"""What lies at the edges of groups that span hosts: disagreement, ends, interrupts, odd memory."""

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
from phalanx.hierarchical import matching
from tests.ranks import RankServer

LIMIT = 20.0


def come(name: str) -> None:
    end = time.monotonic() + LIMIT
    while not Path(os.environ["FOLDER"], name).exists():
        assert time.monotonic() < end, f"{name} didn't come"
        time.sleep(0.002)


def say(name: str) -> None:
    Path(os.environ["FOLDER"], name).touch()


def two_and_two(kind: str) -> str:
    """Ranks 0 and 1 have another size than 2 and 3, who are the others' next neighbours."""
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
def test_no_data_go_between_hosts_that_disagree(ranks: RankServer, hosts: str, kind: str) -> None:
    """A transport would end the process that gets more than it expects."""
    texts = ranks.run(len(hosts), two_and_two, kind, hosts=hosts)
    assert all("ranks disagree" in text or " called " in text for text in texts), texts


def wrong_size() -> tuple[str, list[float]]:
    """The recv is posted, and waited for, before its message comes."""
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
        say("posted")
        thread.join(LIMIT)
        return (caught or ["nothing was raised"])[0], tensor.tolist()
    come("posted")
    with pytest.raises(phalanx.CollectiveMismatch):
        _ = [dist.send(torch.ones(4), 0), dist.recv(tensor, 0)]
    return "", []


def test_a_message_of_another_size(ranks: RankServer) -> None:
    for _ in range(5):
        (text, values), _ = ranks.run(2, wrong_size, hosts="ab")
        assert "float32[3]" in text
        assert "float32[4]" in text
        assert values == [-1.0] * 3


def interrupted() -> list[float]:
    tensor, other = torch.full((3,), -1.0), torch.zeros(3)
    if dist.get_rank() == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            dist.recv(tensor, 1)
        say("interrupted")
        with pytest.raises(phalanx.Aborted):
            dist.recv(other, 1)
        return tensor.tolist()
    come("interrupted")
    with pytest.raises(phalanx.Aborted):
        _ = [dist.send(torch.ones(3), 0), dist.recv(other, 0)]
    return [-1.0] * 3


def test_an_interrupted_recv_writes_nothing_later(ranks: RankServer) -> None:
    assert ranks.run(2, interrupted, hosts="ab") == [[-1.0] * 3] * 2


def read_only() -> None:
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
def test_a_root_that_cannot_be_written(ranks: RankServer, hosts: str) -> None:
    ranks.run(len(hosts), read_only, hosts=hosts)


def wrong_interface() -> str:
    rank = int(os.environ["RANK"])
    if rank == 1:
        os.environ["PHALANX_INTERFACE"] = "nosuch0"
    method = f"file://{os.environ['FOLDER']}/store"
    start = time.monotonic()
    with pytest.raises(phalanx.PhalanxError if rank == 0 else phalanx.UsageError) as caught:
        dist.init_process_group("phalanx", init_method=method, rank=rank, world_size=2)
    assert time.monotonic() - start < LIMIT
    return str(caught.value)


def test_a_transport_that_cannot_be_had_is_told_to_all(ranks: RankServer) -> None:
    first, second = ranks.run(2, wrong_interface, timeout=None, hosts="ab")
    assert "PHALANX_INTERFACE='nosuch0'" in second
    assert first.startswith(
        "[rank 0/2] on rank 1 the transport gloo is not available: PHALANX_INTERFACE"
    )


def ends_first() -> list[float]:
    """Rank 2 has done its part, and ends without leaving; nobody needs it any more."""
    import phalanx.testing.fork_server  # noqa: F401 - these ranks end as scripts do

    rank = int(os.environ["RANK"])
    method = f"file://{os.environ['FOLDER']}/store"
    dist.init_process_group("phalanx", init_method=method, rank=rank, world_size=3)
    tensor = torch.full((3,), float(rank))
    if rank == 2:
        dist.send(tensor, 0)
        return []
    if rank == 1:
        come("gone")
        dist.send(tensor, 0)
        return []
    dist.recv(tensor, 2)
    pid = int(dist.group.WORLD._native.pid(2))  # type: ignore[union-attr]
    end = time.monotonic() + LIMIT
    while Path(f"/proc/{pid}").exists() and _state(pid) != "Z":
        assert time.monotonic() < end
        time.sleep(0.01)
    say("gone")
    dist.recv(tensor, 1)
    return tensor.tolist()


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_who_ends_without_leaving_is_not_missed(ranks: RankServer) -> None:
    assert ranks.run(3, ends_first, timeout=None, hosts="abc")[0] == [1.0] * 3


def leaves() -> str:
    """The group is left while another thread waits in it."""
    if dist.get_rank() == 1:
        come("left")
        return ""
    errors: list[Any] = []

    def wait() -> None:
        try:
            dist.recv(torch.empty(3), 1)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    its: matching.Inbox = dist.group.WORLD._native._inbox  # type: ignore[union-attr]
    thread.start()
    end = time.monotonic() + LIMIT
    while not its._waiting:
        assert time.monotonic() < end
    dist.destroy_process_group()
    say("left")
    thread.join(LIMIT)
    return type(errors[0]).__name__ if errors else "nothing"


def test_leaving_while_a_thread_waits(ranks: RankServer) -> None:
    assert ranks.run(2, leaves, hosts="ab")[0] == "Aborted"


def many_local() -> tuple[int, int]:
    """Recvs of any source that ranks of this host answer are forgotten."""
    rank = dist.get_rank()
    for number in range(50):
        if rank == 0:
            dist.recv(torch.empty(1), tag=number)
        elif rank == 1:
            dist.send(torch.ones(1), 0, tag=number)
    dist.barrier()
    its: matching.Inbox = dist.group.WORLD._native._inbox  # type: ignore[union-attr]
    return len(its._waiting), len(its._early)


def test_the_inbox_keeps_nothing(ranks: RankServer) -> None:
    assert ranks.run(3, many_local, hosts="aab") == [(0, 0)] * 3
