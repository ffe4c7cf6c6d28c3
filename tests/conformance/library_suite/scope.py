"""The test files to run, and the tests that Phalanx does not pass, each with its reason."""

from __future__ import annotations

from fnmatch import fnmatchcase

__all__ = ["CPU_DEVICES", "DIFFERENCES", "LEFT_OUT", "SUITES", "difference", "suite_of"]

# Patterns of files in PyTorch's test/distributed, by the name of their suite.
SUITES: dict[str, tuple[str, ...]] = {
    "Device mesh": ("test_device_mesh.py",),
    "DTensor": (
        "tensor/test_*.py",
        "tensor/debug/test_*.py",
        "tensor/experimental/test_*.py",
    ),
    "Tensor parallelism": ("tensor/parallel/test_*.py",),
    "FSDP2 and replicate": ("_composable/**/test_*.py",),
    "FSDP1": ("fsdp/test_*.py",),
    "Checkpoint": ("checkpoint/**/test_*.py",),
    "Fault tolerance": ("test_c10d_fault_tolerance.py",),  # from PyTorch 2.14 on
    "Join": ("algorithms/test_join.py",),
    "ZeRO and other optimizers": ("optim/test_*.py",),
    "DDP hooks": ("algorithms/ddp_comm_hooks/test_*.py",),
    "Functional collectives": (
        "test_c10d_functional_native.py",
        "test_collective_utils.py",
        "test_control_collectives.py",
        "test_functional_*.py",
    ),
    "Sharded tensors": ("_shard/**/test_*.py",),
    "Pipelines": ("pipelining/test_*.py", "test_composability.py"),
    "Compiler": ("test_*_reordering.py", "test_dynamo_distributed.py", "test_inductor_*.py"),
}

# Suites whose tests ask for several accelerators, mostly without need: for these, the CPU counts as
# four devices.
CPU_DEVICES: dict[str, int] = {"FSDP2 and replicate": 4, "Checkpoint": 4}

# Files that match the patterns but are not run.
LEFT_OUT: dict[str, str] = {
    "tensor/test_dtensor_ops.py": (
        "thousands of tests of single operators, on a fake process group and on threads"
    ),
}

# Tests that pass on Gloo but not on Phalanx, by pattern.
DIFFERENCES: dict[str, str] = {}


def suite_of(file: str) -> str:
    """Return the name of the suite of a file."""
    return next(
        suite
        for suite, patterns in SUITES.items()
        if any(fnmatchcase(file, pattern.replace("**/", "*")) for pattern in patterns)
    )


def difference(test: str) -> str | None:
    """Return the reason why a test may fail on Phalanx; None if it must pass."""
    return next((why for each, why in DIFFERENCES.items() if fnmatchcase(test, each)), None)
