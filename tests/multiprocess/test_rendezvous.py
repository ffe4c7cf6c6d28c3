"""Rendezvous by env://, tcp:// and file://, and by stores."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.ports import find_free_port
from tests.ranks import RankServer


def rank_and_size() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def init_by_environment(port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("phalanx")


def init_by_environment_url(port: int) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    dist.init_process_group("phalanx", init_method="env://", timeout=timedelta(seconds=20))


def init_by_tcp(port: int) -> None:
    rank, size = rank_and_size()
    url = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("phalanx", init_method=url, rank=rank, world_size=size)


def init_by_tcp_query(port: int) -> None:
    rank, size = rank_and_size()
    url = f"tcp://127.0.0.1:{port}?rank={rank}&world_size={size}"
    dist.init_process_group("phalanx", init_method=url)


def init_by_file(port: int) -> None:
    rank, size = rank_and_size()
    url = f"file://{os.environ['FOLDER']}/by-file"
    dist.init_process_group("phalanx", init_method=url, rank=rank, world_size=size)


def init_by_store(port: int) -> None:
    rank, size = rank_and_size()
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=20))
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=size)


def init_by_prefixed_store(port: int) -> None:
    rank, size = rank_and_size()
    store = dist.FileStore(f"{os.environ['FOLDER']}/prefixed", size)
    prefixed = dist.PrefixStore("mine", store)
    dist.init_process_group("phalanx", store=prefixed, rank=rank, world_size=size)


InitFunction = Callable[[int], None]
INIT_FUNCTIONS: list[InitFunction] = [
    init_by_environment,
    init_by_environment_url,
    init_by_tcp,
    init_by_tcp_query,
    init_by_file,
    init_by_store,
    init_by_prefixed_store,
]


def form_group(init_function: InitFunction, port: int, leave: bool) -> None:
    init_function(port)
    rank, size = rank_and_size()
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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("leave", (True, False), ids=("leave", "exit"))
@pytest.mark.parametrize("world_size", (1, 3))
@pytest.mark.parametrize("init_function", INIT_FUNCTIONS)
def test_rendezvous(
    ranks: RankServer, init_function: InitFunction, world_size: int, leave: bool
) -> None:
    run = ranks.start(world_size, form_group, init_function, find_free_port(), leave, timeout=None)
    for rank in run.join():
        assert rank.code == 0, rank.report()
        assert rank.stderr == ""


def form_groups_repeatedly(port: int) -> None:
    """Destroy and form groups repeatedly, as in a notebook."""
    for index in range(5):
        rank, size = rank_and_size()
        url = f"file://{os.environ['FOLDER']}/group-{index}"
        dist.init_process_group("phalanx", init_method=url, rank=rank, world_size=size)
        tensor = torch.ones(index + 1)
        dist.all_reduce(tensor)
        assert (tensor == size).all()
        dist.destroy_process_group()


def test_repeated_groups(ranks: RankServer) -> None:
    ranks.run(2, form_groups_repeatedly, 0, timeout=None)


def form_groups_of_two_backends(port: int) -> None:
    """Form a group of each backend beside a default group of the other."""
    rank, size = rank_and_size()
    for index, (default, other) in enumerate([("gloo", "phalanx"), ("phalanx", "gloo")]):
        url = f"file://{os.environ['FOLDER']}/both-{index}"
        dist.init_process_group(default, init_method=url, rank=rank, world_size=size)
        group = dist.new_group(backend=other)
        assert dist.get_backend(group) == other
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, group=group)
        assert (tensor == size**2).all()
        dist.destroy_process_group()


def test_groups_beside_gloo(ranks: RankServer) -> None:
    ranks.run(2, form_groups_of_two_backends, 0, timeout=None)


def init_in_upper_case(port: int) -> None:
    rank, size = rank_and_size()
    url = f"file://{os.environ['FOLDER']}/upper"
    dist.init_process_group("PHALANX", init_method=url, rank=rank, world_size=size)
    dist.barrier()


def test_the_backend_name_in_upper_case(ranks: RankServer) -> None:
    ranks.run(2, init_in_upper_case, 0, timeout=None)
