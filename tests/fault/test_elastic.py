"""A training that continues when ranks are lost, against the same training without a loss."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import phalanx
from phalanx.errors import PeerLost, PhalanxError, UsageError
from phalanx.parallel import SharedDataParallel, average_gradients
from phalanx.parallel.shared_data_parallel import optimizer as sharded_optimizer
from phalanx.parallel.shared_data_parallel.journal import Journal
from phalanx.parallel.shared_data_parallel.memory import HostMemory
from phalanx.train import Elastic, Trainer, recovery
from phalanx.train.replicas import Replicas
from phalanx.train.state import TrainingState
from tests.fault.test_shrink import HOSTS, die
from tests.ranks import RankServer, marker_file, wait_for_file

STEPS = 12
MOMENTS = ("before", "in backward", "after the average", "after the step")
UPDATE_MOMENTS = (
    "before the publication",
    "before the update",
    "in the update",
    "after the update",
)
"""Moments in the optimizer's step of SharedDataParallel."""


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    """Each rank would import it for its optimizer, which takes most of the time of a test."""
    ranks.preload("torch._dynamo")


@pytest.fixture(scope="module")
def undisturbed(ranks: RankServer) -> Callable[..., Any]:
    """Return a function that returns what rank 0 returns without a loss, from one run of a kind."""

    @functools.cache
    def run(task: Callable[..., Any], kind: str, hosts: str = "") -> Any:
        arguments = (kind, 60.0) if task is train else ("undisturbed", kind)
        return ranks.run(3, task, 3, {}, *arguments, timeout=None, hosts=hosts)[0]

    return run


def number() -> int:
    """The number of this process among those of the test; the last ones are newcomers."""
    return int(os.environ["RANK"])


def make_model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 600), nn.Dropout(0.2), nn.ReLU(), nn.Linear(600, 3))


def make_batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)


def init(rank: int, size: int) -> None:
    dist.init_process_group(
        "phalanx",
        init_method=f"file://{os.environ['FOLDER']}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )


def make_wrapped(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return the model, its optimizer and the wrapper of a training with DDP, or another kind."""
    model = make_model()
    if kind != "shared":
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return model, optimizer, DistributedDataParallel if kind == "ddp" else None
    shared = SharedDataParallel(model, elastic=True)
    return shared, shared.optimizer(torch.optim.Adam, lr=0.01), None


def die_in_update(may_die: Callable[[str], None]) -> None:
    """Let `may_die` end this process around the update of its second chunk, half of it written."""
    sharded_optimizer.CHUNK_BYTES = 2048
    publish, save, mark_updated = HostMemory.publish, Journal.save, Journal.mark_updated

    def dying_publish(memory: HostMemory, slices: Any) -> None:
        may_die("before the publication")
        publish(memory, slices)

    def dying_save(journal: Journal, chunk: int) -> None:
        if chunk == 0:
            may_die("before the update")
        save(journal, chunk)
        if chunk == 1:
            current = journal._own_pieces[chunk][0]
            values = [each.clone() for each in current]
            for each in current:
                each.view(torch.uint8)[: each.nbytes // 2].fill_(0xA5)
            may_die("in the update")
            torch._foreach_copy_(current, values)

    def dying_mark(journal: Journal, chunk: int) -> None:
        mark_updated(journal, chunk)
        if chunk == len(journal.chunks[dist.get_rank() % len(journal.chunks)]) - 1:
            may_die("after the update")

    HostMemory.publish = dying_publish  # type: ignore[method-assign]
    Journal.save, Journal.mark_updated = dying_save, dying_mark  # type: ignore[method-assign]


def train(size: int, deaths: dict[int, tuple[int, str]], kind: str, wait: float) -> Any:
    """Train, with a death of a rank in some steps; return the parameters.

    `deaths` has the rank and the moment by step. The processes beyond `size` are newcomers, one for
    each death.
    """
    rank, generation = number(), max(number() - size + 1, 0)
    own_deaths = dict(list(deaths.items())[generation:])
    if generation:
        victim = list(deaths.values())[generation - 1][0]
        wait_for_file(f"death{generation}", 60)
        os.environ["PHALANX_NEWCOMER"] = "1"
        rank = victim
    init(rank, size)
    model, optimizer, wrap = make_wrapped(kind)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    current = 0

    def may_die(step: int, moment: str) -> None:
        if own_deaths.get(step) == (dist.get_rank(), moment):
            count = 1 + list(deaths).index(step)
            marker_file(f"death{count}").touch()
            die()

    if kind == "shared":
        die_in_update(lambda moment: may_die(current, moment))
    for step in Elastic(model, optimizer, STEPS, wrap=wrap, state=[scheduler], seed=3, wait=wait):
        with step:
            current = step.number
            may_die(step.number, "before")
            inputs, labels = make_batch(step.number, dist.get_rank())
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(step.model(inputs), labels)
            if own_deaths.get(step.number) == (dist.get_rank(), "in backward"):
                list(model.parameters())[-1].register_hook(
                    lambda _gradient, number=step.number: may_die(number, "in backward")
                )
            loss.backward()
            if kind == "plain":
                average_gradients(model)
            may_die(step.number, "after the average")
            optimizer.step()
            scheduler.step()
            with torch.no_grad():
                for each in model.parameters():
                    each.clamp_(-0.35, 0.35)
            may_die(step.number, "after the step")
    size_at_end = dist.get_world_size()
    dist.destroy_process_group()
    return size_at_end, [each.detach().clone() for each in model.parameters()]


def check(ended: list[Any], deaths: int, size: int, expected: list[torch.Tensor]) -> None:
    assert sorted(each.code for each in ended) == [-signal.SIGKILL] * deaths + [0] * size, (
        "\n".join(each.report() for each in ended if each.code != -signal.SIGKILL)
    )
    for each in ended:
        if each.code == 0:
            world_size, parameters = each.value
            assert world_size == size
            for one, other in zip(parameters, expected, strict=True):
                assert torch.equal(one, other), f"rank {each.rank} differs"


VICTIMS = {"": (1, 0, 2, 1), "aab": (0, 0, 2, 0), "abc": (0, 1, 2, 0)}
"""Each newcomer is on the host of its victim, so that sums over hosts are rounded alike. With "aab"
one rank of each host has slices of a SharedDataParallel."""
KINDS_AND_MOMENTS = [
    *((kind, moment) for kind in ("plain", "ddp", "shared") for moment in MOMENTS),
    *(("shared", moment) for moment in UPDATE_MOMENTS),
]


@HOSTS
@pytest.mark.parametrize(("kind", "moment"), KINDS_AND_MOMENTS)
def test_replaced_ranks_do_not_change_the_result(
    ranks: RankServer, undisturbed: Callable[..., Any], kind: str, moment: str, hosts: str
) -> None:
    size = 3
    expected = undisturbed(train, kind, hosts)[1]
    deaths = {step: (rank, moment) for step, rank in zip((0, 4, 7, 8), VICTIMS[hosts], strict=True)}
    run = ranks.start(
        size + len(deaths), train, size, deaths, kind, 60.0, timeout=None, hosts=hosts
    )
    check(run.join(), len(deaths), size, expected)


@pytest.mark.parametrize(
    ("kind", "moment"), [("plain", "before"), ("shared", "before"), ("shared", "in the update")]
)
def test_the_training_continues_with_fewer_ranks(ranks: RankServer, kind: str, moment: str) -> None:
    size, deaths = 3, {5: (2, moment)}
    ended = ranks.start(size, train, size, deaths, kind, 0.0, timeout=None).join()
    assert [each.code for each in ended] == [0, 0, -signal.SIGKILL], ended[0].report()
    (world_size, one), (_, other) = ended[0].value, ended[1].value
    assert world_size == 2
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def stops_in_its_update() -> None:
    """Rank 1 is stopped until the timeout: nobody else may complete what it can still write."""
    rank, step_number = number(), 0
    init(rank, 2)
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=5))
    model, optimizer, _ = make_wrapped("shared")

    def may_stop(moment: str) -> None:
        if (rank, step_number, moment) == (1, 2, "in the update"):
            marker_file("stopped").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

    def loop() -> None:
        nonlocal step_number
        for step in Elastic(model, optimizer, STEPS, wait=0):
            with step:
                step_number = step.number
                inputs, labels = make_batch(step.number, rank)
                optimizer.zero_grad()
                nn.functional.cross_entropy(step.model(inputs), labels).backward()
                optimizer.step()

    die_in_update(may_stop)
    words = "was excluded from the group" if rank else "no rank has the whole state"
    with pytest.raises(PhalanxError, match=words):
        loop()
    assert rank or step_number == 2
    if rank == 0:
        os.kill(int(marker_file("stopped").read_text()), signal.SIGCONT)


@pytest.mark.slow
def test_a_rank_is_stopped_in_its_update(ranks: RankServer) -> None:
    ranks.run(2, stops_in_its_update, timeout=None)


# ---- the trainer ----

SAMPLES, BATCH = 70, 12  # six steps in an epoch, the last with 10 samples
TRAINER_MOMENTS = ("in the loss", "after the step", "in the evaluation", "in a save")


def fit(size: int, losses: dict[int, tuple[int, str]], folder: str, kind: str) -> Any:
    """Train with the trainer, with the loss of a rank in some steps; return what it returns."""
    rank, generation = number(), max(number() - size + 1, 0)
    own_losses = dict(list(losses.items())[generation:])
    if generation:
        rank = list(losses.values())[generation - 1][0]
        wait_for_file(f"death{generation}", 60)
        os.environ["PHALANX_NEWCOMER"] = "1"
    init(rank, size)

    def may_die(moment: str) -> None:
        step = trainer.result.step
        if own_losses.get(step) == (dist.get_rank(), moment):
            marker_file(f"death{1 + list(losses).index(step)}").touch()
            die()

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
        may_die("in the loss" if model.training else "in the evaluation")
        outputs = model(batch[0])
        return nn.functional.mse_loss(outputs, batch[1]), {"mean": outputs.mean()}

    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    data = TensorDataset(inputs, inputs[:, :3].sin())
    model, optimizer, _ = make_wrapped(kind)
    if kind == "shared":
        die_in_update(may_die)
    trainer = Trainer(
        model,
        optimizer,
        data,
        loss,
        global_batch=BATCH,
        epochs=3,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        evaluate=data,
        checkpoints=Path(os.environ["FOLDER"]) / folder,
        checkpoint_every=2,
        on_step=lambda _step, _means: may_die("after the step"),
        progress=False,
        elastic=True,
    )
    capture = TrainingState.capture

    def dying_capture(state: TrainingState, progress: Any) -> Any:
        may_die("in a save")
        return capture(state, progress)

    TrainingState.capture = dying_capture  # type: ignore[method-assign]
    result = trainer.fit()
    dist.destroy_process_group()
    return result, [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        *((kind, moment) for kind in ("plain", "shared") for moment in TRAINER_MOMENTS),
        ("shared", "in the update"),
    ],
)
def test_a_trainer_with_replaced_ranks(
    ranks: RankServer, undisturbed: Callable[..., Any], kind: str, moment: str
) -> None:
    size = 3
    expected = undisturbed(fit, kind)
    # Step 6 is the end of an epoch, with an evaluation.
    losses = {6: (1, moment), 12: (0, moment)}
    run = ranks.start(size + len(losses), fit, size, losses, "disturbed", kind, timeout=None)
    for each in (ended := run.join()):
        assert each.code in (0, -signal.SIGKILL), each.report()
        if each.code == 0:
            assert each.value[0] == expected[0]
            for one, other in zip(each.value[1], expected[1], strict=True):
                assert torch.equal(one, other), f"rank {each.rank} differs"
    assert sum(each.code == 0 for each in ended) == size


def needs_more_ranks() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        for step in Elastic(model, optimizer, STEPS, min_ranks=2, wait=0.0):
            with step:
                if dist.get_rank() == 1:
                    die()
                dist.barrier()
                optimizer.step()

    with pytest.raises(PeerLost, match="1 ranks are left, expected at least 2"):
        loop()


def test_too_few_ranks(ranks: RankServer) -> None:
    ended = ranks.start(2, needs_more_ranks).join()
    assert [each.code for each in ended] == [0, -signal.SIGKILL], ended[0].report()


def rejects() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for options, words in (
        ({"steps": -1}, "steps is -1"),
        ({"steps": 2.5}, "steps is 2.5"),
        ({"steps": 1, "min_ranks": 0}, "min_ranks is 0"),
        ({"steps": 1, "wait": -1.0}, "wait is -1.0"),
    ):
        with pytest.raises(UsageError, match=words):
            Elastic(model, optimizer, **options)  # type: ignore[arg-type]

    shared = SharedDataParallel(make_model())
    elastic = SharedDataParallel(make_model(), elastic=True)
    for given, wrap, words in (
        (shared, None, "a SharedDataParallel without elastic=True"),
        (elastic, DistributedDataParallel, "a SharedDataParallel with wrap given"),
        (DistributedDataParallel(make_model()), None, "expected the plain module"),
    ):
        with pytest.raises(UsageError, match=words):
            Elastic(given, optimizer, 1, wrap=wrap)
    with pytest.raises(UsageError, match="the forward pass came before the training"):
        elastic(torch.ones(2, 6))
    with pytest.raises(UsageError, match="step came before the training"):
        elastic.optimizer(torch.optim.SGD, lr=0.1).step()
    with pytest.raises(UsageError, match="expected the default group"):
        SharedDataParallel(make_model(), dist.new_group(), elastic=True)

    def loop(count: int) -> None:
        for step in Elastic(model, optimizer, 3):
            with step:
                if count < 0:
                    raise ZeroDivisionError
                for _ in range(count):
                    optimizer.step()

    for count in (0, 2):
        with pytest.raises(UsageError, match=f"made {count} optimizer steps, expected 1"):
            loop(count)
    with pytest.raises(ZeroDivisionError):
        loop(-1)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    with pytest.raises(UsageError, match=r"a scheduler was made for the optimizer, but state=\(\)"):
        loop(1)
    assert phalanx.train.Elastic is Elastic


def test_wrong_use_is_refused(ranks: RankServer) -> None:
    ranks.run(2, rejects)


def begins_with_a_loss(is_late: bool) -> str:
    """Rank 2 dies before or after it has the first state; models of ranks begin differently."""
    init(number(), 3)
    torch.manual_seed(number())
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    broadcast = recovery.broadcast_tree

    def dying(*arguments: Any) -> Any:
        if number() == 2 and not is_late:
            die()
        tree = broadcast(*arguments)
        if number() == 2:
            die()
        return tree

    recovery.broadcast_tree = dying
    for step in Elastic(model, optimizer, 3, wait=0):
        with step:
            optimizer.zero_grad()
            step.model(torch.ones(2, 6)).sum().backward()
            average_gradients(model)
            optimizer.step()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [each.tolist() for each in model.parameters()])
    dist.destroy_process_group()
    assert everyone[0] == everyone[1]
    return str(everyone[0])


@pytest.mark.parametrize("is_late", (False, True))
def test_a_loss_before_the_first_step(ranks: RankServer, is_late: bool) -> None:
    ended = ranks.start(3, begins_with_a_loss, is_late, timeout=None).join()
    assert [each.code for each in ended] == [0, 0, -signal.SIGKILL], ended[0].report()
    assert ended[0].value == ended[1].value


def trains_after_a_loss_at_the_start(moment: str, resumes: bool) -> Any:
    """Rank 2 dies while the trainer restores a checkpoint, or gives all ranks the same state."""
    init(number(), 3)
    torch.manual_seed(number())
    inputs = torch.ones(60, 6) * torch.arange(60.0).view(60, 1) / 60
    data = TensorDataset(inputs, inputs[:, :3])

    def make(steps: int) -> Trainer:
        model = nn.Linear(6, 3)
        return Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            data,
            lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
            global_batch=6,
            steps=steps,
            checkpoints=Path(os.environ["FOLDER"]) / "checkpoints",
            progress=False,
            elastic=True,
            wait=0,
        )

    if resumes:
        make(4).fit()
    trainer = make(8)
    owner, name = (TrainingState, "restore") if resumes else (Replicas, "synchronize")
    method = getattr(owner, name)

    def dying(*arguments: Any) -> Any:
        if number() == 2 and moment == "before":
            die()
        value = method(*arguments)
        if number() == 2:
            die()
        return value

    setattr(owner, name, dying)
    result = trainer.fit()
    state = [each.tolist() for each in trainer._model.parameters()]
    dist.destroy_process_group()
    return result.step, len(result.losses), state


@pytest.mark.parametrize("moment", ("before", "after"))
@pytest.mark.parametrize("resumes", (False, True))
def test_a_loss_at_the_start_of_a_trainer(ranks: RankServer, moment: str, resumes: bool) -> None:
    ended = ranks.start(3, trains_after_a_loss_at_the_start, moment, resumes, timeout=None).join()
    assert [each.code for each in ended] == [0, 0, -signal.SIGKILL], ended[0].report()
    assert ended[0].value[:2] == (8, 4 if resumes else 8)
    assert ended[0].value == ended[1].value
