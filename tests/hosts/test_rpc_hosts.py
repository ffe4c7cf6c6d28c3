"""Calls of `phalanx.rpc` between hosts that share only a network."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx import rpc
from phalanx.errors import CallTimeout, PeerLost, PhalanxError
from phalanx.rpc.agent import agent
from tests.networks import Network, enter
from tests.ranks import RankOutcome, RankServer, RunningRanks
from tests.rpc_training import limit_address_space
from tests.waiting import wait_for

MISSING = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
REASON = f"needs root, iproute2 and util-linux (missing: {MISSING}, user {os.geteuid()})"
NAMED = r"worker 'worker-{}' \(id {}, pid \d+ on \S+\)"
# No elements, one, just too large to be inline in a message, and many reads.
SIZES = (0, 1, 4097, 5_000_000)
LARGER_THAN_A_FRAME = 300_000_000


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if MISSING or os.geteuid() != 0:
        # CI has these tools, so the tests must not be skipped there.
        (pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip)(REASON)
    with Network(3) as network:
        yield network


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    ranks.preload("phalanx.rpc")


def start(ranks: RankServer, network: Network, hosts: str, *arguments: Any) -> RunningRanks:
    """Start workers, each on the host of its letter, with rendezvous on the first host."""
    host_numbers = [ord(letter) - ord("a") for letter in hosts]
    return ranks.start(
        len(hosts),
        run_on_host,
        network.names,
        network.addresses,
        host_numbers,
        *arguments,
        timeout=None,
    )


def run_on_host(
    names: list[str], addresses: list[str], host_numbers: list[int], function: Any, *arguments: Any
) -> Any:
    rank = int(os.environ["RANK"])
    enter(names[host_numbers[rank]])
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = addresses[host_numbers[0]], "29531"
    rpc.init_rpc(f"worker-{rank}", timeout=30)
    is_local = [peer.is_local for peer in agent().peers]
    assert is_local == [host == host_numbers[rank] for host in host_numbers]
    return function(*arguments)


def file(name: str) -> Path:
    return Path(os.environ["FOLDER"], name)


# ---- functions that are called ----


def echo(value: Any) -> Any:
    return value


def call_around(depth: int) -> int:
    here = rpc.get_worker_info().id
    to = (here + 1) % len(rpc.get_worker_infos())
    return 1 + int(rpc.rpc_sync(to, call_around, (depth - 1,))) if depth else 0


class Net(nn.Module):
    """A layer whose output may be passed on to another worker."""

    def __init__(self, weight: Tensor, next_worker: int | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.next_worker = next_worker

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight)
        return y if self.next_worker is None else rpc.rpc_sync(self.next_worker, torch.sin, (y,))

    def parameter_rrefs(self) -> list[Any]:
        return [rpc.RRef(each) for each in self.parameters()]


def train_in_one_process(x: Tensor, weight: Tensor, other: Tensor, steps: int) -> list[float]:
    """Return the losses of one process."""
    weights = [nn.Parameter(weight.clone()), nn.Parameter(other.clone())]
    optimizer = torch.optim.SGD(weights, 0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.sin(torch.tanh(torch.tanh(x @ weights[0]) @ weights[1])).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---- normal operation ----


def check_values() -> None:
    for to in range(1, 4):
        assert rpc.rpc_sync(to, echo, (to,)) == to
        futures = [rpc.rpc_async(to, echo, (number,)) for number in range(100)]
        assert torch.futures.wait_all(futures) == list(range(100))
        for size in SIZES:
            data = torch.randint(0, 256, (size,), dtype=torch.uint8)
            assert torch.equal(rpc.rpc_sync(to, echo, (data,)), data)
            assert torch.equal(rpc.rpc_async(to, echo, (data,)).wait(), data)
        views = [torch.randn(300, 401)[::3, 5:].t(), torch.randn(7)[3].expand(5000)]
        received = rpc.rpc_sync(to, echo, (views,))
        assert all(map(torch.equal, received, views))
        # Data other than tensors is always pickled.
        text = os.urandom(1_000_000)
        assert rpc.rpc_sync(to, echo, (text,)) == text
        box = rpc.remote(to, dict, ({"a": 1},))
        assert box.rpc_sync().get("a") == 1
        assert rpc.rpc_sync(3 - to % 3, rpc.RRef.to_here, (box,)) == {"a": 1}
    assert call_around(12) == 12
    with pytest.raises(KeyError, match="far"):
        rpc.rpc_sync(2, {}.__getitem__, ("far",))
    with pytest.raises(CallTimeout):
        rpc.rpc_sync(2, time.sleep, (0.3,), timeout=0.1)


def check_training() -> None:
    """Train layers on three hosts and compare the losses with those of one process."""
    x, weight, other = torch.randn(8, 5), torch.randn(5, 6), torch.randn(6, 4)
    local_layer = nn.Parameter(weight.clone())
    remote_net = rpc.remote(1, Net, (other, 2))
    references = [rpc.RRef(local_layer), *remote_net.rpc_sync().parameter_rrefs()]
    optimizer = rpc.DistributedOptimizer(torch.optim.SGD, references, 0.1, momentum=0.9)
    losses = []
    for _ in range(4):
        loss = remote_net.rpc_sync().forward(torch.tanh(x @ local_layer)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == pytest.approx(train_in_one_process(x, weight, other, 4), rel=1e-5)


def run_all() -> str:
    rank = rpc.get_worker_info().id
    if rank == 0:
        check_values()
        check_training()
    rpc.shutdown(timeout=60)
    return "left"


@pytest.mark.slow
def test_three_hosts(ranks: RankServer, network: Network) -> None:
    for each in start(ranks, network, "abca", run_all).join():
        assert each.value == "left"


def send_large() -> None:
    """Send more than fits into a frame."""
    if rpc.get_worker_info().id == 0:
        data = torch.arange(LARGER_THAN_A_FRAME // 4, dtype=torch.int32)
        assert rpc.rpc_sync(1, torch.sum, (data,)) == data.sum()
        with_gaps = torch.zeros(2**27)[::3]
        with (
            limit_address_space(with_gaps.nbytes // 2),
            pytest.raises(PhalanxError, match=r"not enough memory to send a tensor of \(\d+,\)"),
        ):
            rpc.rpc_sync(1, echo, (with_gaps,))
    rpc.shutdown(timeout=60)


@pytest.mark.slow
def test_more_than_a_frame(ranks: RankServer, network: Network) -> None:
    for each in start(ranks, network, "ab", send_large).join():
        assert each.value is None


# ---- dead hosts and workers ----


def check_loss(victim: int) -> bool:
    """Check that all pending and later calls to the victim name it as lost."""
    rank = rpc.get_worker_info().id
    if rank == victim:
        time.sleep(60)
    pattern = NAMED.format(victim, victim)
    box = rpc.remote(victim, dict)
    box.to_here()
    futures = [rpc.rpc_async(victim, time.sleep, (60,)) for _ in range(3)]
    file(f"ready-{rank}").touch()
    with pytest.raises(PeerLost, match=pattern):
        rpc.rpc_sync(victim, time.sleep, (60,), timeout=0)
    for future in futures:
        with pytest.raises(PeerLost, match=pattern):
            future.wait()
    for call in (box.to_here, lambda: rpc.rpc_sync(victim, echo, (1,))):
        with pytest.raises(PeerLost, match=pattern):
            call()
    # The other workers still work.
    assert rpc.rpc_sync(1 - rank, echo, (5,)) == 5
    file(f"done-{rank}").touch()
    wait_for(lambda: all(file(f"done-{each}").exists() for each in range(3) if each != victim))
    with pytest.raises(PeerLost, match="worker 'worker-"):
        rpc.shutdown(timeout=20)
    return True


def all_ready(run: RunningRanks) -> bool:
    return all((Path(run.folder) / f"ready-{rank}").exists() for rank in (0, 1))


def survivor_exits(run: RunningRanks) -> list[RankOutcome]:
    return [each for each in run.join() if each.rank != 2]


def test_killed_worker(ranks: RankServer, network: Network) -> None:
    run = start(ranks, network, "abc", check_loss, 2)
    wait_for(lambda: all_ready(run))
    run.signal(2, signal.SIGKILL)
    for each in survivor_exits(run):
        assert each.value


@pytest.mark.slow
def test_vanished_host(ranks: RankServer, network: Network) -> None:
    """The host vanishes without notification; only missing heartbeats reveal that."""
    run = start(ranks, network, "abc", check_loss, 2)
    wait_for(lambda: all_ready(run))
    network.disconnect(2)
    try:
        assert not run.wait(60, (0, 1))
    finally:
        network.reconnect(2)
        run.signal(2, signal.SIGKILL)
    for each in survivor_exits(run):
        assert each.value
