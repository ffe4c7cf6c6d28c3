"""Python imports this first in each process of an example, on both RPC implementations.

It substitutes what the machine lacks (accelerators, a torchvision built for this torch), fixes the
seeds, shortens the example, and records each loss. The files of the example are not changed.

Environment variables: `PUBLISHED_SET`, a JSON object of expressions by name of a global of the
example's main module; `PUBLISHED_LOSSES`, the folder for losses; `PUBLISHED_PROCESS`, a name for
this process and its children; `PUBLISHED_RANDOM`, "no" for deterministic weights and data;
`PUBLISHED_ACCELERATORS`, "2" to report two accelerators.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing.process
import multiprocessing.spawn
import os
import random
import sys
import threading
import types


def _replace_accelerators(torch):
    """Replace moves to an accelerator by copies on the CPU; the result is another tensor, too."""

    def is_elsewhere(device):
        if isinstance(device, torch.device):
            return device.type != "cpu"
        is_name = isinstance(device, str) and device.startswith("cuda")
        return is_name or (isinstance(device, int) and not isinstance(device, bool))

    tensor_to, module_to = torch.Tensor.to, torch.nn.Module.to

    def to(self, *args, **kwargs):
        return self.clone() if args and is_elsewhere(args[0]) else tensor_to(self, *args, **kwargs)

    def moved(self, *args, **kwargs):
        return self if args and is_elsewhere(args[0]) else module_to(self, *args, **kwargs)

    torch.Tensor.to, torch.nn.Module.to = to, moved
    torch.Tensor.cuda = lambda self, *_, **__: self.clone()
    torch.nn.Module.cuda = lambda self, *_, **__: self


def _report_two_accelerators(torch):
    """Report two accelerators."""
    torch.accelerator.is_available = lambda: True
    torch.accelerator.device_count = lambda: 2
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cpu")
    torch.accelerator.device_index = lambda _: contextlib.nullcontext()


def _ignore_torchvision_operators(torch):
    """Ignore missing operators, since torchvision's wheel may be built for another torch."""
    real = torch.library.register_fake

    def register_fake(op, *args, **kwargs):
        if isinstance(op, str) and op.startswith("torchvision::"):
            return lambda function: function
        return real(op, *args, **kwargs)

    torch.library.register_fake = register_fake


def _remove_randomness(torch):
    """Replace random values that depend on the order of threads or on uninitialized memory."""
    longs = torch.LongTensor

    class LongTensor:  # must be a class: TorchScript checks for subclasses of it
        def __new__(cls, *sizes):
            if not all(isinstance(size, int) for size in sizes):
                return longs(*sizes)
            return torch.arange(longs(*sizes).numel()).reshape(sizes)

    def ramp(tensor, a=0.0, b=1.0, generator=None):
        with torch.no_grad():
            return tensor.copy_(torch.linspace(a, b, tensor.numel()).reshape(tensor.shape))

    torch.LongTensor, torch.nn.init.uniform_ = LongTensor, ramp
    torch.nn.functional.dropout = lambda input, *_, **__: input


def _make_additions_atomic(torch):
    """Make `a += b` atomic: concurrent additions by several threads would lose some of them."""
    lock, add = threading.Lock(), torch.Tensor.__iadd__

    def add_alone(self, other):
        with lock:
            return add(self, other)

    torch.Tensor.__iadd__ = add_alone


def _record_losses(functional, folder):
    def recorded(function):
        def calculate(*args, **kwargs):
            loss = function(*args, **kwargs)
            name = multiprocessing.process.current_process().name
            process = f"{os.environ.get('PUBLISHED_PROCESS', '')}-{name}"
            with open(os.path.join(folder, process), "a", encoding="utf-8") as file:
                file.write(f"{loss.item()!r}\n")
            return loss

        return calculate

    for name in ("cross_entropy", "mse_loss", "nll_loss"):
        setattr(functional, name, recorded(getattr(functional, name)))


def _shorten(values):
    """Set globals of the main module, once a child has imported it."""
    real = multiprocessing.spawn._fixup_main_from_path

    def import_main(path):
        real(path)
        main = vars(sys.modules["__main__"])
        # Not the module's own dict, which was copied.
        module_globals = next(
            (each.__globals__ for each in main.values() if _is_main_function(each)), main
        )
        for name, expression in values.items():
            if name not in module_globals:
                raise RuntimeError(
                    f"{path} has no {name!r}: this is another version of the example"
                )
            module_globals[name] = eval(expression)

    multiprocessing.spawn._fixup_main_from_path = import_main


def _is_main_function(value):
    return isinstance(value, types.FunctionType) and value.__module__ == "__mp_main__"


def _set_up():
    import torch

    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    _replace_accelerators(torch)
    if os.environ.get("PUBLISHED_ACCELERATORS") == "2":
        _report_two_accelerators(torch)
    _ignore_torchvision_operators(torch)
    _make_additions_atomic(torch)
    if os.environ.get("PUBLISHED_RANDOM") == "no":
        _remove_randomness(torch)
    if folder := os.environ.get("PUBLISHED_LOSSES"):
        _record_losses(torch.nn.functional, folder)
    _shorten(json.loads(os.environ.get("PUBLISHED_SET", "{}")))


# Not in a helper process of multiprocessing.
if "-c" not in sys.orig_argv or any("spawn_main" in each for each in sys.orig_argv):
    _set_up()
