"""Tie a process's life to its parent's, then become the program that was asked for.

`phalanx run` starts each rank as `python -I -S child.py PARENT HOSTS KEY PROGRAM ARG...`: the file
is run by its path and imports only the standard library, so that it costs some milliseconds. What
it sets survives exec, so the script runs as its own process, with nothing of ours in it.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process (SIGKILL) when its parent dies.

    The kernel watches the thread that started this process: the starter keeps that thread alive
    as long as its ranks.

    Args:
        parent: the parent's pid; if it is gone already, this process ends here.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent:  # it died before the kernel was told to watch it
        os.kill(os.getpid(), signal.SIGKILL)


def take_place(hosts: int) -> None:
    """Have this rank take itself for one of a simulated host: they get equally many, in order.

    Args:
        hosts: how many there are; 0 for none that is simulated.
    """
    if hosts:
        rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        os.environ["PHALANX_HOST_ID"] = f"simulated-{rank * hosts // ranks}"


def take_key(parent: int, descriptor: int) -> None:
    """Open the job's key, which the parent has in memory; the program inherits it.

    Args:
        parent: The parent's pid.
        descriptor: The number under which the parent has it; -1 if there is none.

    Raises:
        OSError: It can't be opened.
    """
    os.environ.pop("PHALANX_KEY_FD", None)
    if descriptor >= 0:
        own = os.open(f"/proc/{parent}/fd/{descriptor}", os.O_RDONLY)
        os.set_inheritable(own, True)
        os.environ["PHALANX_KEY_FD"] = str(own)


def main() -> None:
    """Guard this process, then replace it by the program on the command line."""
    parent, hosts, key, *command = sys.argv[1:]
    die_with_parent(int(parent))
    take_place(int(hosts))
    take_key(int(parent), int(key))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"can't start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
