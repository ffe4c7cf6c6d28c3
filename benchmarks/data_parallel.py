"""Training steps of SharedDataParallel, DDP on Phalanx and Gloo, and without communication.

    python benchmarks/data_parallel.py --model mlp1 --nproc-per-node 2 --output FILE
    python benchmarks/data_parallel.py --model mlp1 --nproc-per-node 4 --memory

`mlp1`: 25 million parameters, one sample per rank, Adam: communication-bound. `mlp2`, `mlp`: the
same with 2 and 8 samples, for which the matrix products take most of the time. `gpt`: a GPT
of 25 million parameters, a sequence of 32 tokens per rank. `convnet`: the ConvNet of
examples/train_digits.py, global batch 128, SGD with momentum.

All modes run alternately in the same processes, with fused optimizers. DDP has
`gradient_as_bucket_view=True`. The results are medians over the rounds of the slowest rank's mean
step, with the quartiles. With --memory each mode runs in separate processes, and the result is the
memory (PSS) of the ranks after some steps, minus that after some steps of a tiny model.
"""

import argparse
import gc
import importlib
import json
import shlex
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import phalanx
from phalanx.bench.machine import machine, versions
from phalanx.bench.results import Timing
from phalanx.parallel import SharedDataParallel

MODES = ("data_parallel", "ddp_phalanx", "ddp_gloo", "alone")
# Costs that no backend can avoid: ranks that wait for each other in each step, and DDP itself.
BASELINES = ("in_step", "ddp_of_one")


class GPT(nn.Module):
    """A small GPT: 25 million parameters."""

    def __init__(self, width: int = 512, layers: int = 7, vocabulary: int = 4096) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at each position of `[batch, length]`."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.blocks(self.embed(tokens), mask=mask, is_causal=True)
        return self.head(hidden)


def convnet() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    module = importlib.import_module("train_digits")
    batch = 128 // dist.get_world_size()
    images, labels = torch.randn(batch, 1, 28, 28), torch.randint(10, (batch,))
    return module.ConvNet(0.25), lambda model: F.nll_loss(model(images), labels)


def mlp(batch: int = 8) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(2500, 2500), nn.ReLU()]
    inputs, targets = torch.randn(batch, 2500), torch.randn(batch, 2500)
    return nn.Sequential(*layers), lambda model: F.mse_loss(model(inputs), targets)


def gpt() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    tokens = torch.randint(4096, (1, 33))
    return GPT(), lambda model: F.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:])


MODELS = {
    "convnet": convnet,
    "mlp": mlp,
    "mlp1": lambda: mlp(1),
    "mlp2": lambda: mlp(2),
    "gpt": gpt,
}


class Step:
    """One rank's model in one mode."""

    def __init__(self, model: str, mode: str, group: dist.ProcessGroup | None) -> None:
        torch.manual_seed(1)
        module, self.loss = MODELS[model]()
        # With a learning rate of 0 the values never change and never become denormal.
        optimizer_class: Any = torch.optim.SGD if model == "convnet" else torch.optim.Adam
        options: dict[str, Any] = {"lr": 0.0, "fused": True}
        if model == "convnet":
            options["momentum"] = 0.9
        self.model: nn.Module = module
        self.barrier_group = group if mode == "in_step" else None
        if mode == "data_parallel":
            wrapped = SharedDataParallel(module, group)
            self.model, self.optimizer = wrapped, wrapped.optimizer(optimizer_class, **options)
            return
        if mode not in ("alone", "in_step"):
            self.model = DistributedDataParallel(
                module, process_group=group, gradient_as_bucket_view=True
            )
        self.optimizer = optimizer_class(self.model.parameters(), **options)

    def run(self, steps: int) -> float:
        """Return the seconds of a step."""
        dist.barrier()
        gc.disable()
        start = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.loss(self.model).backward()
            if self.barrier_group is not None:
                dist.barrier(self.barrier_group)
            self.optimizer.step()
        taken = (time.perf_counter() - start) / steps
        gc.enable()
        return taken


def measure(model: str, modes: tuple[str, ...], rounds: int, steps: int) -> dict[str, list[float]]:
    """Time every mode; return the seconds of the slowest rank by mode and round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    backends = dict.fromkeys(("data_parallel", "ddp_phalanx", "in_step"), "phalanx")
    backends["ddp_gloo"] = "gloo"
    groups = {mode: dist.new_group(backend=backends[mode]) for mode in modes if mode in backends}
    for rank in range(dist.get_world_size()) if "ddp_of_one" in modes else ():
        alone = dist.new_group([rank], backend="phalanx")
        if rank == dist.get_rank():
            groups["ddp_of_one"] = alone
    runs = {mode: Step(model, mode, groups.get(mode)).run for mode in modes}
    return take_turns(runs, rounds, steps)


def take_turns(
    runs: dict[str, Callable[[int], float]], rounds: int, steps: int
) -> dict[str, list[float]]:
    """Run each mode in turn; return the seconds of the slowest rank by mode and round."""
    modes = list(runs)
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    for number in range(-1, rounds):
        for offset in range(len(modes)):
            mode = modes[(number + offset) % len(modes)]
            taken = torch.tensor(runs[mode](steps), dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if number >= 0:  # the first round warms up
                seconds[mode].append(taken.item())
    return seconds


def pss() -> int:
    """Return the proportional set size (PSS) of this process in bytes."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError("the kernel does not report Pss")


def measure_rank_memory(model: str, mode: str) -> tuple[int, int]:
    """Return the bytes that this rank holds before it has a model, and after some steps."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo" if mode == "ddp_gloo" else "phalanx")
    Step("convnet", mode, None).run(2)  # libraries allocate memory at first use
    gc.collect()
    dist.barrier()
    idle = pss()
    dist.barrier()
    step = Step(model, mode, None)
    step.run(3)
    gc.collect()
    dist.barrier()
    held_bytes = pss()
    dist.barrier()
    return idle, held_bytes


def measure_memory(model: str, ranks: int) -> dict[str, float]:
    figures = {}
    for mode in MODES[:3]:
        held_bytes = phalanx.launch(measure_rank_memory, ranks, (model, mode))
        figures[mode] = sum(after - before for before, after in held_bytes)
        print(f"{mode:>14}  {figures[mode] / 2**20:7.1f} MiB", flush=True)
    for mode in MODES[1:3]:
        print(f"data_parallel / {mode}: {figures['data_parallel'] / figures[mode]:.1%}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="mlp1")
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, help="steps of each mode in a round")
    parser.add_argument(
        "--modes",
        default=",".join(MODES),
        help=f"some of these and {', '.join(BASELINES)} (default: %(default)s)",
    )
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    facts = {**machine(), **versions()}
    print(
        f"{options.model}, {options.nproc_per_node} ranks; "
        + ", ".join(f"{k} {facts[k]}" for k in facts)
    )
    document = {"command": shlex.join(["python", *sys.argv]), "machine": facts}
    if options.memory:
        document["bytes"] = measure_memory(options.model, options.nproc_per_node)
    else:
        modes = tuple(options.modes.split(","))
        steps = options.steps or (40 if options.model == "convnet" else 3)
        arguments = options.model, modes, options.rounds, steps
        seconds = phalanx.launch(measure, options.nproc_per_node, arguments)[0]
        timings = {mode: Timing.of(seconds[mode]) for mode in modes}
        for mode, timing in timings.items():
            ratio = timing.median / timings[modes[0]].median
            print(
                f"{mode:>14}  {timing.median * 1e3:8.2f} ms  ({timing.low * 1e3:.2f} - "
                f"{timing.high * 1e3:.2f})  {ratio:5.2f} times {modes[0]}"
            )
        document["seconds"] = {mode: vars(timing) for mode, timing in timings.items()}
    if options.output:
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
