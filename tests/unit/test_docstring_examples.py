"""The examples in docstrings, executed; every public name has one.

The examples of a package run in one rank of `phalanx.launch`, with the names that a user has
defined before: a model, data, a folder. Most run in a group of one rank or in a worker, and
examples that need several ranks start them by `phalanx.launch` or a `FaultRunner`.
"""

from __future__ import annotations

import contextlib
import doctest
import faulthandler
import importlib
import inspect
import io
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import phalanx
from phalanx.testing import FaultRunner
from tests.ports import find_free_port

pytestmark = pytest.mark.slow

SOURCE = Path(phalanx.__file__).parent
PUBLIC = (
    "phalanx",
    "phalanx.checkpoints",
    "phalanx.data",
    "phalanx.embedding",
    "phalanx.parallel",
    "phalanx.rpc",
    "phalanx.rpc.autograd",
    "phalanx.testing",
    "phalanx.train",
)
WORKERS = ("embedding", "rpc")
"""The packages whose examples run in a worker."""
FORMS_ITS_GROUP = ("phalanx.init(", "phalanx.launch(", "runner", "FaultRunner(", "enable_faults(")
"""Parts of examples that run outside of a group."""


def modules_with_examples() -> dict[str, list[str]]:
    """Return the modules that have examples, by package."""
    found: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if ">>> " in path.read_text():
            name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
            name = name.removesuffix(".__init__")
            found.setdefault(name.split(".")[1], []).append(name)
    del found["usage_errors"]  # its classes say that they are of `phalanx.errors`, and run there
    return found


def find_examples(package: str) -> dict[str, doctest.DocTest]:
    """Return the examples of a package by the name of their object."""
    finder = doctest.DocTestFinder()
    found = {}
    for name in modules_with_examples()[package]:
        module = importlib.import_module(name)
        for test in finder.find(module, name):
            if test.examples:
                found[test.name] = test
    return found


def make_model() -> torch.nn.Module:
    return torch.nn.Linear(4, 2)


def make_names(package: str, name: str, folder: Path) -> dict[str, Any]:
    """Return the names that an example finds defined."""
    names: dict[str, Any] = {
        "__name__": "__main__",
        "DataLoader": DataLoader,
        "DistributedSampler": DistributedSampler,
        "F": F,
        "dist": dist,
        "folder": folder,
        "os": os,
        "phalanx": phalanx,
        "signal": signal,
        "torch": torch,
    }
    if package in ("errors", "launcher", "recorder", "diagnosis", "backend", "system"):
        names |= {"batches": range(3), "train": float, "loss": torch.zeros(())}
        names["port"] = find_free_port()
    else:
        module = importlib.import_module(f"phalanx.{package}")
        names |= {each: getattr(module, each) for each in module.__all__}
    if package in WORKERS:
        from phalanx import embedding, rpc

        return {**names, "embedding": embedding, "rpc": rpc, "checkpoints": str(folder)}
    if package in ("data", "parallel", "train", "checkpoints"):
        names |= make_training(name, folder)
    if package == "system":
        names["install_command"] = phalanx.system.extras.install_command  # type: ignore[attr-defined]
    return names


def make_training(name: str, folder: Path) -> dict[str, Any]:
    """Return a model, data and what belongs to them."""
    from phalanx.data import GlobalBatchSampler, mean_over_ranks
    from phalanx.parallel import SharedDataParallel, average_gradients
    from phalanx.train import Checkpointer, Trainer

    def loss_and_accuracy(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
        outputs = model(batch[0])
        accuracy = (outputs.argmax(1) == batch[1]).float().mean()
        return F.cross_entropy(outputs, batch[1]), {"accuracy": accuracy}

    inputs, targets = torch.randn(96, 4), torch.randint(2, (96,))
    data = TensorDataset(inputs, targets)
    model: Any = make_model()
    if "SyncBatchNorm" in name:
        model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    is_replicated = "ShardedOptimizer" in name or "SharedDataParallel." in name
    if is_replicated:
        model = SharedDataParallel(model)
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names: dict[str, Any] = {
        "average_gradients": average_gradients,
        "batches": [(inputs[:8], targets[:8]), (inputs[8:16], targets[8:16])],
        "checkpoints": Checkpointer(folder / "checkpoints", keep=2),
        "correct": 3,
        "data": data,
        "gradient": torch.ones(5),
        "inputs": inputs,
        "largest": torch.ones(5),
        "loader": DataLoader(data, batch_size=32),
        "train_step": lambda _batch: None,
        "loss": F.cross_entropy,
        "loss_sum": 4.0,
        "mean_over_ranks": mean_over_ranks,
        "model": model,
        "optimizer": optimizer,
        "seen": 5,
        "step": 7,
        "targets": targets,
    }
    if name.endswith(("clip_grad_norm_", "average_gradients_per_parameter")):
        names["loss"] = F.cross_entropy(model(inputs), targets)
    if "Resumable" in name:
        names["sampler"] = GlobalBatchSampler(data, 32, seed=1)
        names["loader"] = DataLoader(data, batch_sampler=names["sampler"])
    if name.endswith((".Result", ".fit")):
        names["trainer"] = Trainer(
            model,
            optimizer,
            data,
            loss_and_accuracy,
            global_batch=32,
            epochs=1,
            evaluate=data,
            progress=False,
        )
    return names


def train_with_faults(_rate: float = 0.1) -> None:
    """The program in which the examples of `phalanx.testing` inject faults."""
    with phalanx.init():
        for _ in range(8):
            dist.all_reduce(torch.ones(3))


@contextlib.contextmanager
def state_of(package: str, source: str, folder: Path) -> Iterator[dict[str, Any]]:
    """The state in which an example runs: a group, a worker, a runner of faults, or nothing."""
    with contextlib.ExitStack() as stack:
        names: dict[str, Any] = {}
        if package == "testing":
            names["train"] = train_with_faults
            if "runner.run(" in source and "FaultRunner(" not in source:
                names["runner"] = stack.enter_context(FaultRunner())
        if package in WORKERS:
            from phalanx import rpc

            if "init_rpc(" not in source:
                rpc.init_rpc("ps")
            stack.callback(lambda: rpc.shutdown() if rpc.is_initialized() else None)
        elif not any(part in source for part in FORMS_ITS_GROUP):
            stack.enter_context(phalanx.init())
        yield names


def run_examples(package: str, folder: Path) -> tuple[int, str]:
    """Run the examples of a package; return their number and the report of those that fail."""
    faulthandler.dump_traceback_later(100, exit=True)  # before the launcher stops it
    current = folder / "current"  # some examples write there
    current.mkdir()
    os.chdir(current)
    runner = doctest.DocTestRunner(
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False
    )
    if package in WORKERS:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    tests = find_examples(package)
    report = io.StringIO()
    # `load` reads the files that `save` writes.
    for name in sorted(tests, key=lambda name: (name.endswith(".load"), name)):
        source = "".join(example.source for example in tests[name].examples)
        with state_of(package, source, folder) as state:
            tests[name].globs = {**make_names(package, name, folder), **state}
            runner.run(tests[name], out=report.write)
    if dist.is_initialized():
        dist.destroy_process_group()
    return len(tests), report.getvalue()


@pytest.mark.parametrize("package", modules_with_examples())
def test_examples(package: str, tmp_path: Path) -> None:
    ((count, report),) = phalanx.launch(run_examples, 1, (package, tmp_path), timeout=110)
    assert count > 0
    assert not report, report


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example(name: str) -> None:
    module = importlib.import_module(name)
    parser = doctest.DocTestParser()
    public: dict[str, Callable[..., object]] = {
        each: value
        for each in module.__all__
        if callable(value := getattr(module, each)) and not inspect.ismodule(value)
    }
    assert public
    without = [
        each
        for each, value in public.items()
        if not parser.get_examples(inspect.getdoc(value) or "")
    ]
    assert not without
