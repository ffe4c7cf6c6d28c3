"""What Python imports first in each process of an example, on both transports alike.

It stands in for what the machine lacks (accelerators, a torchvision built for this torch), fixes
the seeds, makes the example short, and notes each loss. The example's files are not touched.

Environment: `PUBLISHED_SET`, a JSON object of expressions by global name of the example's main
module; `PUBLISHED_LOSSES`, the folder to note losses in; `PUBLISHED_WHO`, a name for this process
and those that it starts; `PUBLISHED_RANDOM`, "no": weights and data that aren't drawn;
`PUBLISHED_ACCELERATORS`, "2": who asks is told that there are two.
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


def _no_accelerator(torch):
    """What is moved to an accelerator is copied on the CPU; as there, it is another tensor."""

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


def _two_accelerators(torch):
    """For who asks whether there are."""
    torch.accelerator.is_available = lambda: True
    torch.accelerator.device_count = lambda: 2
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cpu")
    torch.accelerator.device_index = lambda _: contextlib.nullcontext()


def _operators_of_torchvision(torch):
    """Its wheel may be built for another torch; then its operators aren't there, nor needed."""
    real = torch.library.register_fake

    def register_fake(op, *args, **kwargs):
        if isinstance(op, str) and op.startswith("torchvision::"):
            return lambda function: function
        return real(op, *args, **kwargs)

    torch.library.register_fake = register_fake


def _nothing_random(torch):
    """Where threads, or memory that nobody has written, would decide what is drawn."""
    longs = torch.LongTensor

    class LongTensor:  # a class still: TorchScript asks whether others are subclasses of it
        def __new__(cls, *sizes):
            if not all(isinstance(size, int) for size in sizes):
                return longs(*sizes)
            return torch.arange(longs(*sizes).numel()).reshape(sizes)

    def ramp(tensor, a=0.0, b=1.0, generator=None):
        with torch.no_grad():
            return tensor.copy_(torch.linspace(a, b, tensor.numel()).reshape(tensor.shape))

    torch.LongTensor, torch.nn.init.uniform_ = LongTensor, ramp
    torch.nn.functional.dropout = lambda input, *_, **__: input


def _whole_additions(torch):
    """`a += b` by several threads at the same time loses some of them, on any transport."""
    lock, add = threading.Lock(), torch.Tensor.__iadd__

    def add_alone(self, other):
        with lock:
            return add(self, other)

    torch.Tensor.__iadd__ = add_alone


def _note_losses(functional, folder):
    def noted(function):
        def calculate(*args, **kwargs):
            loss = function(*args, **kwargs)
            name = multiprocessing.process.current_process().name
            who = f"{os.environ.get('PUBLISHED_WHO', '')}-{name}"
            with open(os.path.join(folder, who), "a", encoding="utf-8") as file:
                file.write(f"{loss.item()!r}\n")
            return loss

        return calculate

    for name in ("cross_entropy", "mse_loss", "nll_loss"):
        setattr(functional, name, noted(getattr(functional, name)))


def _shorten(values):
    """Set globals of the main module, once a child has imported it."""
    real = multiprocessing.spawn._fixup_main_from_path

    def import_main(path):
        real(path)
        main = vars(sys.modules["__main__"])
        # Not the module's own dict: it was copied.
        seen = next((each.__globals__ for each in main.values() if _is_of_main(each)), main)
        for name, expression in values.items():
            if name not in seen:
                raise RuntimeError(f"{path} has no {name!r}: it isn't the example it was")
            seen[name] = eval(expression)

    multiprocessing.spawn._fixup_main_from_path = import_main


def _is_of_main(what):
    return isinstance(what, types.FunctionType) and what.__module__ == "__mp_main__"


def _begin():
    import torch

    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    _no_accelerator(torch)
    if os.environ.get("PUBLISHED_ACCELERATORS") == "2":
        _two_accelerators(torch)
    _operators_of_torchvision(torch)
    _whole_additions(torch)
    if os.environ.get("PUBLISHED_RANDOM") == "no":
        _nothing_random(torch)
    if folder := os.environ.get("PUBLISHED_LOSSES"):
        _note_losses(torch.nn.functional, folder)
    _shorten(json.loads(os.environ.get("PUBLISHED_SET", "{}")))


# Not in a process that multiprocessing has for itself.
if "-c" not in sys.orig_argv or any("spawn_main" in each for each in sys.orig_argv):
    _begin()
