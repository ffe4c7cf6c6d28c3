"""Requirements of a launcher on its host, checked before any resource is created."""

import os
import resource

from phalanx.errors import LaunchError

__all__ = ["check_host"]

_OPEN_FILES = "/proc/self/fd"
# Measured with `phalanx run`, which needs most: 21 files, and 5.3 more per rank.
_FILES, _FILES_PER_RANK = 24, 6


def check_host(nprocs: int) -> None:
    """Check that this process can start `nprocs` ranks.

    Raises:
        LaunchError: `/proc` is not mounted, or this process may not open enough files.
    """
    try:
        open_files = (
            len(os.listdir(_OPEN_FILES)) - 1
        )  # without the descriptor of the listing itself
    except OSError as error:
        raise LaunchError(
            f"can't read {_OPEN_FILES} ({error.strerror}): Phalanx needs /proc to share memory "
            "between ranks and to watch them; mount it, for example with `mount -t proc proc /proc`"
        ) from None
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = open_files + _FILES + _FILES_PER_RANK * nprocs
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise LaunchError(
            f"this process may have {limit} files open and has {open_files}, but needs {needed} to "
            f"start {nprocs} rank{'s' * (nprocs > 1)}: raise the limit, for example with "
            f"`ulimit -n {max(1024, needed)}`"
        )
