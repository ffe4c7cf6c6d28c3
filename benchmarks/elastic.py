"""The cost of an elastic training without failures: steps in `Elastic`, against a plain loop.

    python benchmarks/elastic.py --model convnet --output benchmarks/elastic_convnet.json

The models are those of `data_parallel.py`: `convnet`, with a global batch of 128, and `mlp`, with
25 million parameters and 8 samples per rank. Each is trained by DDP and by SharedDataParallel, in a
plain loop and in `Elastic`. All four run alternately in the same processes; the results are medians
over the rounds of the slowest rank's mean step, with the quartiles, and the ratio of the medians
over pairs of rounds.
"""

import argparse
import gc
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data_parallel import MODELS, take_turns
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import phalanx
from phalanx.bench.machine import machine, versions
from phalanx.bench.results import Timing
from phalanx.parallel import SharedDataParallel
from phalanx.train import Elastic

MODES = ("ddp", "ddp_elastic", "shared", "shared_elastic")
MOST_STEPS = 10**9


class Training:
    """One rank's training in one mode."""

    def __init__(self, name: str, mode: str) -> None:
        torch.manual_seed(1)
        module, self._loss = MODELS[name]()
        is_elastic = mode.endswith("_elastic")
        kind: Any = torch.optim.SGD if name == "convnet" else torch.optim.Adam
        # With a learning rate of 0 the values never change and never become denormal.
        options: dict[str, Any] = {"lr": 0.0, "fused": True}
        if name == "convnet":
            options["momentum"] = 0.9
        wrap: Callable[[nn.Module], nn.Module] | None = None
        self._model: nn.Module = module
        if mode.startswith("shared"):
            shared = SharedDataParallel(module, elastic=is_elastic)
            self._model, self._optimizer = shared, shared.optimizer(kind, **options)
        else:
            self._optimizer = kind(module.parameters(), **options)

            def wrap(plain: nn.Module) -> nn.Module:
                return DistributedDataParallel(plain, gradient_as_bucket_view=True)

            if not is_elastic:
                self._model = wrap(module)
        self._steps: Iterator[Any] | None = None
        if is_elastic:
            self._steps = iter(Elastic(self._model, self._optimizer, MOST_STEPS, wrap=wrap))

    def run(self, count: int) -> float:
        """Return the seconds of a step."""
        dist.barrier()
        gc.disable()
        start = time.perf_counter()
        for _ in range(count):
            if self._steps is None:
                self._step(self._model)
                continue
            with (step := next(self._steps)):
                self._step(step.model)
        taken = (time.perf_counter() - start) / count
        gc.enable()
        return taken

    def _step(self, model: nn.Module) -> None:
        self._optimizer.zero_grad()
        loss: Tensor = self._loss(model)
        loss.backward()
        self._optimizer.step()


def measure(name: str, rounds: int, count: int) -> dict[str, list[float]]:
    """Time every mode; return the seconds of the slowest rank by mode and round."""
    torch.set_num_threads(1)
    dist.init_process_group("phalanx")
    runs = {mode: Training(name, mode).run for mode in MODES}
    return take_turns(runs, rounds, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=("convnet", "mlp"), default="convnet")
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    count = 40 if options.model == "convnet" else 3
    arguments = options.model, options.rounds, count
    seconds = phalanx.launch(measure, options.nproc_per_node, arguments)[0]
    timings = {mode: Timing.of(seconds[mode]) for mode in MODES}
    ratios = {}
    for plain, elastic in (MODES[:2], MODES[2:]):
        pairs = zip(seconds[elastic], seconds[plain], strict=True)
        ratios[plain] = statistics.median(one / other for one, other in pairs)
        for mode in (plain, elastic):
            timing = timings[mode]
            low, high = timing.low * 1e3, timing.high * 1e3
            print(f"{mode:>14}  {timing.median * 1e3:8.2f} ms  ({low:.2f} - {high:.2f})")
        print(f"{'ratio':>14}  {ratios[plain]:8.4f}")
    if options.output:
        document = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": {**machine(), **versions()},
            "seconds": {mode: vars(timing) for mode, timing in timings.items()},
            "ratios": ratios,
        }
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
