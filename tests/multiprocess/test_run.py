"""`phalanx run`, with real processes and real signals."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading

import psutil
import pytest

from phalanx.errors import UsageError
from phalanx.launcher.arguments import parse_arguments
from phalanx.launcher.options import make_job, rendezvous_timeout
from phalanx.launcher.rendezvous import open_rendezvous
from tests import copies

BACKEND = "phalanx"
LIMIT = 60
"""The maximum duration of a command, in seconds."""

PHALANX = [copies.PHALANX]
C10D = "--rdzv-backend c10d --rdzv-id x --rdzv-endpoint"
VARIABLES = ("OMP_NUM_THREADS", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PET_NPROC_PER_NODE")


@pytest.fixture
def phalanx(tmp_path):
    """Return a function that runs the command in its own directory and temporary directory."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    started = []

    def start(*args, command=PHALANX):
        process = subprocess.Popen(
            [*command, *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**environ, "TMPDIR": str(temporary)},
        )
        watchdog = threading.Timer(LIMIT, process.kill)
        watchdog.start()
        started.append((process, watchdog))
        return process

    def run(*args):
        process = start(*args)
        out, err = process.communicate(timeout=LIMIT)
        assert list(temporary.iterdir()) == []
        return process.returncode, out, err

    run.start, run.directory = start, tmp_path
    yield run
    for process, watchdog in started:
        watchdog.cancel()
        process.kill()
        process.communicate()


@pytest.fixture
def script(tmp_path):
    """Return a function that writes a script."""

    def write(text, name="script.py"):
        (tmp_path / name).write_text(f"import os, sys\nrank = int(os.environ['RANK'])\n{text}")
        return name

    return write


def has_ended(pid):
    """Return whether a process ends within 10 s; in a container an orphan may remain a zombie."""
    try:
        process = psutil.Process(pid)
        _, alive = psutil.wait_procs([process], timeout=10)
        return not alive or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def launcher_lines(err):
    """Return the launcher's own lines, up to the explanation of the job."""
    lines = [line for line in err.splitlines() if not line.startswith("[rank ")]
    return lines[: lines.index("")] if "" in lines else lines


@pytest.mark.sampled(1)
@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_ranks_form_a_group(phalanx, script, nprocs):
    name = script(
        f"""
import torch, torch.distributed as dist, phalanx
with phalanx.init({BACKEND!r}, device="cpu") as session:
    tensor = torch.tensor([2.0 ** session.rank])
    dist.all_reduce(tensor)
    print("sum", int(tensor), "of", session.world_size, sys.argv[1:])
print("threads", os.environ["OMP_NUM_THREADS"], file=sys.stderr)
"""
    )
    code, out, err = phalanx("run", "--nproc-per-node", nprocs, name, "--tee", "x y")
    assert code == 0, err
    expected = f"sum {2**nprocs - 1} of {nprocs} ['--tee', 'x y']"
    assert sorted(out.splitlines()) == [f"[rank {r}] {expected}" for r in range(nprocs)]
    threads = max(1, len(os.sched_getaffinity(0)) // nprocs)
    found = re.findall(r"^\[rank (\d)\] threads (\d+)$", err, re.MULTILINE)
    assert sorted(int(rank) for rank, _ in found) == list(range(nprocs))
    assert {int(count) <= threads for _, count in found} == {True}
    assert launcher_lines(err) == []


def test_output_is_live_and_prefixed_with_the_rank(phalanx, script):
    name = script(
        """
import pathlib, time
print("first line")
print("a prompt: ", end="", file=sys.stderr)
while not pathlib.Path("go").exists():
    time.sleep(0.01)
print("second line")
"""
    )
    process = phalanx.start("run", "--nproc-per-node", "1", name)
    assert process.stdout.readline() == "[rank 0] first line\n"
    assert process.stderr.read(len("[rank 0] a prompt: ")) == "[rank 0] a prompt: "
    assert process.poll() is None
    (phalanx.directory / "go").touch()
    out, _ = process.communicate(timeout=LIMIT)
    assert out == "[rank 0] second line\n"
    assert process.returncode == 0


COLLECTIVE = f"""
import torch, torch.distributed as dist
dist.init_process_group({BACKEND!r})
dist.all_reduce(torch.ones(1))
if rank == 1:
    {{action}}
dist.barrier()
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("action", "code", "headline", "detail"),
    [
        ("raise KeyError('the cause')", 1, "exited with code 1", "KeyError: 'the cause'"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL", None),
        ("os._exit(7)", 7, "exited with code 7", None),
    ],
)
def test_report_names_the_rank_that_failed_first(phalanx, script, action, code, headline, detail):
    name = script(COLLECTIVE.format(action=action))
    got, _, err = phalanx("run", "--nproc-per-node", "3", name)
    assert got == code
    first, *rest = launcher_lines(err)
    detail = "" if detail is None else f": {detail}"
    assert re.match(rf"phalanx run: rank 1 \(pid \d+\) {headline}{detail}", first)
    assert re.search(r"(stopped|failed) because of it: rank 0", "\n".join(rest))
    assert len(rest) < 3


@pytest.mark.slow
def test_an_earlier_consequence_does_not_mask_the_cause(phalanx, script):
    name = script(
        """
import pathlib, time
if rank == 0:
    pathlib.Path("new").write_text(str(os.getpid()))
    pathlib.Path("new").rename("sign")
    raise ConnectionResetError("Connection reset by peer")
while not pathlib.Path("sign").exists():
    time.sleep(0.01)
status = pathlib.Path("/proc", pathlib.Path("sign").read_text(), "stat")
while ") Z " not in status.read_text():
    time.sleep(0.01)
sys.exit(5)
"""
    )
    code, _, err = phalanx("run", "--nproc-per-node", "2", name)
    assert code == 5
    lines = launcher_lines(err)
    assert re.match(r"phalanx run: rank 1 \(pid \d+\) exited with code 5", lines[0])
    assert re.match(r"  after it, rank 0 .*ConnectionResetError", lines[-1])


@pytest.mark.slow
def test_ranks_that_ignore_sigterm_are_killed(phalanx, script):
    name = script(
        """
import signal, time, pathlib
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(f"ready{rank}").touch()
while not (pathlib.Path("ready0").exists() and pathlib.Path("ready1").exists()):
    time.sleep(0.01)
if rank == 0:
    sys.exit(3)
time.sleep(50)
"""
    )
    code, _, err = phalanx("run", "--nproc-per-node", "2", "--shutdown-timeout", "1", name)
    assert code == 3
    assert launcher_lines(err)[-1] == "  stopped because of it: rank 1"


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_the_agent(phalanx, script, number):
    name = script("import time\nprint('pid', os.getpid())\ntime.sleep(50)\n")
    process = phalanx.start("run", "--nproc-per-node", "3", name)
    pids = [int(process.stdout.readline().split()[-1]) for _ in range(3)]
    process.send_signal(number)
    ended = [has_ended(pid) for pid in pids]
    _, err = process.communicate(timeout=LIMIT)
    assert all(ended)
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 128 + number, err
        assert launcher_lines(err) == [f"phalanx run: stopped by {number.name}"], err


def test_a_signal_before_the_start_of_a_rank_is_recorded(phalanx, script):
    program = """
import os, signal
from phalanx.cli import main
from phalanx.launcher.elastic_agent import Agent
Agent._record_start = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
main()
"""
    name = script("import time\ntime.sleep(50)\n")
    command = [sys.executable, "-c", program]
    process = phalanx.start("run", "--nproc-per-node", "2", name, command=command)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert launcher_lines(err) == ["phalanx run: stopped by SIGTERM"], err


def test_restart_after_a_failure(phalanx, script):
    action = "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os._exit(5)"
    name = script(COLLECTIVE.format(action=action) + "print('done')\n")
    code, out, err = phalanx("run", "--nproc-per-node", "2", "--max-restarts", "1", name)
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[rank 0] done", "[rank 1] done"]
    lines = launcher_lines(err)
    assert re.match(r"phalanx run: rank 1 .* exited with code 5", lines[0])
    assert lines[-1] == "  restarting all ranks"


@pytest.mark.slow
def test_modules_programs_and_log_files(phalanx, script):
    script("print('module', sys.argv[1:])", "some_module.py")
    code, out, err = phalanx("run", "--nproc_per_node=1", "-m", "some_module", "-m", "x")
    assert (code, out) == (0, "[rank 0] module ['-m', 'x']\n"), err
    code, out, err = phalanx("run", "--no-python", "--nproc-per-node", "1", "echo", "a program")
    assert (code, out) == (0, "[rank 0] a program\n"), err
    options = ("--tee", "3", "--log-dir", "logs", "--nproc-per-node", "2")
    code, out, err = phalanx("run", *options, "-m", "some_module")
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[rank 0] module []", "[rank 1] module []"]
    logs = [path.read_text() for path in (phalanx.directory / "logs").rglob("stdout.log")]
    assert logs == ["module []\n"] * 2


@pytest.mark.slow
def test_a_closed_output_ends_the_ranks(phalanx, script):
    name = script("while True: print('more')\n")
    process = phalanx.start("run", "--nproc-per-node", "1", name)
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    process.communicate(timeout=LIMIT)
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nothing.py", "there is no script 'nothing.py'"),
        (".", "directory without a __main__.py"),
        ("-m no_such_module", "there is no module 'no_such_module'"),
        ("--no-python no-such-program", "there is no program"),
        ("--nproc-per-node 0 x.py", "--nproc-per-node is 0: expected"),
        ("--nproc-per-node -1 x.py", "--nproc-per-node is -1: expected"),
        ("--nproc-per-node abc x.py", "--nproc-per-node is 'abc': expected"),
        ("--nnodes 2:1 x.py", "--nnodes is '2:1'"),
        ("--nnodes x x.py", "--nnodes is 'x'"),
        ("--nnodes 2 --node-rank 2 x.py", "--node-rank is 2: expected 0 to 1"),
        ("--key-fd x x.py", "--key-fd is 'x': expected the number of an open file"),
        ("--key-fd 0 --key-file k x.py", "--key-file and --key-fd are both given"),
        ("--key-file none x.py", "--key-file is none, which cannot be read"),
        ("--master-port 70000 x.py", "--master-port is 70000"),
        ("--master-port x x.py", "argument --master-port"),
        ("--bogus x.py", "unrecognized arguments: --bogus"),
        ("--tee 9 x.py", "--tee is '9': expected 0, 1"),
        ("--local-ranks-filter x x.py", "comma-separated list of integers"),
        ("--max-restarts -1 x.py", "--max-restarts is -1: expected an integer, at least 0"),
        ("--rdzv-conf a x.py", "must have a value"),
        ("--nnodes 2 --rdzv-conf timeout=abc x.py", "timeout=abc: expected an integer from 1 to"),
        ("--nnodes 2 --rdzv-conf timeout=2.5 x.py", "timeout=2.5: expected an integer"),
        (f"--nnodes 2 {C10D} a --rdzv-conf read_timeout=x x.py", "read_timeout=x: expected"),
        (f"--nnodes 2 {C10D} a --rdzv-conf join_timeout=0 x.py", "join_timeout=0: expected"),
        (f"--nnodes 2 {C10D} a --rdzv-conf is_host=maybe x.py", "is_host=maybe: expected true"),
        (f"--nnodes 2 {C10D} node-a:99999 x.py", "'node-a:99999'.*expected HOST:PORT.*65535"),
        (f"--nnodes 2 {C10D} node-a:abc x.py", "'node-a:abc' in --rdzv-endpoint"),
        (f"--nnodes 2 {C10D} node-a:0 x.py", "a port from 1 to 65535"),
        ("--nnodes 2 --master-addr fe80::1%eth0 x.py", "or --master-addr: expected"),
        ("--nnodes 2 --master-addr a..b x.py", "'a..b:29500'.*expected HOST:PORT"),
        ("--key-fd 99999999999999999999 x.py", "which is not the number of an open file"),
        ("", "no script: expected"),
    ],
)
def test_invalid_arguments(arguments, message, tmp_path, monkeypatch):
    (tmp_path / "x.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        make_job(parse_arguments(arguments.split()))


@pytest.mark.slow
def test_a_signal_at_the_end_of_the_job(script, tmp_path):
    """The signal arrives when all ranks have exited."""
    code = (
        "import os, signal; from phalanx.launcher.output_forwarder import OutputForwarder; "
        "OutputForwarder.wait_for_exits = lambda *_: os.kill(os.getpid(), signal.SIGTERM); "
        "from phalanx.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "run", "--nproc-per-node", "1"]
    command.append(script("sys.exit(3)"))
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=LIMIT)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert done.stderr.endswith("phalanx run: stopped by SIGTERM\n"), done.stderr
    assert "Traceback" not in done.stderr


def test_a_master_address_with_a_blank(tmp_path, monkeypatch):
    (tmp_path / "x.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"'node a:29500'.*without blanks"):
        make_job(parse_arguments(["--nnodes", "2", "--master-addr", "node a", "x.py"]))


@pytest.mark.parametrize("number", ("0", "1"))
def test_a_missing_interface(number, tmp_path, monkeypatch):
    (tmp_path / "x.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_INTERFACE", "eth77")
    options = ["--nnodes", "2", "--node-rank", number, "--master-addr", "127.0.0.1"]
    job = make_job(parse_arguments([*options, "--rdzv-conf", "timeout=1", "x.py"]))
    expected = pytest.raises(UsageError, match="PHALANX_INTERFACE='eth77' in the environment: this")
    with expected, open_rendezvous(job, print):
        pass


@pytest.mark.parametrize(
    ("options", "seconds"), [("", 600), ("--rdzv-conf timeout=7", 7), (f"{C10D} a", 600)]
)
def test_rendezvous_timeout(options, seconds, tmp_path, monkeypatch):
    (tmp_path / "x.py").touch()
    monkeypatch.chdir(tmp_path)
    job = make_job(parse_arguments(f"--nnodes 2 {options} x.py".split()))
    assert rendezvous_timeout(job.config) == seconds


def test_an_unknown_rendezvous_backend(tmp_path, monkeypatch):
    (tmp_path / "x.py").touch()
    monkeypatch.chdir(tmp_path)
    job = make_job(parse_arguments(["--rdzv-backend", "nosuch", "x.py"]))
    expected = pytest.raises(UsageError, match=r"--rdzv-backend nosuch .* expected static, c10d")
    with expected, open_rendezvous(job, print):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.py"], "phalanx: error: there is no script 'nothing.py': looked in "),
        ([], "phalanx: error: no script"),
    ],
)
def test_an_invalid_argument_is_one_line(phalanx, arguments, message):
    code, out, err = phalanx("run", *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(message)


@pytest.mark.slow
def test_a_port_in_use_is_one_line(phalanx, script):
    name = script("")
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = phalanx("run", "--nproc-per-node", "2", "--master-port", port, name)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert f"127.0.0.1:{port} is in use" in err


def test_help_does_not_import_torch():
    code = (
        "import sys\nfrom phalanx.cli import main\ntry:\n    main()\n"
        "finally:\n    print('torch' in sys.modules)"
    )
    for arguments, words in (
        (["--help"], ["run", "Commands", "inspect jobs"]),
        (
            ["run", "--help"],
            ["--nproc-per-node 4 train.py", "--max-restarts", "[rank N]", "phalanx explain"],
        ),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env={**os.environ, "COLUMNS": "100"},
        )
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "False"), done.stderr
        assert all(word in done.stdout for word in words)


def test_number_of_ranks(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    monkeypatch.delenv("PET_NPROC_PER_NODE", raising=False)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr("phalanx.launcher.options.usable_cores", lambda: 5)
    assert make_job(parse_arguments(["x.py"])).config.nproc_per_node == 5
    assert make_job(parse_arguments(["--nproc-per-node=auto", "x.py"])).config.nproc_per_node == 5
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 3)
    assert make_job(parse_arguments(["x.py"])).config.nproc_per_node == 3
    assert make_job(parse_arguments(["--nproc-per-node=cpu", "x.py"])).config.nproc_per_node == 5
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    assert make_job(parse_arguments(["x.py"])).config.nproc_per_node == 2
