"""Finding one another by env://, tcp:// and file://, with the rest of PyTorch's machinery."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankServer


def free_port() -> int:
    # Bound again by a store at once; nobody else takes ports of this kind here.
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def place() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def by_environment(port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("phalanx")


def by_environment_url(port: int) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    dist.init_process_group("phalanx", init_method="env://", timeout=timedelta(seconds=20))


def by_tcp(port: int) -> None:
    rank, size = place()
    url = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("phalanx", init_method=url, rank=rank, world_size=size)


def by_tcp_query(port: int) -> None:
    rank, size = place()
    url = f"tcp://127.0.0.1:{port}?rank={rank}&world_size={size}"
    dist.init_process_group("phalanx", init_method=url)


def by_file(port: int) -> None:
    rank, size = place()
    url = f"file://{os.environ['FOLDER']}/by-file"
    dist.init_process_group("phalanx", init_method=url, rank=rank, world_size=size)


def by_store(port: int) -> None:
    rank, size = place()
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=20))
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=size)


def by_prefixed_store(port: int) -> None:
    rank, size = place()
    store = dist.FileStore(f"{os.environ['FOLDER']}/prefixed", size)
    prefixed = dist.PrefixStore("mine", store)
    dist.init_process_group("phalanx", store=prefixed, rank=rank, world_size=size)


Meeting = Callable[[int], None]
MEETINGS: list[Meeting] = [
    by_environment,
    by_environment_url,
    by_tcp,
    by_tcp_query,
    by_file,
    by_store,
    by_prefixed_store,
]


def meet(how: Meeting, port: int, leave: bool) -> None:
    how(port)
    rank, size = place()
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    assert dist.get_backend() == "phalanx"
    tensor = torch.full((1000,), float(rank))
    dist.all_reduce(tensor)
    assert (tensor == sum(range(size))).all()
    group = dist.new_group([size - 1])
    if rank == size - 1:
        dist.barrier(group)
    # Forming a group needs the store, which lives as long as the rank that hosts it.
    dist.barrier()
    if leave:
        dist.destroy_process_group()


@pytest.mark.parametrize("leave", (True, False), ids=("leave", "just end"))
@pytest.mark.parametrize("world_size", (1, 3))
@pytest.mark.parametrize("how", MEETINGS)
def test_meeting(ranks: RankServer, how: Meeting, world_size: int, leave: bool) -> None:
    run = ranks.start(world_size, meet, how, free_port(), leave, timeout=None)
    for rank in run.join():
        assert rank.code == 0, rank.report()
        assert rank.stderr == ""


def again_and_again(port: int) -> None:
    """Groups that are left and formed again, as a notebook does it."""
    for turn in range(5):
        rank, size = place()
        url = f"file://{os.environ['FOLDER']}/turn-{turn}"
        dist.init_process_group("phalanx", init_method=url, rank=rank, world_size=size)
        tensor = torch.ones(turn + 1)
        dist.all_reduce(tensor)
        assert (tensor == size).all()
        dist.destroy_process_group()


def test_again_and_again(ranks: RankServer) -> None:
    ranks.run(2, again_and_again, 0, timeout=None)


def both_backends(port: int) -> None:
    """A group of the backend beside a default group of Gloo, and the other way round."""
    rank, size = place()
    for turn, (default, other) in enumerate([("gloo", "phalanx"), ("phalanx", "gloo")]):
        url = f"file://{os.environ['FOLDER']}/both-{turn}"
        dist.init_process_group(default, init_method=url, rank=rank, world_size=size)
        group = dist.new_group(backend=other)
        assert dist.get_backend(group) == other
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, group=group)
        assert (tensor == size**2).all()
        dist.destroy_process_group()


def test_beside_gloo(ranks: RankServer) -> None:
    ranks.run(2, both_backends, 0, timeout=None)


def upper_case(port: int) -> None:
    rank, size = place()
    url = f"file://{os.environ['FOLDER']}/upper"
    dist.init_process_group("PHALANX", init_method=url, rank=rank, world_size=size)
    dist.barrier()


def test_the_name_in_capitals(ranks: RankServer) -> None:
    ranks.run(2, upper_case, 0, timeout=None)
