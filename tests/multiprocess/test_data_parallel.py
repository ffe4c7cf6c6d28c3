"""`SharedDataParallel` against plain synchronous SGD, bit for bit, and against one process.

The oracle of most tests is a replica of the model on every rank, whose gradients are averaged by
one all-reduce per parameter, and which a plain optimizer updates as a whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

from phalanx.errors import PeerLost, UsageError
from phalanx.parallel import SharedDataParallel
from phalanx.parallel.shared_data_parallel import reducer
from tests.ranks import RankServer
from tests.synchronous_sgd import BUCKET, average, check, compare_states, preloaded, seed, seeded

F = nn.functional
# Every optimizer that updates each element independently, with options that use all of its state.
OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 0.1, "fused": True}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.01, "foreach": True, "maximize": True}),
    (torch.optim.Adagrad, {"lr": 0.01}),
    (torch.optim.Adadelta, {"lr": 0.5}),
    (torch.optim.Adamax, {"lr": 0.01}),
    (torch.optim.ASGD, {"lr": 0.01, "t0": 1}),
    (torch.optim.NAdam, {"lr": 0.01}),
    (torch.optim.RAdam, {"lr": 0.01}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {"lr": 0.01}),
]

__all__ = ["preloaded", "seed"]


class Net(nn.Module):
    """Parameters of several dtypes and layouts, without elements and without dimensions."""

    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 13, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(13)
        self.embed = nn.Embedding(31, 17)
        self.hidden = nn.Linear(13 * 6 * 6 + 17, 71)
        self.wide = nn.Linear(71, 33, dtype=torch.float64)
        self.narrow = nn.Linear(33, 5, dtype=torch.bfloat16)
        self.steps = nn.Linear(17, 201, bias=False)
        self.back = nn.Linear(201, 17)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.randn(71), requires_grad=not frozen)

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        hidden = self.norm(self.conv(images)).relu().flatten(1)
        word = self.embed(words)
        longer = self.back(self.steps(word[:, None] * torch.linspace(0.1, 1, 47)[:, None])).mean(1)
        hidden = torch.cat([hidden, word + self.back(self.steps(longer))], 1)
        hidden = (
            self.hidden(hidden + self.steps.weight.square().mean()).tanh() * self.scale
            + self.frozen
            + self.empty.sum()
        )
        return self.narrow(self.wide(hidden.double()).tanh().bfloat16()).float()


def batch(seed: int, size: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Make a batch that differs between ranks."""
    random = seeded(seed * 1009 + dist.get_rank())
    images = torch.randn(size, 3, 8, 8, generator=random)
    words = torch.randint(31, (size,), generator=random)
    return images, words, torch.randint(5, (size,), generator=random)


def compute_loss(model: nn.Module, seed: int) -> Tensor:
    images, words, labels = batch(seed)
    return F.cross_entropy(model(images, words), labels)


def broadcast_buffers(replica: nn.Module) -> None:
    for buffer in replica.buffers():
        dist.broadcast(buffer, 0)


def make_pair(seed: int, **options: Any) -> tuple[SharedDataParallel, nn.Module]:
    """Return a model that gets the values of rank 0, and a replica built with the same values."""
    torch.manual_seed(seed)
    replica = Net()
    torch.manual_seed(seed + dist.get_rank())
    return SharedDataParallel(Net(), bucket_bytes=BUCKET, **options), replica


def compare_optimizers(seed: int, steps: int) -> None:
    torch.set_num_threads(1)
    for number, (optimizer_class, options) in enumerate(OPTIMIZERS):
        model, replica = make_pair(seed + number)
        check(model, replica, "at the beginning")
        optimizer = model.optimizer(optimizer_class, **options)
        plain = optimizer_class([p for p in replica.parameters() if p.requires_grad], **options)
        for step in range(steps):
            broadcast_buffers(replica)
            optimizer.zero_grad()
            plain.zero_grad()
            one, other = compute_loss(model, seed + step), compute_loss(replica, seed + step)
            assert torch.equal(one, other), (optimizer_class, step)
            one.backward()
            other.backward()
            average(replica)
            check(model, replica, f"{optimizer_class} before step {step}")
            optimizer.step()
            plain.step()
            check(model, replica, f"{optimizer_class} after step {step}")
        compare_states(optimizer.state_dict(), plain.state_dict(), model)
        assert model._shared.memory.discard() == 0, "the parameters are held once"


def run_on_cores(cores: int, function: Callable[..., None], *arguments: object) -> set[bool]:
    """Simulate a number of cores; return whether buckets were reduced concurrently."""
    os.sched_getaffinity = lambda _: set(range(cores))  # type: ignore[assignment]
    concurrent: set[bool] = set()
    launch = reducer._SharedMemoryReducer.launch

    def record_launch(self: Any, bucket: int) -> None:
        concurrent.add(self._concurrent)
        launch(self, bucket)

    reducer._SharedMemoryReducer.launch = record_launch  # type: ignore[method-assign]
    function(*arguments)
    return concurrent


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("world_size", "cores"), [(1, 1), (2, 1), (3, 1), (4, 1), (3, 64)])
def test_equals_plain_synchronous_sgd_bit_for_bit(
    ranks: RankServer, world_size: int, cores: int, seed: int
) -> None:
    concurrent = ranks.run(world_size, run_on_cores, cores, compare_optimizers, seed, 3)
    assert set().union(*concurrent) == (set() if world_size == 1 else {cores > world_size})


# The reduction goes host by host, so results are close to those of one process, not equal. They are
# the same on every rank.
def compare_with_one_process(seed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    replica = nn.Sequential(nn.Linear(9, 301), nn.Tanh(), nn.Linear(301, 7)).double()
    torch.manual_seed(seed + dist.get_rank())
    module = nn.Sequential(nn.Linear(9, 301), nn.Tanh(), nn.Linear(301, 7)).double()
    for part, rank in ((replica, 0), (module, dist.get_rank())):  # frozen, of another dtype
        few = torch.randn(3, generator=seeded(seed + rank)).to(torch.float8_e4m3fn)
        part.register_parameter("few", nn.Parameter(few, requires_grad=False))
    model = SharedDataParallel(module, bucket_bytes=BUCKET)
    optimizer = model.optimizer(torch.optim.Adam, lr=0.01)
    plain = torch.optim.Adam([p for p in replica.parameters() if p.requires_grad], lr=0.01)
    size, rank = dist.get_world_size(), dist.get_rank()
    for step in range(4):
        random = seeded(seed + step)
        inputs = torch.randn(4 * size, 9, generator=random, dtype=torch.float64)
        targets = torch.randn(4 * size, 7, generator=random, dtype=torch.float64)
        optimizer.zero_grad()
        plain.zero_grad()
        F.mse_loss(model(inputs[rank::size]), targets[rank::size]).backward()
        F.mse_loss(replica(inputs), targets).backward()
        for one, other in zip(module.parameters(), replica.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-13)
        norm = model.clip_grad_norm_(0.5)
        expected = nn.utils.clip_grad_norm_(replica.parameters(), 0.5)
        torch.testing.assert_close(norm, expected, rtol=1e-10, atol=0.0)
        optimizer.step()
        plain.step()
        for one, other in zip(module.parameters(), replica.parameters(), strict=True):
            if one.requires_grad:
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)
    assert torch.equal(module.few.view(torch.uint8), replica.few.view(torch.uint8))
    for parameter in module.parameters():
        own = parameter.detach().view(torch.uint8)
        gathered = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(gathered, own)
        assert all(torch.equal(gathered[0], other) for other in gathered)
    state = optimizer.state_dict()["state"]
    for index, expected_state in plain.state_dict()["state"].items():
        for key, value in expected_state.items():
            torch.testing.assert_close(state[index][key], value, rtol=1e-9, atol=1e-13)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("hosts", "cores"),
    [
        *[(hosts, 1) for hosts in ("aabb", "abab", "aab", "abb", "ab", "aaabc")],
        *[(hosts, 64) for hosts in ("aabb", "abb")],
    ],
)
def test_equals_one_process_on_many_hosts(
    ranks: RankServer, hosts: str, cores: int, seed: int
) -> None:
    concurrent = ranks.run(
        len(hosts), run_on_cores, cores, compare_with_one_process, seed, hosts=hosts
    )
    assert set().union(*concurrent) == (set() if hosts == "ab" else {cores > len(hosts)})


def compare_on_gloo(seed: int) -> None:
    path = Path(os.environ["FOLDER"]) / "gloo"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    compare_with_one_process(seed)
    dist.destroy_process_group()


def test_equals_one_process_on_gloo(ranks: RankServer, seed: int) -> None:
    ranks.run(3, compare_on_gloo, seed, timeout=None)


def measure_memory() -> tuple[int, int]:
    """Return the size of the model in bytes, and the size of this process's private part of it."""
    torch.set_num_threads(1)
    model = SharedDataParallel(nn.Sequential(*(nn.Linear(700, 700) for _ in range(8))))
    optimizer = model.optimizer(torch.optim.Adam, lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, 700)).sum().backward()
        optimizer.step()
    text = Path("/proc/self/smaps").read_text()
    areas = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.MULTILINE)
    own = 0
    for area in areas:
        if "phalanx-cow" in area.partition("\n")[0]:
            found = re.search(r"^Anonymous: +(\d+) kB", area, re.MULTILINE)
            own += int(found[1]) * 1024 if found else 0
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    state = model_state_bytes(optimizer)
    assert state < size
    return size, own


def model_state_bytes(optimizer: Any) -> int:
    """Return the size in bytes of this rank's optimizer state."""
    return sum(
        value.numel() * value.element_size()
        for update in optimizer._updates
        for state in update.inner.state.values()
        for value in state.values()
    )


def test_host_holds_parameters_and_gradients_once(ranks: RankServer) -> None:
    for size, own in ranks.run(4, measure_memory):
        assert size > 15_000_000
        assert own == 0


def check_errors() -> None:
    rank, model = dist.get_rank(), nn.Linear(4, 3)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter that requires a gradient"):
        SharedDataParallel(frozen)
    with pytest.raises(UsageError, match=r"parameter weight \[4, 3\] is .* on meta"):
        SharedDataParallel(nn.Linear(3, 4, device="meta"))
    with pytest.raises(UsageError, match="no shape yet"):
        SharedDataParallel(nn.LazyLinear(3))
    with pytest.raises(UsageError, match=r"parameter 0\.weight \[3, 4\] is torch.float8"):
        SharedDataParallel(nn.Sequential(nn.Linear(4, 3).to(torch.float8_e4m3fn)))
    different = nn.Linear(4, 3 + rank // 2)
    with pytest.raises(
        UsageError,
        match=r"parameter 0 is weight \[3, 4\] torch.float32, .* rank 0, weight \[4, 4\] .* rank 2",
    ):
        SharedDataParallel(different)
    wrapped = SharedDataParallel(model)
    with pytest.raises(UsageError, match="LBFGS given, expected one that updates each element"):
        wrapped.optimizer(torch.optim.LBFGS)
    with pytest.raises(UsageError, match=r"a parameter \[5\] given that is not part of this model"):
        wrapped.optimizer(torch.optim.SGD, [nn.Parameter(torch.zeros(5))], lr=0.1)
    with pytest.raises(UsageError, match="reduced in shared memory"):
        wrapped.register_comm_hook(None, None)
    with pytest.raises(ValueError, match="learning rate"):
        wrapped.optimizer(torch.optim.SGD, lr=-1)
    with pytest.raises(UsageError, match=r"max_norm -1 and norm_type 2\.0 given"):
        wrapped.clip_grad_norm_(-1)
    optimizer = wrapped.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    with pytest.raises(UsageError, match="already divided among the ranks"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(5))]})
    other = torch.optim.SGD([nn.Parameter(torch.zeros(5))], lr=0.1)
    with pytest.raises(UsageError, match=r"groups of \[1\] parameters given, expected \[2\]"):
        optimizer.load_state_dict(other.state_dict())
    state = optimizer.state_dict()
    state["state"][0] = {"momentum_buffer": torch.zeros(7)}
    with pytest.raises(UsageError, match=r"momentum_buffer of parameter 0 is \[7\], expected \[3,"):
        optimizer.load_state_dict(state)
    # The errors left all ranks synchronized.
    wrapped(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def test_invalid_arguments(ranks: RankServer) -> None:
    with pytest.raises(UsageError, match="no process group"):
        SharedDataParallel(nn.Linear(2, 2))
    ranks.run(3, check_errors)


def interrupt_backward() -> str:
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, inputs: Tensor) -> Tensor:
            return inputs.clone()

        @staticmethod
        def backward(_: Any, *gradients: Tensor) -> Tensor:
            raise RuntimeError("stop here")

    parts: Any = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    parts.forward = lambda inputs: parts[1](Stop.apply(parts[0](inputs)))
    model = SharedDataParallel(parts)
    with pytest.raises(RuntimeError, match="stop here"):
        parts(torch.ones(1, 3)).sum().backward()
    outputs = model(torch.ones(1, 3))  # this did not average
    with pytest.raises(RuntimeError, match="stop here"):
        outputs.sum().backward()
    with pytest.raises(
        UsageError, match="an exception interrupted the last backward pass"
    ) as caught:
        model(torch.ones(1, 3))
    return str(caught.value)


def test_interrupted_backward_pass_raises_error(ranks: RankServer) -> None:
    assert "checkpoint" in ranks.run(2, interrupt_backward)[0]


def die_in_third_step() -> None:
    model = SharedDataParallel(nn.Linear(300, 300))
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    for step in range(10):
        loss = model(torch.ones(2, 300)).sum()
        if step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), 9)
        loss.backward()
        optimizer.step()


def test_death_is_reported_on_all_ranks(ranks: RankServer) -> None:
    ended = ranks.start(3, die_in_third_step).join()
    assert ended[1].code == -9
    for rank in (0, 2):
        assert isinstance(ended[rank].error, PeerLost), ended[rank].report()
        assert "rank 1" in str(ended[rank].error)
