"""`phalanx bench` with real processes of every system; one system dies, one hangs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from phalanx.bench.operations import ALGORITHMS, OPERATIONS
from phalanx.cli import main
from tests import copies

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 100
ALGORITHM_NAMES = ("", *ALGORITHMS)
PHALANX = [copies.PHALANX]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PHALANX, "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def start_bench(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PHALANX, "bench", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def read_until(process: subprocess.Popen[str], word: str) -> None:
    """Read the output of a process up to a line that begins with `word`."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.strip().startswith(word):
            return
    pytest.fail(f"it never printed {word!r}, but:\n{''.join(lines)}")


def find_ranks(parent: int, system: str) -> list[psutil.Process]:
    """Return the rank processes of a system, in the order of their pids."""
    found = []
    for process in psutil.process_iter():
        try:
            arguments = process.cmdline()
        except psutil.Error:
            continue
        if arguments[1:2] and arguments[1].endswith("/rank.py") and arguments[4] == str(parent):
            found += [process] if arguments[2] == system else []
    return found


@pytest.mark.slow
def test_every_system_is_measured_stored_and_plotted(tmp_path: Path) -> None:
    result = bench(
        *("--op", "all_reduce,send_recv", "--sizes", "4,64KiB", "--rounds", "2"),
        *("--systems", "phalanx,gloo,openmpi,mpich"),
        *("--output", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    stored = json.loads((tmp_path / "out.json").read_text())
    assert stored["command"].startswith("phalanx bench --op")
    assert max(stored["bandwidth"].values()) > 1e8
    assert stored["versions"]["openmpi, running"].startswith("Open MPI v")
    assert stored["versions"]["mpich, running"].startswith("MPICH ")
    keys = [(measured["operation"], measured["size"]) for measured in stored["results"]]
    assert keys == [(name, size) for name in ("all_reduce", "send_recv") for size in (4, 65536)]
    for measured in stored["results"]:
        assert measured["limit"] > 0
        assert set(measured["timings"]) == {"phalanx", "gloo", "openmpi", "mpich"}
        for timing in measured["timings"].values():
            assert timing["rounds"] == 2
            assert 0 < timing["low"] <= timing["median"] <= timing["high"] < LIMIT
    assert result.stdout.count("64 KiB") == 2


@pytest.mark.slow
def test_every_operation_gives_the_expected_result(tmp_path: Path) -> None:
    """Otherwise the exit code is 1, and the output names the system."""
    result = bench(
        *("--nproc-per-node", "3", "--sizes", "1KiB", "--rounds", "2"),
        *("--systems", "phalanx,gloo,openmpi", "--output", str(tmp_path / "out.json")),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    stored = json.loads((tmp_path / "out.json").read_text())
    assert stored["wrong"] == []
    assert {measured["operation"] for measured in stored["results"]} == set(OPERATIONS)
    for measured in stored["results"]:
        assert set(measured["timings"]) == {"phalanx", "gloo", "openmpi"}, measured


@pytest.mark.slow
def test_algorithms_are_measured_beside_those_of_the_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = bench(
        *("--algorithms", "--nproc-per-node", "2", "--sizes", "4,1KiB", "--rounds", "2"),
        *("--output", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (report,) = json.loads((tmp_path / "out.json").read_text())["reports"]
    assert report["settings"]["ranks"] == 2
    assert report["wrong"] == report["notes"] == []
    assert [measured["size"] for measured in report["results"]] == [4, 1024]
    for measured in report["results"]:
        labels = [
            f"{name} {algorithm}".rstrip()
            for name in ("phalanx", "gloo")
            for algorithm in ALGORITHM_NAMES
        ]
        assert list(measured["timings"]) == labels
        for timing in measured["timings"].values():
            assert timing["rounds"] == 2
            assert 0 < timing["low"] <= timing["median"] <= timing["high"] < LIMIT
    assert result.stdout.count("1 KiB") == 2
    drawn = f"phalanx bench --algorithms --from {tmp_path}/out.json --plot {tmp_path}/again.png"
    monkeypatch.setattr(sys, "argv", drawn.split())
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    for name in ("out.png", "again.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_json_goes_to_stdout_and_tables_to_stderr() -> None:
    result = bench("--op", "barrier", "--rounds", "2", "--systems", "gloo", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    document = json.loads(result.stdout)
    assert document["format"] == "phalanx bench 3"
    (measured,) = document["results"]
    assert measured["operation"] == "barrier"
    assert measured["timings"]["gloo"]["rounds"] == 2
    assert "barrier, 2 ranks, us" in result.stderr


@pytest.mark.slow
def test_systems_that_die_or_hang_are_dropped_and_the_others_continue() -> None:
    with start_bench(
        "--op", "all_reduce,barrier", "--sizes", "4,1KiB", "--timeout", "40"
    ) as process:
        assert process.stdout is not None
        read_until(process, "4 B")  # more sizes follow, so both systems must answer again
        killed, stopped = find_ranks(process.pid, "mpich")[1], find_ranks(process.pid, "gloo")[1]
        killed.kill()
        stopped.suspend()
        rest = process.stdout.read()
        assert process.wait(LIMIT) == 0, rest
    dropped = dict(re.findall("^note: (.+) is dropped: (.+)$", rest, re.MULTILINE))
    assert dropped.keys() == {"mpich", "gloo"}
    assert f"(pid {killed.pid}) died during all_reduce" in dropped["mpich"]
    assert "no answer within 40 s to all_reduce" in dropped["gloo"]
    assert dropped["gloo"].endswith(f" (pid {stopped.pid})")
    headings, cells = (line.split() for line in rest.rstrip().splitlines()[-2:])
    assert headings[:5] == ["size", "phalanx", "prepared", "shared", "openmpi"]
    assert all(float(median) > 0 for median in cells[1:9:2])


@pytest.mark.slow
def test_no_rank_or_file_outlives_a_killed_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with start_bench("--sizes", "4", "--rounds", "100000", "--systems", "openmpi,mpich") as process:
        read_until(process, "size")
        ranks = [rank for name in ("openmpi", "mpich") for rank in find_ranks(process.pid, name)]
        process.kill()
    assert len(ranks) == 4
    _, left = psutil.wait_procs(ranks, timeout=20)
    assert left == []
    assert list(tmp_path.glob("phalanx-bench-*")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--op all_reduce,nonsense", "operation 'nonsense' given, expected"),
        ("--dtype float31", "dtype 'float31' given, expected"),
        ("--systems nccl", "system 'nccl' given, expected"),
        ("--sizes 6", "size '6' given, expected a multiple of 4 bytes (float32)"),
        ("--plot figures.pdfx", "expected a name that ends with .png or .svg"),
        ("--output no/such/folder.json", "there is no directory"),
        ("--from none.json", "give the file of the plot with --plot"),
        ("--from none.json --plot a.png", "can't read none.json"),
        (
            "--nproc-per-node 2,3",
            "--nproc-per-node '2,3' given, expected one number: several need --algorithms",
        ),
        ("--nproc-per-node 1", "--nproc-per-node '1' given, expected a number from 2 to 64"),
        ("--algorithms --op broadcast", "--op broadcast given, expected all_reduce"),
        ("--algorithms --systems mpich", "system 'mpich' given, expected one or several of"),
        ("--algorithms --from none.json --plot a.png", "can't read none.json"),
    ],
)
def test_an_invalid_option_is_reported_in_one_line(
    arguments: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["phalanx", "bench", *arguments.split()])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith("phalanx: error: ")
    assert message in error
    assert len(error.splitlines()) == 1


def test_too_few_ranks_are_rejected() -> None:
    result = bench("--nproc-per-node", "1")
    assert result.returncode == 2
    assert "--nproc-per-node" in result.stderr
    assert "Traceback" not in result.stderr
