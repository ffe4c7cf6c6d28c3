"""LocalSGD and DiLoCo in a training whose ranks come and go, against each other bit for bit."""

from __future__ import annotations

import copy
import hashlib
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import phalanx
from phalanx.errors import RankExcluded, UsageError
from phalanx.parallel import DiLoCo, LocalSGD
from phalanx.parallel.local_sgd.fragment import Fragment, Report
from phalanx.train import Elastic
from phalanx.train import elastic as elastic_module
from tests.fault.test_shrink import die
from tests.ports import find_free_port
from tests.ranks import RankServer, marker_file, wait_for_file
from tests.waiting import wait_for

MOMENTS = (
    "in a step",
    "before the exchange",
    "in the exchange",
    "after the exchange",
    "before the last exchange",
)
STEPS = 30


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    """Each rank would import it for its optimizer, which takes most of the time of a test."""
    ranks.preload("torch._dynamo")


def number() -> int:
    """The number of this process among those of the test; the last ones are newcomers."""
    return int(os.environ["RANK"])


def init(rank: int, size: int) -> None:
    dist.init_process_group(
        "phalanx",
        init_method=f"file://{os.environ['FOLDER']}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )


def make_model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 4000), nn.ReLU(), nn.Linear(4000, 3))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs = torch.randn(8, 6, generator=generator)
    loss = nn.functional.mse_loss(model(inputs), inputs[:, :3].sin())
    loss.backward()  # type: ignore[no-untyped-call]


def digest(optimizer: LocalSGD) -> str:
    return hashlib.sha256(flat_common(optimizer).numpy().tobytes()).hexdigest()


def flat_common(optimizer: LocalSGD) -> torch.Tensor:
    return torch.cat([each.outer.detach() for each in optimizer._fragments])


def record_exchanges(optimizer: LocalSGD) -> None:
    """Write a digest of the common parameters after each exchange."""
    finish = optimizer._finish

    def recording_finish(fragment: Fragment) -> list[Report]:
        reports = finish(fragment)
        name = f"exchange.{optimizer.exchanges}.{number()}"
        marker_file(name).write_text(digest(optimizer))
        return reports

    optimizer._finish = recording_finish  # type: ignore[method-assign]


def check_exchanges(folder: Path, least: int, lost: Sequence[int] = (1,)) -> None:
    """All ranks had the same common parameters after each exchange.

    A lost rank may have finished its last one before the others, which then repeat it without it.
    """
    digests: dict[int, dict[int, str]] = defaultdict(dict)
    for path in Path(folder).glob("exchange.*"):
        _, exchange, rank = path.name.split(".")
        digests[int(exchange)][int(rank)] = path.read_text()
    assert len(digests) >= least
    for rank in lost:
        finished = [exchange for exchange, each in digests.items() if rank in each]
        if finished:
            digests[max(finished)].pop(rank)
    differing = {key: each for key, each in digests.items() if len(set(each.values())) > 1}
    assert not differing


def die_in_exchange(moment: str, may_die: Callable[[str], None]) -> None:
    begin, wait = Fragment.begin, Fragment.wait

    def dying_begin(fragment: Fragment, *arguments: Any, **options: Any) -> None:
        may_die("before the exchange")
        begin(fragment, *arguments, **options)
        may_die("in the exchange")

    def dying_wait(fragment: Fragment, completed: int) -> list[Report]:
        reports = wait(fragment, completed)
        may_die("after the exchange")
        return reports

    if moment != "in a step":
        Fragment.begin, Fragment.wait = dying_begin, dying_wait  # type: ignore[assignment, method-assign]


def train(size: int, moment: str, options: dict[str, Any], wait: float) -> Any:
    """Train; rank 1 dies once. A process beyond `size` is a newcomer that takes its place."""
    rank = number()
    if rank >= size:
        wait_for_file("dying", 60)
        os.environ["PHALANX_NEWCOMER"] = "1"
        rank = 1
    init(rank, size)
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = DiLoCo(inner, 4, elastic=True, **options)
    record_exchanges(optimizer)

    def may_die(now: str) -> None:
        least = STEPS if "last" in moment else 7
        if now == moment.replace("last ", "") and number() == 1 and optimizer.completed >= least:
            marker_file("dying").touch()
            die()

    die_in_exchange(moment, may_die)
    for step in Elastic(model, optimizer, STEPS, wait=wait):
        with step:
            optimizer.zero_grad()
            backward(step.model, step.number)
            may_die("in a step")
            optimizer.step()
    moments = torch.cat([each["exp_avg"].flatten() for each in inner.state.values()])
    of_host = [moments.clone() for _ in range(dist.get_world_size(optimizer.host_group))]
    dist.all_gather(of_host, moments, group=optimizer.host_group)
    assert all(torch.equal(each, moments) for each in of_host)
    assert torch.equal(flat(model), flat_common(optimizer))
    result = dist.get_world_size(), optimizer.completed, digest(optimizer)
    dist.barrier()
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("hosts", ("abc", "abcb", "aab"))
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("is_replaced", (True, False))
def test_a_rank_is_lost(ranks: RankServer, moment: str, hosts: str, is_replaced: bool) -> None:
    size = len(hosts)
    newcomers = hosts[1] if is_replaced else ""
    run = ranks.start(
        size + len(newcomers),
        *(train, size, moment, {}, 60.0 if is_replaced else 0.0),
        timeout=None,
        hosts=hosts + newcomers,
    )
    ended = run.join()
    codes = [-signal.SIGKILL if rank == 1 else 0 for rank in range(size + len(newcomers))]
    assert [each.code for each in ended] == codes, [each.report() for each in ended]
    values = {each.value for each in ended if each.code == 0}
    assert {value[:2] for value in values} == {(size - 1 + len(newcomers), STEPS)}
    assert len(values) == 1
    check_exchanges(run.folder, 7)


@pytest.mark.parametrize(
    "options",
    (
        {"overlap": 2},
        {"overlap": 2, "fragments": 3, "compress": "int8"},
        {"early": True},
        {"unit": "rank"},
    ),
    ids=str,
)
def test_a_rank_is_lost_with_options(ranks: RankServer, options: dict[str, Any]) -> None:
    run = ranks.start(4, train, 3, "in the exchange", options, 60.0, timeout=None, hosts="abcb")
    ended = run.join()
    codes = [0, -signal.SIGKILL, 0, 0]
    assert [each.code for each in ended] == codes, [each.report() for each in ended]
    assert len({each.value for each in ended if each.code == 0}) == 1
    check_exchanges(run.folder, 3)


def joins(size: int, lost: Sequence[int], options: dict[str, Any]) -> Any:
    """Ranks are replaced; newcomers do not receive the state before others have made a step."""
    rank = number()
    if rank >= size:
        wait_for_file("dying", 60)
        os.environ["PHALANX_NEWCOMER"] = "1"
        rank = lost[rank - size]
    init(rank, size)
    receive = elastic_module.receive_tree

    def receive_later(*arguments: Any) -> Any:
        wait_for_file("continued", 60)
        return receive(*arguments)

    elastic_module.receive_tree = receive_later
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = DiLoCo(inner, 4, elastic=True, **options)
    record_exchanges(optimizer)
    hosts = None
    for step in Elastic(model, optimizer, STEPS, wait=60.0):
        with step:
            hosts = hosts or optimizer.hosts
            optimizer.zero_grad()
            backward(step.model, step.number)
            if number() in lost and step.number == 9:
                marker_file("dying").touch()
                die()
            if number() < size and optimizer.hosts is not hosts:  # the ranks have changed
                marker_file("continued").touch()
            optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    return optimizer.completed, digest(optimizer)


@pytest.mark.parametrize(
    "options",
    ({}, {"overlap": 2}, {"overlap": 1, "fragments": 2}, {"early": True}),
    ids=str,
)
@pytest.mark.parametrize(
    ("size", "lost", "hosts"),
    ((3, [1], "abcb"), (3, [1], "abca"), (3, [1], "aaba"), (4, [1, 2], "abbcbb")),
)
def test_a_newcomer_gets_its_state_in_the_background(
    ranks: RankServer, options: dict[str, Any], size: int, lost: list[int], hosts: str
) -> None:
    """On a host of its own, on that of another rank, or with another newcomer."""
    run = ranks.start(len(hosts), joins, size, lost, options, timeout=None, hosts=hosts)
    ended = run.join()
    codes = [-signal.SIGKILL if rank in lost else 0 for rank in range(len(hosts))]
    assert [each.code for each in ended] == codes, [each.report() for each in ended]
    values = {each.value for each in ended if each.code == 0}
    assert len(values) == 1
    assert values.pop()[0] == STEPS
    check_exchanges(run.folder, 3, lost)


def joins_with(options: dict[str, Any], words: str) -> int:
    is_newcomer = number() == 3
    if is_newcomer:
        wait_for_file("dying", 60)
        os.environ["PHALANX_NEWCOMER"] = "1"
    init(1 if is_newcomer else number(), 3)
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given = {"every": 4, **(options if is_newcomer else {})}
    optimizer = DiLoCo(inner, elastic=True, **given)
    loop = Elastic(model, optimizer, STEPS, wait=4.0)
    if is_newcomer:
        with pytest.raises(UsageError, match=words):
            next(iter(loop))
        os._exit(0)
    for step in loop:
        with step:
            optimizer.zero_grad()
            backward(step.model, step.number)
            if number() == 1 and step.number == 9:
                marker_file("dying").touch()
                die()
            optimizer.step()
    size = dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    return size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({"every": 5}, "DiLoCo: rank 1 has every 5, rank [02] 4: give"),
        ({"compress": "int8"}, "rank 1 has compress 'int8', rank [02] ''"),
        ({"unit": "rank"}, "rank 1 has unit 'rank', rank [02] 'host'"),
        ({"momentum": 0.5}, "rank 1 has outer optimizer"),
    ),
    ids=str,
)
def test_a_newcomer_with_other_options_ends_alone(
    ranks: RankServer, options: dict[str, Any], words: str
) -> None:
    """It is compared with a rank that has the state; if rank 0's last exchange failed, with 2."""
    ended = ranks.start(4, joins_with, options, words, timeout=None, hosts="abcb").join()
    assert [each.code for each in ended] == [0, -signal.SIGKILL, 0, 0], [
        each.report() for each in ended
    ]
    assert [ended[rank].value for rank in (0, 2)] == [2, 2]


def is_stopped() -> int:
    """Rank 1 is stopped between two exchanges; the others wait for it until the timeout."""
    init(number(), 3)
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=5))
    model = make_model()
    optimizer = DiLoCo(torch.optim.SGD(model.parameters(), lr=1e-3), 4, elastic=True)
    try:
        for step in Elastic(model, optimizer, STEPS, wait=0):
            with step:
                optimizer.zero_grad()
                backward(model, step.number)
                if number() == 1 and step.number == 9:
                    marker_file("stopping").touch()
                    os.kill(os.getpid(), signal.SIGSTOP)
                optimizer.step()
    except RankExcluded:
        return -1
    size = dist.get_world_size()
    dist.barrier()
    marker_file(f"done.{number()}").touch()
    dist.destroy_process_group()
    return size


@pytest.mark.slow
def test_a_stopped_host_is_left_behind(ranks: RankServer) -> None:
    run = ranks.start(3, is_stopped, timeout=None, hosts="abc")
    wait_for(lambda: all(Path(run.folder, f"done.{each}").exists() for each in (0, 2)))
    os.kill(run.pids[1], signal.SIGCONT)
    assert [each.value for each in run.join()] == [2, -1, 2]


def loads_parameters() -> None:
    """Parameters that are loaded after the optimizer was constructed are those of the training."""
    init(number(), 2)
    model = make_model()
    optimizer = DiLoCo(torch.optim.SGD(model.parameters(), lr=0.0), 2, elastic=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5 + number())
    for step in Elastic(model, optimizer, 3):
        with step:
            optimizer.zero_grad()
            backward(model, step.number)
            optimizer.step()
    assert (flat(model) == 0.5).all()
    dist.destroy_process_group()


@pytest.mark.parametrize("hosts", ("aa", "ab"))
def test_parameters_that_are_loaded_late(ranks: RankServer, hosts: str) -> None:
    ended = ranks.start(2, loads_parameters, timeout=None, hosts=hosts).join()
    assert [each.code for each in ended] == [0, 0], [each.report() for each in ended]


def starts_from_a_checkpoint() -> list[int]:
    """Rank 0 has loaded a checkpoint, as a host 0 that was started again; others get its state."""
    init(number(), 2)

    def train_until(steps: int, state: Any) -> tuple[list[int], Any]:
        model = make_model()
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = DiLoCo(inner, 4, elastic=True)
        if state is not None:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        seen = []
        for step in Elastic(model, optimizer, steps):
            with step:
                seen.append(step.number)
                optimizer.zero_grad()
                backward(model, step.number)
                optimizer.step()
        found: list[Any] = [None, None]
        dist.all_gather_object(found, digest(optimizer))
        assert found[0] == found[1]
        return seen, copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    _, state = train_until(8, None)
    seen, _ = train_until(12, state if number() == 0 else None)
    dist.destroy_process_group()
    return seen


def test_the_state_of_rank_0_is_that_of_the_start(ranks: RankServer) -> None:
    ended = ranks.start(2, starts_from_a_checkpoint, timeout=None, hosts="ab").join()
    assert [each.value for each in ended] == [[8, 9, 10, 11]] * 2


def is_interrupted(port: int) -> int:
    """Ctrl-C ends rank 1, which leaves its session in order; the others continue."""
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    with phalanx.init(timeout=60):
        model = make_model()
        optimizer = DiLoCo(torch.optim.SGD(model.parameters(), lr=1e-3), 4, elastic=True)
        for step in Elastic(model, optimizer, STEPS, wait=0):
            with step:
                optimizer.zero_grad()
                backward(model, step.number)
                if number() == 1 and step.number == 9:
                    raise KeyboardInterrupt
                optimizer.step()
        dist.barrier()
        return dist.get_world_size()


def test_ctrl_c_on_one_host(ranks: RankServer) -> None:
    run = ranks.start(3, is_interrupted, find_free_port(), timeout=None, hosts="abc")
    ended = run.join()
    assert ended[1].code != 0
    assert [ended[rank].value for rank in (0, 2)] == [2, 2]


def notices() -> int:
    """A loss is noticed between two exchanges, which are hours apart."""
    init(number(), 3)
    model = make_model()
    optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=1e-3), 1_000_000, elastic=True)
    elastic = Elastic(model, optimizer, 1_000_000, wait=0)
    end = time.monotonic() + 30
    for step in elastic:
        with step:
            optimizer.zero_grad()
            backward(model, step.number)
            if number() == 2 and step.number == 3:
                die()
            optimizer.step()
            if dist.get_world_size() == 2:
                break
            assert time.monotonic() < end, "the loss was not noticed"
    optimizer.synchronize()
    assert optimizer.exchanges == 1
    dist.barrier()
    dist.destroy_process_group()
    return optimizer.completed


@pytest.mark.parametrize("hosts", ("abc", "aab"))
def test_a_loss_between_exchanges(ranks: RankServer, hosts: str) -> None:
    ended = ranks.start(3, notices, timeout=None, hosts=hosts).join()
    codes = [0, 0, -signal.SIGKILL]
    assert [each.code for each in ended] == codes, [each.report() for each in ended]


def begins_before_the_loop() -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.raises(UsageError, match="Elastic: a LocalSGD without elastic=True given"):
        Elastic(model, LocalSGD(inner, 4), 3)
    optimizer = DiLoCo(torch.optim.SGD(model.parameters(), lr=1e-3), 4, elastic=True)
    with pytest.raises(UsageError, match="a step came before the training"):
        optimizer.step()
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(UsageError, match=r"a scheduler was made for a DiLoCo.* step\.number"):
        next(iter(Elastic(model, optimizer, 3)))
    with pytest.raises(UsageError, match="elastic=True with a group given"):
        LocalSGD(inner, 4, elastic=True, group=dist.group.WORLD)


def test_wrong_use(ranks: RankServer) -> None:
    ranks.run(2, begins_before_the_loop, hosts="ab")
