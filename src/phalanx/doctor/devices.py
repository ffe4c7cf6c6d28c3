"""Checks of GPUs: usable by torch, or only known to the driver."""

from __future__ import annotations

import shutil
import subprocess

import torch
import torch.distributed as dist

from phalanx.doctor.finding import Finding, FindingFactory

__all__ = ["check"]

_finding = FindingFactory("devices")
_SECONDS = 20.0


def check() -> list[Finding]:
    """Compare the GPUs that torch can use with those that nvidia-smi lists."""
    installed = _driver_gpus()
    if torch.cuda.is_available():
        return [_usable_gpus()]
    if installed:
        return [
            _finding.note(
                "gpus",
                f"{len(installed)} GPUs ({installed[0]}), which torch {torch.__version__} "
                "can't use",
                "No action is needed on CPUs. Otherwise install the build of torch for this "
                "driver: see pytorch.org, Get Started.",
                installed=installed,
                usable=0,
            )
        ]
    return [
        _finding.ok("gpus", "no GPU; Phalanx is made for tensors on CPUs", installed=[], usable=0)
    ]


def _usable_gpus() -> Finding:
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    values = {"installed": names, "usable": len(names), "nccl": dist.is_nccl_available()}
    counts = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    message = f"{counts}, CUDA {torch.version.cuda}"
    if not dist.is_nccl_available():
        advice = "Tensors on GPUs go through the memory of the host; a torch with NCCL avoids that."
        return _finding.note("gpus", f"{message}, no NCCL", advice, **values)
    numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    version = ".".join(map(str, numbers))
    return _finding.ok("gpus", f"{message}, NCCL {version}", **values)


def _driver_gpus() -> list[str]:
    """Return the names of the GPUs that nvidia-smi lists; empty if it is absent or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=name", "--format=csv,noheader"]
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return completed.stdout.split("\n")[:-1] if completed.returncode == 0 else []
