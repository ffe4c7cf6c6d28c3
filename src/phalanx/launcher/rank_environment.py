"""Environment variables that a rank gets unless the user has set them."""

from collections.abc import Mapping

import torch

from phalanx.launcher.cores import threads_per_rank

__all__ = ["rank_defaults"]

# Set both or none: either alone disables the C library's dynamic threshold and is worse than the
# default.
_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(128 * 2**20),
}


def rank_defaults(nprocs: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to the environment `environ` of each of `nprocs` ranks.

    Ranks share the cores of this host, write their output unbuffered and print a traceback when
    they crash. Their memory allocator keeps the memory that a training step frees. If the kernel
    instead reclaims and maps it again, page by page, in every step, a step of a small network
    takes up to half longer. On a host without an accelerator, Accelerate is told to use the CPU.
    """
    defaults = {
        "OMP_NUM_THREADS": str(threads_per_rank(nprocs)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    if not torch.accelerator.is_available():
        # Otherwise Accelerate treats a rank of a launcher as a process that trains alone.
        defaults["ACCELERATE_USE_CPU"] = "true"
    if not _ALLOCATOR.keys() & environ.keys():
        defaults |= _ALLOCATOR
    return {name: value for name, value in defaults.items() if name not in environ}
