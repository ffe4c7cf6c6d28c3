"""The environment of a rank: variables for its rendezvous, and defaults for other variables."""

from collections.abc import Mapping

import torch

from phalanx.launcher.host_resources import threads_per_rank
from phalanx.launcher.store import HOST

__all__ = ["rank_defaults", "rank_variables"]

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


def rank_variables(
    rank: int, nprocs: int, store_port: int, run_id: str | None = None
) -> dict[str, str]:
    """Return the variables from which a rank of this host finds its peers, named as torchrun's.

    Args:
        rank: The rank.
        nprocs: The number of ranks, all on this host.
        store_port: The port of the ranks' store, on the loopback interface.
        run_id: The name of the run, for the variables of torchrun's agent; None to omit these.
    """
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(nprocs),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(store_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if run_id is not None:
        variables |= {
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(nprocs),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_ERROR_FILE": "",
        }
    return variables
