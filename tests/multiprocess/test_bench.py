"""`phalanx bench` with real processes of every system; one of them dies, one hangs."""

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

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 100
WAYS = ("", *ALGORITHMS)
PHALANX = [sys.executable, "-c", "from phalanx.cli import main; main()"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PHALANX, "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def running(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PHALANX, "bench", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def until(process: subprocess.Popen[str], word: str) -> None:
    """Read what the process prints up to a line that begins with `word`."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if line.strip().startswith(word):
            return
    pytest.fail(f"it never printed {word!r}, but:\n{''.join(said)}")


def ranks_of(parent: int, system: str) -> list[psutil.Process]:
    """The processes that measure a system, whoever has started them, in the order of their pids."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if words[1:2] and words[1].endswith("/rank.py") and words[4] == str(parent):
            found += [process] if words[2] == system else []
    return found


def test_every_system_is_measured_stored_and_drawn(tmp_path: Path) -> None:
    result = bench(
        *("--op", "all_reduce,send_recv", "--sizes", "4,64KiB", "--rounds", "2"),
        *("--systems", "phalanx,gloo,openmpi,mpich"),
        *("--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    stored = json.loads((tmp_path / "out.json").read_text())
    assert stored["command"].startswith("phalanx bench --op")
    assert max(stored["bandwidth"].values()) > 1e8
    assert stored["versions"]["openmpi, running"].startswith("Open MPI v")
    assert stored["versions"]["mpich, running"].startswith("MPICH ")
    keys = [(figure["operation"], figure["size"]) for figure in stored["figures"]]
    assert keys == [(name, size) for name in ("all_reduce", "send_recv") for size in (4, 65536)]
    for figure in stored["figures"]:
        assert figure["limit"] > 0
        assert set(figure["timings"]) == {"phalanx", "gloo", "openmpi", "mpich"}
        for timing in figure["timings"].values():
            assert timing["rounds"] == 2
            assert 0 < timing["low"] <= timing["median"] <= timing["high"] < LIMIT
    assert result.stdout.count("64 KiB") == 2


def test_every_operation_gives_the_expected_result(tmp_path: Path) -> None:
    """The exit code would be 1 otherwise, and the system would be named."""
    result = bench(
        *("--ranks", "3", "--sizes", "1KiB", "--rounds", "2"),
        *("--systems", "phalanx,gloo,openmpi", "--json", str(tmp_path / "out.json")),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    stored = json.loads((tmp_path / "out.json").read_text())
    assert stored["wrong"] == []
    assert {figure["operation"] for figure in stored["figures"]} == set(OPERATIONS)
    for figure in stored["figures"]:
        assert set(figure["timings"]) == {"phalanx", "gloo", "openmpi"}, figure


def test_algorithms_are_measured_beside_the_backends_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = bench(
        *("--algorithms", "--ranks", "2", "--sizes", "4,1KiB", "--rounds", "2"),
        *("--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (report,) = json.loads((tmp_path / "out.json").read_text())["reports"]
    assert report["settings"]["ranks"] == 2
    assert report["wrong"] == report["notes"] == []
    assert [figure["size"] for figure in report["figures"]] == [4, 1024]
    for figure in report["figures"]:
        ways = [f"{name} {way}".rstrip() for name in ("phalanx", "gloo") for way in WAYS]
        assert list(figure["timings"]) == ways
        for timing in figure["timings"].values():
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


def test_systems_that_die_or_hang_are_named_and_the_others_go_on() -> None:
    with running("--op", "all_reduce,barrier", "--sizes", "4,1KiB", "--timeout", "40") as process:
        assert process.stdout is not None
        until(process, "4 B")  # more is to come, so each of the two is asked again
        killed, stopped = ranks_of(process.pid, "mpich")[1], ranks_of(process.pid, "gloo")[1]
        killed.kill()
        stopped.suspend()
        rest = process.stdout.read()
        assert process.wait(LIMIT) == 0, rest
    dropped = dict(re.findall("^note: (.+) is dropped: (.+)$", rest, re.MULTILINE))
    assert dropped.keys() == {"mpich", "gloo"}
    assert f"(pid {killed.pid}) died during all_reduce" in dropped["mpich"]
    assert "no answer within 40 s to all_reduce" in dropped["gloo"]
    assert dropped["gloo"].endswith(f" (pid {stopped.pid})")
    headings, figures = (line.split() for line in rest.rstrip().splitlines()[-2:])
    assert headings[:4] == ["size", "phalanx", "shared", "openmpi"]
    assert all(float(median) > 0 for median in figures[1:7:2])


def test_no_rank_and_no_file_outlives_a_parent_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running("--sizes", "4", "--rounds", "100000", "--systems", "openmpi,mpich") as process:
        until(process, "size")
        ranks = [rank for name in ("openmpi", "mpich") for rank in ranks_of(process.pid, name)]
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
        ("--json no/such/folder.json", "there is no folder"),
        ("--from none.json", "say where to, with --plot"),
        ("--from none.json --plot a.png", "can't read none.json"),
        ("--ranks 2,3", "ranks '2,3' given, expected one number: several need --algorithms"),
        ("--ranks 1", "ranks '1' given, expected a number from 2 to 64"),
        ("--algorithms --op broadcast", "--op broadcast given, expected all_reduce"),
        ("--algorithms --systems mpich", "system 'mpich' given, expected one or several of"),
        ("--algorithms --from none.json --plot a.png", "can't read none.json"),
    ],
)
def test_bad_input_is_one_line(
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


def test_too_few_ranks_are_refused() -> None:
    result = bench("--ranks", "1")
    assert result.returncode == 2
    assert "ranks" in result.stderr
    assert "Traceback" not in result.stderr
