"""Environment variables that a rank gets unless the user has set them."""

from collections.abc import Mapping

from phalanx.launch.cores import threads_per_rank

__all__ = ["rank_defaults"]

# Both or none: one alone switches off the C library's own adaptation and is worse than nothing.
_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(128 * 2**20),
}


def rank_defaults(nprocs: int, given: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment `given` for each of `nprocs` ranks on this host.

    Ranks share the cores, write their output at once, and say where they were when they crash.
    Their memory allocator keeps what a training step frees: where the kernel takes it back and
    hands it out anew, page by page, in every step, a small network's step took up to half longer.
    """
    defaults = {
        "OMP_NUM_THREADS": str(threads_per_rank(nprocs)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    if not _ALLOCATOR.keys() & given.keys():
        defaults |= _ALLOCATOR
    return {name: value for name, value in defaults.items() if name not in given}
