"""`PHALANX_PRELOAD`: the ranks of `phalanx run` are copies of a process that has the imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

LIMIT = 100
PHALANX = str(Path(sys.executable).with_name("phalanx"))

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a script with the modules preloaded that the variable names."""

    def run_script(
        text: str, *options: str, modules: str = "torch", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "script.py").write_text(text)
        command = [PHALANX, "run", *(options or ("--nproc-per-node", "2", "script.py"))]
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        return subprocess.run(
            command,
            env={**environment, "PHALANX_PRELOAD": modules, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )

    return run_script


def ranks_of(text: str) -> list[str]:
    """Return what each rank has printed, sorted."""
    return sorted(text.splitlines())


def test_ranks_are_copies_with_places_of_their_own(run: Run, tmp_path: Path) -> None:
    ended = run(
        """
import os, sys
loaded = {"torch", "wave"} <= {*sys.modules}
import torch, torch.distributed as dist
dist.init_process_group("phalanx")
total = torch.tensor(2.0 ** dist.get_rank())
dist.all_reduce(total)
names = (__name__, os.path.basename(__file__), sys.argv, os.path.basename(sys.path[0]))
print(loaded, int(total), torch.get_num_threads(), os.getpid() == os.getpgid(0), *names)
dist.destroy_process_group()
""",
        *("--nproc-per-node", "3", "script.py", "--tee", "x y"),
        modules="torch, wave",
        OMP_NUM_THREADS="2",
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    line = f"True 7 2 True __main__ script.py ['script.py', '--tee', 'x y'] {tmp_path.name}"
    assert ranks_of(ended.stdout) == [f"[rank {rank}] {line}" for rank in range(3)]


@pytest.mark.slow
def test_threads_are_shared_out(run: Run) -> None:
    ended = run("import torch; print(torch.get_num_threads())")
    assert ended.returncode == 0, ended.stderr
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    counts = [int(line.split()[-1]) for line in ended.stdout.splitlines()]
    assert len(counts) == 2
    assert all(count <= threads for count in counts)


@pytest.mark.slow
def test_output_is_not_buffered(run: Run) -> None:
    ended = run("import os; print('seen', end=''); os._exit(0)")
    assert ended.returncode == 0, ended.stderr
    assert ranks_of(ended.stdout) == ["[rank 0] seen", "[rank 1] seen"]


@pytest.mark.slow
def test_a_module(run: Run, tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("import sys; print(__name__, __spec__.name, sys.argv[1:])")
    ended = run("", *("--nproc-per-node", "1", "-m", "tool", "a"))
    assert (ended.returncode, ended.stdout) == (0, "[rank 0] __main__ tool ['a']\n"), ended.stderr


@pytest.mark.slow
def test_another_backend_is_replaced(run: Run) -> None:
    text = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
print(type(dist.group.WORLD).__module__.split(".")[0])
dist.destroy_process_group()
"""
    for options, variables in (
        (("--replace", "gloo"), {}),
        ((), {"PHALANX_REPLACE": "gloo"}),
        (("--replace", "gloo"), {"PHALANX_REPLACE": "mpi"}),
    ):
        ended = run(text, *("--nproc-per-node", "2", *options, "script.py"), **variables)
        assert ended.returncode == 0, ended.stderr
        assert ranks_of(ended.stdout) == ["[rank 0] phalanx", "[rank 1] phalanx"]


END = """
import os, signal, sys
def fail():
    {}
if os.environ["RANK"] == "1":
    fail()
"""


@pytest.mark.parametrize(
    ("statement", "code", "reason"),
    [
        ("sys.exit(7)", 7, "exited with code 7"),
        ("sys.exit('a reason')", 1, "a reason"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGINT)", 130, "was killed by SIGINT"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong"),
    ],
)
def test_an_end_is_that_of_a_process(run: Run, statement: str, code: int, reason: str) -> None:
    ended = run(END.format(statement))
    assert ended.returncode == code, ended.stderr
    assert "phalanx run: rank 1 (pid " in ended.stderr
    assert reason in ended.stderr


def test_a_traceback_has_the_frames_of_the_script(run: Run, tmp_path: Path) -> None:
    ended = run(END.format("raise ValueError('wrong')"), TORCH_CPP_LOG_LEVEL="ERROR")
    lines = [
        line.removeprefix("[rank 1] ")
        for line in ended.stderr.splitlines()
        if line.startswith("[rank 1]")
    ]
    path = tmp_path / "script.py"
    assert lines[0] == "Traceback (most recent call last):"
    assert [line for line in lines if "File" in line] == [
        f'  File "{path.name}", line 6, in <module>',
        f'  File "{path.name}", line 4, in fail',
    ], ended.stderr
    assert lines[-1] == "ValueError: wrong"


@pytest.mark.slow
def test_exit_handlers_run(run: Run) -> None:
    ended = run("import atexit; atexit.register(print, 'done')")
    assert ended.returncode == 0, ended.stderr
    assert ranks_of(ended.stdout) == ["[rank 0] done", "[rank 1] done"]


def test_ranks_start_again_as_copies(run: Run) -> None:
    ended = run(
        """
import os, sys
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(attempt, "torch" in sys.modules)
sys.exit(attempt == "0" and os.environ["RANK"] == "0")
""",
        *("--nproc-per-node", "2", "--max-restarts", "1", "script.py"),
    )
    assert ended.returncode == 0, ended.stderr
    # The launcher may stop rank 1 before it prints anything at its first start.
    assert {*ranks_of(ended.stdout)} >= {"[rank 0] 0 True", "[rank 0] 1 True", "[rank 1] 1 True"}


@pytest.mark.slow
def test_log_files(run: Run, tmp_path: Path) -> None:
    options = ("--nproc-per-node", "2", "--redirects", "1", "--log-dir", "logs", "script.py")
    ended = run("print('kept')", *options)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    kept = [path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")]
    assert kept == ["kept\n"] * 2


@pytest.mark.slow
def test_other_programs_do_without(run: Run) -> None:
    ended = run("", *("--nproc-per-node", "2", "--no-python", "echo", "x"))
    assert ended.returncode == 0, ended.stderr
    assert ranks_of(ended.stdout) == ["[rank 0] x", "[rank 1] x"]


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ("torch;numpy", "PHALANX_PRELOAD in the environment names 'torch;numpy': expected modules"),
        ("torch,absent_module", "PHALANX_PRELOAD in the environment: No module named 'absent_"),
    ],
)
def test_wrong_modules(run: Run, modules: str, message: str) -> None:
    ended = run("", modules=modules)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_the_process_to_copy_is_lost(run: Run) -> None:
    """The ranks go on; another start of them is an error."""
    ended = run(
        """
import os, psutil, sys, time
if os.environ["RANK"] == "1":
    time.sleep(1000)
others = psutil.Process(os.getppid()).children()
(template,) = [each for each in others if os.getsid(each.pid) != each.pid]
template.kill()
while template.status() != psutil.STATUS_ZOMBIE:
    time.sleep(0.01)
sys.exit(3)
""",
        *("--nproc-per-node", "2", "--max-restarts", "1", "script.py"),
    )
    assert ended.returncode == 1, ended.stderr
    assert "the process that ranks are copies of has ended" in ended.stderr


def test_no_process_outlives_the_launcher(run: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, time; open(os.environ['RANK'], 'w').close(); time.sleep(1000)"
    )
    launcher = subprocess.Popen(
        [PHALANX, "run", "--nproc-per-node", "2", "script.py"],
        env={**os.environ, "PHALANX_PRELOAD": "torch"},
        cwd=tmp_path,
    )
    while not all((tmp_path / rank).exists() for rank in "01"):
        assert launcher.poll() is None
    children: list[Any] = psutil.Process(launcher.pid).children(recursive=True)
    assert len(children) == 3
    launcher.send_signal(signal.SIGKILL)
    launcher.wait(LIMIT)
    _, left = psutil.wait_procs(children, timeout=LIMIT)
    assert [each for each in left if each.status() != psutil.STATUS_ZOMBIE] == []
