"""Kill a process at a given system call, by a small tracer based on ptrace.

Made for ranks of the fixture `ranks`: the tracing process must have no other children, and no
threads when it forks.
"""

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable

# linux/ptrace.h and linux/wait.h
_TRACEME, _SYSCALL, _SETOPTIONS = 0, 24, 0x4200
_TRACESYSGOOD, _TRACECLONE, _EXITKILL = 1, 8, 0x100000
_ALL = 0x40000000  # waitpid: cloned threads, too
_AT_CALL = signal.SIGTRAP | 0x80

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


def run_until(call: int, function: Callable[[], object]) -> bool:
    """Run a function in a child process and kill it as it enters system call number `call`.

    The calls of all threads count, from 1.

    Returns:
        True if the child was killed, False if it ended normally before.
    """
    child = os.fork()
    if child == 0:
        _run_traced(function)
    os.waitpid(child, _ALL)
    _ptrace(_SETOPTIONS, child, _TRACESYSGOOD | _TRACECLONE | _EXITKILL)
    _ptrace(_SYSCALL, child, 0)
    inside: set[int] = set()
    calls = 0
    while True:
        thread, status = os.waitpid(-1, _ALL)
        if not os.WIFSTOPPED(status):
            inside.discard(thread)
            if thread == child:
                return _check_exit(status, calls >= call)
            continue
        signal_number = os.WSTOPSIG(status)
        if signal_number == _AT_CALL:
            inside ^= {thread}
            calls += thread in inside
            if thread in inside and calls == call:
                os.kill(child, signal.SIGKILL)
        if signal_number in (_AT_CALL, signal.SIGTRAP, signal.SIGSTOP):
            signal_number = 0
        _ptrace(_SYSCALL, thread, signal_number)


def _run_traced(function: Callable[[], object]) -> None:
    try:
        _ptrace(_TRACEME, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        function()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def _check_exit(status: int, killed: bool) -> bool:
    code = os.waitstatus_to_exitcode(status)
    if code != (-signal.SIGKILL if killed else 0):
        raise RuntimeError(f"the traced child ended with {code}")
    return killed


def _ptrace(request: int, thread: int, data: int) -> None:
    # The thread may have been killed meanwhile; the next waitpid reports it.
    if _libc.ptrace(request, thread, None, data) < 0 and ctypes.get_errno() != 3:  # ESRCH
        raise OSError(ctypes.get_errno(), f"ptrace({request}): {os.strerror(ctypes.get_errno())}")
