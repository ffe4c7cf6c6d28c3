"""A training over slow links: DiLoCo against synchronous SGD, on hosts in network namespaces.

    python benchmarks/slow_links.py --rate 100mbit --output benchmarks/slow_links_100mbit.json

Trains the GPT of examples/train_gpt.py on a text, on some hosts of one rank whose links have the
given rate (token bucket) and delay (a process that forwards packets), so root is required. `alone`:
without communication, the time that any method needs to compute. `ddp_gloo`: PyTorch's
DistributedDataParallel on Gloo. `ddp_int8`: the same on Phalanx, whose groups send int8. `diloco`:
`DiLoCo`.

Prints the tokens per second, the share of the time that is computing (the step of `alone` by that
of the method), the bytes that a host sends per token, and the loss on held-out text after equally
many steps: of all hosts, and for `alone` of one. The losses of the others do not depend on the
links, and come from runs without a limit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import phalanx
from phalanx.bench.machine import machine, versions
from phalanx.parallel import DiLoCo

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.networks import Network

ROOT = Path(__file__).parents[1]
MODES = ("alone", "ddp_gloo", "ddp_int8", "diloco")
SYNCHRONOUS = "ddp_gloo", "ddp_int8"
LENGTH = 64


def load_example() -> Any:
    """Return the module examples/train_gpt.py."""
    path = ROOT / "examples" / "train_gpt.py"
    spec: Any = importlib.util.spec_from_file_location("train_gpt", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bytes_sent() -> int:
    """Return the bytes that this host's interface has sent."""
    counters = psutil.net_io_counters(pernic=True)
    return sum(counters[name].bytes_sent for name in ("eth0", "lo") if name in counters)


class Training:
    """One rank's training in one mode."""

    def __init__(self, options: argparse.Namespace) -> None:
        example = load_example()
        text = options.text.read_text()
        alphabet = sorted(set(text))
        numbers = {letter: number for number, letter in enumerate(alphabet)}
        letters = torch.tensor([numbers[letter] for letter in text])
        split = len(letters) * 9 // 10
        self._train, self._held_out = letters[:split], letters[split:]
        torch.manual_seed(1)
        self.gpt = example.GPT(len(alphabet), LENGTH, options.width, options.depth, dropout=0.0)
        self._loss = example.loss
        inner = torch.optim.AdamW(self.gpt.parameters(), lr=options.lr, weight_decay=0.1)
        self.model: nn.Module = self.gpt
        self.optimizer: torch.optim.Optimizer = inner
        if options.mode in SYNCHRONOUS:
            self.model = DistributedDataParallel(self.gpt)
        elif options.mode == "diloco":
            self.optimizer = DiLoCo(
                inner,
                options.every,
                lr=options.outer_lr,
                momentum=options.momentum,
                compress=options.compress,
                overlap=options.overlap,
            )
        self._steps, self._batch = options.steps, options.batch
        self._warm_up, self._base = min(options.steps // 10, 100), options.lr
        self._random = torch.Generator().manual_seed(100 + dist.get_rank())

    def step(self, number: int) -> None:
        """Make a step; the learning rate rises and falls (cosine)."""
        done = number / self._steps
        factor = min(1.0, (number + 1) / max(self._warm_up, 1))
        decay = 0.1 + 0.9 * 0.5 * (1 + float(torch.cos(torch.tensor(done * torch.pi))))
        for group in self.optimizer.param_groups:
            group["lr"] = self._base * factor * decay
        limit = len(self._train) - LENGTH - 1
        starts = torch.randint(limit, (self._batch,), generator=self._random)
        sections = torch.stack([self._train[start : start + LENGTH + 1] for start in starts])
        self.optimizer.zero_grad()
        self._loss(self.model, (sections[:, :-1], sections[:, 1:])).backward()
        nn.utils.clip_grad_norm_(self.gpt.parameters(), 1.0)
        self.optimizer.step()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss over the held-out text."""
        self.gpt.eval()
        count = (len(self._held_out) - 1) // LENGTH
        total = 0.0
        for first in range(0, count, 128):
            sections = torch.stack(
                [
                    self._held_out[index * LENGTH : (index + 1) * LENGTH + 1]
                    for index in range(first, min(first + 128, count))
                ]
            )
            batch = sections[:, :-1], sections[:, 1:]
            total += float(self._loss(self.gpt, batch)) * len(sections)
        return total / count


def run_rank(options: argparse.Namespace) -> None:
    """Train on a rank; rank 0 prints the result."""
    torch.set_num_threads(1)
    if options.mode == "ddp_gloo":
        dist.init_process_group("gloo")
    else:
        encoding = "int8" if options.mode == "ddp_int8" else ""
        dist.init_process_group("phalanx", pg_options=phalanx.Options(compress=encoding))
    training = Training(options)
    dist.barrier()
    before, begin = bytes_sent(), time.perf_counter()
    for number in range(options.steps):
        training.step(number)
    if isinstance(training.optimizer, DiLoCo):
        training.optimizer.synchronize()
    seconds = time.perf_counter() - begin
    sent = bytes_sent() - before
    totals = torch.tensor([seconds, float(sent)], dtype=torch.float64)
    dist.all_reduce(totals)
    loss = training.held_out_loss() if options.evaluate and dist.get_rank() == 0 else None
    dist.barrier()
    if dist.get_rank() == 0:
        seconds, sent = (totals / dist.get_world_size()).tolist()
        tokens = options.steps * LENGTH * options.batch  # of each host
        parameters = sum(parameter.numel() for parameter in training.gpt.parameters())
        result = {
            "mode": options.mode,
            "steps": options.steps,
            "parameters": parameters,
            "seconds": seconds,
            "step_seconds": seconds / options.steps,
            "tokens_per_second": tokens * dist.get_world_size() / seconds,
            "bytes_per_token": sent / tokens,
            "loss": loss,
        }
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def run_job(
    mode: str, steps: int, options: argparse.Namespace, *, slow: bool, hosts: int | None = None
) -> Any:
    """Train on all hosts, or so many; return the result that rank 0 printed."""
    hosts = hosts or options.hosts
    link = (options.rate, options.delay) if slow else (None, 0.0)
    arguments = [
        *("--rank", "--mode", mode, "--steps", str(steps), "--text", str(options.text.resolve())),
        *("--width", str(options.width), "--depth", str(options.depth), "--lr", str(options.lr)),
        *("--every", str(options.every), "--overlap", str(options.overlap)),
        *("--batch", str(options.batch), "--momentum", str(options.momentum)),
        *("--outer-lr", str(options.outer_lr), "--compress", options.compress),
        *(["--evaluate"] if options.evaluate else []),
    ]
    with Network(hosts, *link) as network:
        processes = []
        for rank in range(hosts):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(hosts),
                "MASTER_ADDR": network.addresses[0],
                "MASTER_PORT": "29500",
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "eth0",
            }
            command = [sys.executable, __file__, *arguments]
            processes.append(network.start(rank, command, environment, output=subprocess.PIPE))
        outputs = [process.communicate(timeout=options.limit)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("\n".join(map(str, outputs)))
    return json.loads(outputs[0].splitlines()[-1])


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--text", type=Path, default=ROOT.parent / "shared/data/shakespeare/input.txt"
    )
    parser.add_argument("--rate", default="100mbit", help="of each link, in the syntax of `tc`")
    parser.add_argument("--delay", type=float, default=0.0, help="from host to host, in seconds")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--timed-steps", type=int, default=60, help="of the synchronous method")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--every", type=int, default=128)
    parser.add_argument("--overlap", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8, help="sequences per host and step")
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--momentum", type=float, default=0.9, help="of the outer optimizer")
    parser.add_argument("--compress", default="int8")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for one run")
    parser.add_argument("--evaluate", action="store_true", help="compare the losses too")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options)
        return
    results = {
        "alone": run_job("alone", options.timed_steps, options, slow=False),
        **{mode: run_job(mode, options.timed_steps, options, slow=True) for mode in SYNCHRONOUS},
        "diloco": run_job("diloco", options.steps, options, slow=True),
    }
    if options.evaluate:
        hosts = {"alone": 1, **dict.fromkeys(SYNCHRONOUS, options.hosts)}
        for mode, count in hosts.items():
            whole = run_job(mode, options.steps, options, slow=False, hosts=count)
            results[mode]["loss"] = whole["loss"]
    alone = results["alone"]["step_seconds"]
    print(f"{'':10} {'tokens/s':>10} {'computing':>10} {'bytes/token':>12} {'loss':>8}")
    for name, result in results.items():
        result["computing"] = alone / result["step_seconds"]
        loss = "" if result["loss"] is None else f"{result['loss']:.4f}"
        print(
            f"{name:10} {result['tokens_per_second']:10.0f} {result['computing']:10.1%} "
            f"{result['bytes_per_token']:12.1f} {loss:>8}"
        )
    if options.output:
        command = f"python benchmarks/slow_links.py {' '.join(sys.argv[1:])}"
        record = {
            "command": command,
            "machine": {**machine(), **versions()},
            "rate": options.rate,
            "delay": options.delay,
            "hosts": options.hosts,
            "results": results,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
