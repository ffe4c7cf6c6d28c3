"""Checks of GPUs: usable by torch, or only known to the driver."""

from __future__ import annotations

import shutil
import subprocess

import torch
import torch.distributed as dist

from phalanx.doctor.finding import Finding, Says

__all__ = ["check"]

_says = Says("devices")
_SECONDS = 20.0


def check() -> list[Finding]:
    """Compare the GPUs that torch can use with those that nvidia-smi lists."""
    there = _driver()
    if torch.cuda.is_available():
        return [_usable()]
    if there:
        return [
            _says.note(
                "gpus",
                f"{len(there)} GPUs ({there[0]}), which torch {torch.__version__} can't use",
                "Nothing to do for work on CPUs. Else install the build of torch for this driver: "
                "see pytorch.org, Get Started.",
                there=there,
                usable=0,
            )
        ]
    return [_says.ok("gpus", "no GPU: tensors on CPUs are what Phalanx is for", there=[], usable=0)]


def _usable() -> Finding:
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    values = {"there": names, "usable": len(names), "nccl": dist.is_nccl_available()}
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    words = f"{kinds}, CUDA {torch.version.cuda}"
    if not dist.is_nccl_available():
        advice = "Tensors on GPUs go through the memory of the host; a torch with NCCL avoids that."
        return _says.note("gpus", f"{words}, no NCCL", advice, **values)
    numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    version = ".".join(map(str, numbers))
    return _says.ok("gpus", f"{words}, NCCL {version}", **values)


def _driver() -> list[str]:
    """Return the names of the GPUs that nvidia-smi lists; empty if it is absent or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=name", "--format=csv,noheader"]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return ended.stdout.split("\n")[:-1] if ended.returncode == 0 else []
