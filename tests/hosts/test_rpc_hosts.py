"""Calls of `phalanx.rpc` between hosts that share nothing but a network."""

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
from phalanx.rpc.current_agent import agent
from tests.networks import Network, enter
from tests.ranks import RankOutcome, RankServer, RunningRanks
from tests.rpc_training import little_address_space
from tests.waiting import wait_for

MISSING = [what for what in ("ip", "tc", "unshare") if shutil.which(what) is None]
REASON = f"needs root, iproute2 and util-linux (missing: {MISSING}, user {os.geteuid()})"
NAMED = r"worker 'worker-{}' \(id {}, pid \d+ on \S+\)"
# Nothing, an element, just too large for a message's own frame, what is read in many parts.
SIZES = (0, 1, 4097, 5_000_000)
LARGER_THAN_A_FRAME = 300_000_000


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if MISSING or os.geteuid() != 0:
        # CI has them: there they must not be left out.
        (pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip)(REASON)
    with Network(3) as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    ranks.preload("phalanx.rpc")


def start(ranks: RankServer, network: Network, hosts: str, *what: Any) -> RunningRanks:
    """Start workers, each on the host of its letter, which meet at the first one's."""
    places = [ord(letter) - ord("a") for letter in hosts]
    return ranks.start(
        len(hosts), on_a_host, network.names, network.addresses, places, *what, timeout=None
    )


def on_a_host(
    names: list[str], addresses: list[str], places: list[int], function: Any, *arguments: Any
) -> Any:
    rank = int(os.environ["RANK"])
    enter(names[places[rank]])
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = addresses[places[0]], "29531"
    rpc.init_rpc(f"worker-{rank}", timeout=30)
    near = [peer.is_local for peer in agent().peers]
    assert near == [place == places[rank] for place in places]
    return function(*arguments)


def told(name: str) -> Path:
    return Path(os.environ["FOLDER"], name)


# ---- functions that are called ----


def echo(value: Any) -> Any:
    return value


def around(depth: int) -> int:
    here = rpc.get_worker_info().id
    to = (here + 1) % len(rpc.get_worker_infos())
    return 1 + int(rpc.rpc_sync(to, around, (depth - 1,))) if depth else 0


class Net(nn.Module):
    """A layer, and a call further."""

    def __init__(self, weight: Tensor, further: int | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.further = further

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight)
        return y if self.further is None else rpc.rpc_sync(self.further, torch.sin, (y,))

    def parameters_of_it(self) -> list[Any]:
        return [rpc.RRef(each) for each in self.parameters()]


def trained(x: Tensor, weight: Tensor, other: Tensor, steps: int) -> list[float]:
    """What one process gets."""
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


# ---- all is well ----


def values() -> None:
    for to in range(1, 4):
        assert rpc.rpc_sync(to, echo, (to,)) == to
        futures = [rpc.rpc_async(to, echo, (number,)) for number in range(100)]
        assert torch.futures.wait_all(futures) == list(range(100))
        for size in SIZES:
            data = torch.randint(0, 256, (size,), dtype=torch.uint8)
            assert torch.equal(rpc.rpc_sync(to, echo, (data,)), data)
            assert torch.equal(rpc.rpc_async(to, echo, (data,)).wait(), data)
        views = [torch.randn(300, 401)[::3, 5:].t(), torch.randn(7)[3].expand(5000)]
        come = rpc.rpc_sync(to, echo, (views,))
        assert all(map(torch.equal, come, views))
        # What isn't a tensor has no other way than the pickle.
        text = os.urandom(1_000_000)
        assert rpc.rpc_sync(to, echo, (text,)) == text
        box = rpc.remote(to, dict, ({"a": 1},))
        assert box.rpc_sync().get("a") == 1
        assert rpc.rpc_sync(3 - to % 3, rpc.RRef.to_here, (box,)) == {"a": 1}
    assert around(12) == 12
    with pytest.raises(KeyError, match="far"):
        rpc.rpc_sync(2, {}.__getitem__, ("far",))
    with pytest.raises(CallTimeout):
        rpc.rpc_sync(2, time.sleep, (0.3,), timeout=0.1)


def train() -> None:
    """One layer on another host, one here, one further away: losses as those of one process."""
    x, weight, other = torch.randn(8, 5), torch.randn(5, 6), torch.randn(6, 4)
    mine = nn.Parameter(weight.clone())
    there = rpc.remote(1, Net, (other, 2))
    references = [rpc.RRef(mine), *there.rpc_sync().parameters_of_it()]
    optimizer = rpc.DistributedOptimizer(torch.optim.SGD, references, 0.1, momentum=0.9)
    losses = []
    for _ in range(4):
        loss = there.rpc_sync().forward(torch.tanh(x @ mine)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == pytest.approx(trained(x, weight, other, 4), rel=1e-5)


def all_is_well() -> str:
    rank = rpc.get_worker_info().id
    if rank == 0:
        values()
        train()
    rpc.shutdown(timeout=60)
    return "left"


def test_three_hosts(ranks: RankServer, network: Network) -> None:
    for end in start(ranks, network, "abca", all_is_well).join():
        assert end.value == "left"


def large() -> None:
    """More than one frame takes."""
    if rpc.get_worker_info().id == 0:
        data = torch.arange(LARGER_THAN_A_FRAME // 4, dtype=torch.int32)
        assert rpc.rpc_sync(1, torch.sum, (data,)) == data.sum()
        with_gaps = torch.zeros(2**27)[::3]
        with (
            little_address_space(with_gaps.nbytes // 2),
            pytest.raises(PhalanxError, match=r"no room for a tensor of \(\d+,\)"),
        ):
            rpc.rpc_sync(1, echo, (with_gaps,))
    rpc.shutdown(timeout=60)


def test_more_than_a_frame(ranks: RankServer, network: Network) -> None:
    for end in start(ranks, network, "ab", large).join():
        assert end.value is None


# ---- hosts and workers that are gone ----


def mourn(victim: int, limit: float) -> str:
    """All that waits for the victim, and all that is asked of it later, says who is lost."""
    rank = rpc.get_worker_info().id
    if rank == victim:
        time.sleep(60)
    words = NAMED.format(victim, victim)
    box = rpc.remote(victim, dict)
    box.to_here()
    futures = [rpc.rpc_async(victim, time.sleep, (60,)) for _ in range(3)]
    told(f"ready-{rank}").touch()
    with pytest.raises(PeerLost, match=words):
        rpc.rpc_sync(victim, time.sleep, (60,), timeout=0)
    seconds = time.time() - float(told("gone").read_text())
    assert seconds < limit
    for future in futures:
        with pytest.raises(PeerLost, match=words):
            future.wait()
    for later in (box.to_here, lambda: rpc.rpc_sync(victim, echo, (1,))):
        with pytest.raises(PeerLost, match=words):
            later()
    # The others go on without it.
    assert rpc.rpc_sync(1 - rank, echo, (5,)) == 5
    told(f"over-{rank}").touch()
    wait_for(lambda: all(told(f"over-{each}").exists() for each in range(3) if each != victim))
    with pytest.raises(PeerLost, match="worker 'worker-"):
        rpc.shutdown(timeout=20)
    return f"{seconds:.1f}"


def everybody_waits(run: RunningRanks) -> bool:
    return all((Path(run.folder) / f"ready-{rank}").exists() for rank in (0, 1))


def mourners(run: RunningRanks) -> list[RankOutcome]:
    return [end for end in run.join() if end.rank != 2]


def test_a_killed_worker(ranks: RankServer, network: Network) -> None:
    run = start(ranks, network, "abc", mourn, 2, 15.0)
    wait_for(lambda: everybody_waits(run))
    (Path(run.folder) / "gone").write_text(repr(time.time()))
    run.signal(2, signal.SIGKILL)
    for end in mourners(run):
        assert end.value


def test_a_host_that_disappears(ranks: RankServer, network: Network) -> None:
    """Nobody is told: only what doesn't come any more tells."""
    run = start(ranks, network, "abc", mourn, 2, 25.0)
    wait_for(lambda: everybody_waits(run))
    (Path(run.folder) / "gone").write_text(repr(time.time()))
    network.cut(2)
    try:
        assert not run.wait(40, (0, 1))
    finally:
        network.mend(2)
        run.signal(2, signal.SIGKILL)
    for end in mourners(run):
        assert end.value
