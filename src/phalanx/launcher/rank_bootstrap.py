"""Tie a process's lifetime to its parent's, then replace it by the requested program.

`phalanx run` starts each rank as `python -I -S rank_bootstrap.py PARENT HOSTS KEY PROGRAM ARG...`.
The file is run by its path and imports only the standard library, so it takes only some
milliseconds. Its settings survive exec, so the script runs in a process without any code of
Phalanx's launcher.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process (SIGKILL) when its parent dies.

    The kernel watches the thread that started this process, so the parent must keep that thread
    alive as long as its ranks.

    Args:
        parent: The pid of the parent. If it has already exited, this process is killed at once.

    Raises:
        OSError: The kernel refused the request.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent:  # the parent died before the kernel watched it
        os.kill(os.getpid(), signal.SIGKILL)


def set_simulated_host(hosts: int) -> None:
    """Assign this rank to a simulated host; the ranks are distributed evenly, in order.

    Args:
        hosts: The number of simulated hosts; 0 to simulate none.
    """
    if hosts:
        rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        os.environ["PHALANX_HOST_ID"] = f"simulated-{rank * hosts // ranks}"


def inherit_key(parent: int, descriptor: int) -> None:
    """Open the job's key, which the parent has in memory, so that the program inherits it.

    Args:
        parent: The pid of the parent.
        descriptor: The parent's descriptor of the key; -1 if there is none.

    Raises:
        OSError: The descriptor cannot be opened.
    """
    os.environ.pop("PHALANX_KEY_FD", None)
    if descriptor >= 0:
        inherited = os.open(f"/proc/{parent}/fd/{descriptor}", os.O_RDONLY)
        os.set_inheritable(inherited, True)
        os.environ["PHALANX_KEY_FD"] = str(inherited)


def main() -> None:
    """Apply all settings to this process, then replace it by the program on the command line."""
    parent, hosts, key, *command = sys.argv[1:]
    die_with_parent(int(parent))
    set_simulated_host(int(hosts))
    inherit_key(int(parent), int(key))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"can't start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
