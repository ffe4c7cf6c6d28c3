"""`phalanx.launch`, with real processes and real signals."""

import contextlib
import importlib
import io
import linecache
import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

import phalanx
from phalanx.errors import LaunchError, UsageError
from phalanx.launcher.failures import (
    Failure,
    excerpt,
    find_exception,
    find_root_cause,
    format_report,
    mark_late_causes,
)
from tests.descriptors import list_descriptors
from tests.seeds import fresh_seed
from tests.waiting import wait_for

BACKEND = "phalanx"
LIMIT = 60
"""The maximum duration of a launch, in seconds."""

# The functions of ranks are nested, so that they are pickled by value, as from a notebook.


def python(*args, **options):
    return subprocess.run(
        [sys.executable, *args],
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        **options,
    )


def has_ended(pid):
    """Return whether a process ends within 10 s; in a container an orphan may remain a zombie."""
    try:
        process = psutil.Process(pid)
        _, alive = psutil.wait_procs([process], timeout=10)
        return not alive or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_results_in_rank_order_and_the_environment(nprocs):
    def rank(offset, *, scale):
        names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GROUP_RANK")
        number = int(os.environ["RANK"])
        return offset + scale * number, [os.environ[n] for n in names], os.environ["MASTER_PORT"]

    results = phalanx.launch(rank, nprocs, (5,), kwargs={"scale": 10}, timeout=LIMIT)
    size = str(nprocs)
    for number, (value, environ, port) in enumerate(results):
        assert value == 5 + 10 * number
        assert environ == [size, str(number), size, "127.0.0.1", "0"]
        assert port == results[0][2]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_ranks_form_a_group_and_may_leave_it_open(nprocs):
    backend, seed = BACKEND, fresh_seed()

    def rank():
        import numpy as np
        import torch
        import torch.distributed as dist

        dist.init_process_group(backend)
        data = np.random.default_rng(seed + dist.get_rank()).integers(-99, 99, 37)
        tensor = torch.from_numpy(data)
        dist.all_reduce(tensor)
        return tensor

    expected = sum(np.random.default_rng(seed + r).integers(-99, 99, 37) for r in range(nprocs))
    for total in phalanx.launch(rank, nprocs, timeout=LIMIT):
        assert total.tolist() == expected.tolist()


SNIPPET = """
import os
import phalanx

FACTOR = 21

def rank(base):
    return base + FACTOR * int(os.environ["RANK"])

print("results", phalanx.launch(rank, 2, (1,), timeout=50))
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("source", ["script", "command", "stdin", "repl"])
def test_launch_needs_no_main_guard_and_no_file(source, tmp_path):
    if source == "script":
        (tmp_path / "script.py").write_text(SNIPPET)
        # A module of this name beside the script must not shadow the standard library in ranks.
        (tmp_path / "tempfile.py").write_text("raise ImportError('shadowed')")
        done = python("-P" if sys.version_info >= (3, 11) else "-I", str(tmp_path / "script.py"))
    elif source == "command":
        done = python("-c", SNIPPET)
    elif source == "stdin":
        done = python("-", input=SNIPPET)
    else:
        done = python("-i", "-q", input=SNIPPET)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("results [1, 22]") == 1


class NotebookStream(io.TextIOBase):
    """A replacement of `sys.stdout` as in a notebook, without a descriptor or a buffer."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text
        return len(text)


def test_output_and_source_lines_of_a_notebook_cell(monkeypatch):
    source = "def rank():\n    print('in the cell, \\u00fc')\n    raise KeyError('from a cell')\n"
    name = "<cell 1>"
    monkeypatch.setitem(linecache.cache, name, (len(source), None, source.splitlines(True), name))
    scope = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), scope)
    cell = NotebookStream()
    monkeypatch.setattr(sys, "stdout", cell)
    with pytest.raises(LaunchError, match=r"raise KeyError\('from a cell'\)") as caught:
        phalanx.launch(scope["rank"], 1, timeout=LIMIT)
    assert isinstance(caught.value.__cause__, KeyError)
    assert cell.text == "in the cell, \u00fc\n"


def test_output_of_all_ranks(capfd):
    def rank():
        number = os.environ["RANK"]
        for i in range(300):
            sys.stdout.write(f"out {number} {i}\n")
            sys.stderr.write(f"err {number} {i}\n")
        sys.stdout.write("no end of line")

    phalanx.launch(rank, 2, prefix=True, timeout=LIMIT)
    out, err = capfd.readouterr()
    for name, text in (("out", out), ("err", err)):
        for number in range(2):
            own_lines = [
                line for line in text.splitlines() if line.startswith(f"[rank {number}] {name}")
            ]
            assert own_lines == [f"[rank {number}] {name} {number} {i}" for i in range(300)]
    assert len(err.splitlines()) == 600
    assert sorted(line for line in out.splitlines() if "no end" in line) == [
        "[rank 0] no end of line",
        "[rank 1] no end of line",
    ]


def test_big_output_argument_and_result(capfd):
    def rank(data):
        sys.stdout.write("x" * 3_000_000 + "\n")
        sys.stderr.write("y" * 3_000_000 + "\n")
        return data[::-1]

    data = np.random.default_rng(fresh_seed()).bytes(30_000_001)
    assert phalanx.launch(rank, 2, (data,), timeout=LIMIT) == [data[::-1]] * 2
    out, err = capfd.readouterr()
    assert (out.count("x"), err.count("y")) == (6_000_000, 6_000_000)


def launch_with_failing_rank(action):
    """Run three ranks; rank 1 calls `action` while the others are in a collective."""
    backend = BACKEND

    def rank():
        import torch
        import torch.distributed as dist

        dist.init_process_group(backend)
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            action()
        dist.barrier()

    with pytest.raises(LaunchError) as caught:
        phalanx.launch(rank, 3, timeout=LIMIT)
    return caught.value


def test_the_first_real_error_is_raised():
    class WrongError(ValueError):
        pass

    def action():
        raise WrongError("this is the cause")

    error = launch_with_failing_rank(action)
    message = str(error)
    assert re.match(r"rank 1 \(pid \d+\) raised .*WrongError: this is the cause\n", message)
    assert 'raise WrongError("this is the cause")' in message
    assert "gloo" not in message
    assert isinstance(error.__cause__, WrongError)  # the same class as in the caller


def test_a_killed_rank_is_reported():
    error = launch_with_failing_rank(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert re.match(r"rank 1 \(pid \d+\) was killed by SIGKILL", str(error))
    assert error.__cause__ is None


def test_an_earlier_consequence_does_not_mask_the_cause(tmp_path):
    marker = tmp_path / "sign"

    def rank():
        if os.environ["RANK"] == "0":
            marker.with_suffix(".new").write_text(str(os.getpid()))
            marker.with_suffix(".new").rename(marker)
            raise ConnectionResetError("Connection reset by peer")
        while not marker.exists():
            time.sleep(0.01)
        status = marker.__class__("/proc", marker.read_text(), "stat")
        while ") Z " not in status.read_text():  # until rank 0 is dead
            time.sleep(0.01)
        raise ZeroDivisionError("the cause")

    with pytest.raises(
        LaunchError, match=r"^rank 1 \(pid \d+\) raised ZeroDivisionError"
    ) as caught:
        phalanx.launch(rank, 2, timeout=LIMIT)
    assert "Failed after it: rank 0." in str(caught.value)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import ctypes; ctypes.string_at(0)", r"was killed by SIGSEGV\n\n.*\n.*Segmentation"),
        ("sys.exit(3)", "exited with code 3"),
        ("os._exit(0)", "exited with code 0 before it had returned a result"),
        ("os.kill(os.getpid(), 15)", "was killed by SIGTERM"),
    ],
)
def test_other_exits(code, message):
    def rank():
        exec(code, {"os": os, "sys": sys})

    with pytest.raises(LaunchError, match=rf"^rank 0 \(pid \d+\) {message}"):
        phalanx.launch(rank, 1, timeout=LIMIT)


def test_sys_exit_0_is_a_success():
    assert phalanx.launch(sys.exit, 2, timeout=LIMIT) == [None, None]


def test_tensors_of_dtypes_that_torch_cannot_pickle():
    import torch

    def same(tensors):
        return [*tensors, torch.arange(3).to(torch.uint32)]

    given = [torch.arange(3).to(dtype) for dtype in (torch.uint16, torch.float8_e4m3fn)]
    (results,) = phalanx.launch(same, 1, (given,))
    assert [each.dtype for each in results] == [torch.uint16, torch.float8_e4m3fn, torch.uint32]
    assert all(each.tolist() == [0, 1, 2] for each in results)


def test_unpicklable_results_and_errors():
    class OddError(Exception):
        def __init__(self, left, right):
            super().__init__(f"{left} and {right}")

    def odd():
        raise OddError("left", "right")  # can be pickled, but not unpickled

    def locked():
        raise ValueError(threading.Lock())

    for rank, message in (
        (threading.Lock, "the result, of type lock, can't be pickled"),
        (odd, "raised .*OddError: left and right"),
        (locked, "raised ValueError: <unlocked"),
    ):
        with pytest.raises(LaunchError, match=message):
            phalanx.launch(rank, 1, timeout=LIMIT)


def test_ranks_that_ignore_sigterm_are_killed(monkeypatch):
    monkeypatch.setattr("phalanx.launcher.launch.STOP_TIMEOUT", 0.5)

    def rank():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.environ["RANK"] == "0":
            raise RuntimeError("over")
        time.sleep(LIMIT)

    # Fixtures of other modules may have child processes.
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(LaunchError, match=r"rank 0 .*over"):
        phalanx.launch(rank, 2, timeout=LIMIT)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_timeout():
    def rank():
        time.sleep(0 if os.environ["RANK"] == "0" else LIMIT)

    with pytest.raises(LaunchError, match=r"timeout: .* running after 1.5 s .*: rank 1$"):
        phalanx.launch(rank, 2, timeout=1.5)


def test_children_of_a_rank_end_with_the_launch():
    def rank():
        return subprocess.Popen(["sleep", str(LIMIT)]).pid

    (pid,) = phalanx.launch(rank, 1, timeout=LIMIT)
    assert has_ended(pid)


SLEEPER = """
import os, time
import phalanx

def rank():
    print("pid", os.getpid())
    time.sleep(50)

phalanx.launch(rank, 2, timeout=50)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_rank_outlives_the_caller(number):
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as caller:
        watchdog = threading.Timer(LIMIT, caller.kill)
        watchdog.start()
        ranks = [int(caller.stdout.readline().split()[1]) for _ in range(2)]
        caller.send_signal(number)
        ended = [has_ended(pid) for pid in ranks]
        _, err = caller.communicate(timeout=LIMIT)
        watchdog.cancel()
    assert all(ended)
    assert caller.returncode == -number
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)


def test_launch_leaves_no_descriptor_thread_or_handler():
    def state():
        handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        return handlers, dict(os.environ)

    phalanx.launch(os.getpid, 2, timeout=LIMIT)
    before, descriptors = state(), len(list_descriptors())
    for _ in range(3):
        phalanx.launch(os.getpid, 2, timeout=LIMIT)
        with contextlib.suppress(LaunchError):
            phalanx.launch(sys.exit, 2, (1,), timeout=LIMIT)
    assert state() == before
    wait_for(lambda: len(list_descriptors()) <= descriptors)


def test_launch_in_a_thread_and_within_a_rank():
    results = []

    def inner():
        return int(os.environ["RANK"])

    def outer():
        import phalanx

        return phalanx.launch(inner, 2, timeout=30)

    thread = threading.Thread(
        target=lambda: results.append(phalanx.launch(outer, 1, timeout=LIMIT))
    )
    thread.start()
    thread.join(LIMIT)
    assert results == [[[0, 1]]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: phalanx.launch(print, 0), "nprocs is 0: expected at least 1"),
        (lambda: phalanx.launch(print, -2), "nprocs is -2"),
        (lambda: phalanx.launch(print, 2.0), "nprocs is 2.0: expected an integer"),
        (lambda: phalanx.launch(print, True), "nprocs is True"),
        (lambda: phalanx.launch(2, print), "fn is 2: expected a function"),
        (lambda: phalanx.launch(print, 2, 3), "args is 3: expected a tuple"),
        (lambda: phalanx.launch(print, 2, "x"), "args is 'x': expected a tuple"),
        (lambda: phalanx.launch(print, 2, kwargs=[1]), r"kwargs is \[1\]"),
        (lambda: phalanx.launch(print, 2, timeout=0), "timeout is 0"),
        (lambda: phalanx.launch(print, 2, env={"A": 1}), "expected strings"),
        (lambda: phalanx.launch(print, 2, env={"RANK": "1"}), "env sets RANK"),
        (lambda: phalanx.launch(print, 2, (1, threading.Lock())), r"args\[1\] can't be pickled"),
        (lambda: phalanx.launch(threading.Lock().acquire, 2), "fn can't be pickled"),
    ],
)
def test_invalid_arguments_start_no_process(call, message, monkeypatch):
    def start(*args):
        pytest.fail("a process was started")

    monkeypatch.setattr("phalanx.launcher.launch.RankProcesses.start", start)
    with pytest.raises(UsageError, match=message):
        call()


def test_imports_of_the_launcher_keep_the_function():
    before = phalanx.launch
    agent = importlib.import_module("phalanx.launcher.elastic_agent")
    assert phalanx.launch is before
    assert phalanx.launcher.elastic_agent is agent
    assert callable(phalanx.launch)


def test_root_cause_among_failures():
    reset = "RuntimeError: Connection closed by peer [127.0.0.1]:1"
    lost = "Traceback ...\nphalanx.errors.PeerLost: rank 2 (pid 9) was killed by SIGKILL"
    first = find_root_cause(
        [
            Failure(0, 10, 1, 1.0, lost),
            Failure(1, 11, 1, 2.0, reset),
            Failure(2, 12, -9, 4.0),
            Failure(3, 13, 1, 3.0, "ValueError: x", stopped=True),
            Failure(4, 14, -6, 0.0, "terminate called after throwing\n" + reset),
        ]
    )
    assert first.rank == 2
    assert find_root_cause([Failure(0, 1, 1, 1.0, lost), Failure(1, 2, 1, 2.0, reset)]).rank == 1
    assert find_root_cause([Failure(3, 1, 1, 2.0, "A"), Failure(1, 2, 1, 2.0, "A")]).rank == 1


def test_a_cause_that_was_stopped_before_it_had_ended():
    """It had raised, and others name it; one that has only logged a traceback is none."""
    raised = "Traceback (most recent call last):\n  ...\nValueError: x"
    lost = "Traceback ...\nphalanx.errors.PeerLost: rank 2 (pid 9) has ended with ValueError: x"
    failures = [
        Failure(0, 10, 1, 1.0, lost),
        Failure(1, 11, -15, 2.0, raised, stopped=True),
        Failure(2, 9, -15, 3.0, raised, stopped=True),
        Failure(3, 12, -15, 4.0, lost.replace("...", "(most recent call last):"), stopped=True),
    ]
    cause = find_root_cause(mark_late_causes(failures))
    assert cause.headline.startswith("rank 2 (pid 9) raised an exception")
    assert cause.exit_code == 1
    assert mark_late_causes(failures[1:]) == failures[1:]


def test_the_same_exception_is_reported_once():
    trace = "Traceback (most recent call last):\n  File\nValueError: a"
    line = "ValueError: a (at x.py:3 in <module>, as on rank 2)"
    failures = [
        Failure(2, 12, 1, 5.0, trace, is_shown=True),
        Failure(0, 10, 1, 5.1, line, stopped=True, is_shown=True),
        Failure(3, 13, 1, 5.1, line, is_shown=True),
        Failure(1, 11, 1, 5.2, trace.replace("ValueError", "KeyError"), is_shown=True),
        Failure(4, 14, -signal.SIGTERM, 5.3, stopped=True),
    ]
    assert format_report(failures).splitlines() == [
        "rank 2 (pid 12) exited with code 1: ValueError: a",
        "  the same exception on rank 0, 3",
        "  after it, rank 1 (pid 11) exited with code 1: KeyError: a",
        "  stopped because of it: rank 4",
    ]
    # A late cause is found by its line, too.
    lost = Failure(5, 15, 1, 4.0, "PeerLost: rank 0 (pid 10) failed", is_shown=True)
    assert mark_late_causes([lost, failures[1]])[1].had_raised


def test_excerpt_is_the_last_chain_of_tracebacks():
    trace = "Traceback (most recent call last):\n"
    text = (
        f"{trace}old\nKeyError: 1\nlog\nlog\nlog\n{trace}a\nOSError: 1\n\nDuring handling of the "
        f"above exception, another exception occurred:\n\n[rank0]: {trace}[rank0]: b\nValueError: 2"
    )
    result = excerpt(text)
    assert result.startswith(f"{trace}a")
    assert result.endswith("b\nValueError: 2")
    assert "[rank0]" not in result
    assert excerpt("\n".join(map(str, range(30)))).splitlines() == [str(i) for i in range(20, 30)]
    long_excerpt = excerpt(trace + "\n".join(map(str, range(100)))).splitlines()
    assert len(long_excerpt) == 41
    assert (long_excerpt[0], long_excerpt[-1]) == (trace.strip(), "99")
    terminated = ["terminate called after throwing an instance of 'a::B'", "  what():  c"]
    stack = [f"  File {number}" for number in range(20)]
    assert excerpt("\n".join(["noise", *terminated, *stack])).splitlines() == [*terminated, *stack]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("only output\n", ""),
        (
            "noise\nTraceback (most recent call last):\n  File\n    code\nValueError: a\nb\n",
            "ValueError: a",
        ),
        (
            "Traceback (most recent call last):\n  File\nKeyError: 1\n\nDuring handling of the "
            "above exception, another exception occurred:\n\nTraceback (most recent call last):"
            "\n  File\nImportError: c",
            "ImportError: c",
        ),
        (
            '  File "x.py", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax',
            "SyntaxError: invalid syntax",
        ),
        ("Traceback (most recent call last):\n  File", ""),
        (
            "noise\nterminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
            "  what():  [enforce fail at pair.cc:446] a <= b. 400 vs 396\nFatal Python error: Abor",
            "gloo::EnforceNotMet: [enforce fail at pair.cc:446] a <= b. 400 vs 396",
        ),
        ("noise\nKeyError: 'a (b)' (at x.py:3 in f, as on rank 12)\n", "KeyError: 'a (b)'"),
        ("ValueError: a (as on rank 0)\n", "ValueError: a"),
    ],
)
def test_the_exception_at_the_end_of_stderr(text, expected):
    assert find_exception(text) == expected
