"""A short form of `make faults`: random kills, desyncs and operations."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.fault_injection import (
    calls,
    desyncs,
    endurance,
    kills,
    replacements,
    schedules,
    servers,
    shrinks,
    tables,
)
from tests.fault_injection.__main__ import app
from tests.fault_injection.leaks import Resources
from tests.fault_injection.pool import Answer, Pool
from tests.seeds import fresh_seed

MOST = 8


@pytest.fixture
def pool() -> Iterator[Pool]:
    modules = [each.__name__ for each in (kills, desyncs, endurance, shrinks)]
    with Pool(MOST, modules) as pool:
        yield pool


@pytest.fixture
def seed() -> int:
    """The seed of the test; `make faults ARGS="... --seed N"` repeats it."""
    return fresh_seed() % 2**31


@pytest.mark.slow
def test_fifty_kills(pool: Pool, seed: int) -> None:
    page = kills.SharedPage()
    drawn = [kills.draw(seed, number, 2, MOST) for number in range(50)]
    trials = [kills.run(pool, kill, page, "phalanx") for kill in drawn]
    summary = tables.summarize_kills(trials, [])
    assert tables.find_kill_failures(summary, timed=False) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "hosts"),
    [
        ("references", "aaa"),
        ("references", "aab"),
        ("tables", "aaa"),
        ("tables", "aab"),
        ("launchers", "aaa"),
    ],
)
def test_schedules(seed: int, kind: str, hosts: str) -> None:
    with Pool(schedules.WORKERS, [schedules.__name__]) as pool:
        assert schedules.run(pool, kind, range(60), hosts, seed) == []


@pytest.mark.slow
def test_shrinks(pool: Pool, seed: int) -> None:
    page = kills.SharedPage()
    trials = [shrinks.run(pool, shrinks.draw(seed, number, 2, 6), page) for number in range(12)]
    assert tables.find_shrink_failures(tables.summarize_shrinks(trials, []), timed=False) == []


@pytest.mark.slow
def test_replacements(tmp_path: Path, seed: int) -> None:
    trial = replacements.run(tmp_path, seed, kills=8, ranks=3, spares=1, pause=0.3)
    summary = tables.summarize_replacements(trial)
    assert tables.find_replacement_failures(summary, timed=False) == []
    assert trial.kills >= 8


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [None, servers.STALENESS])
def test_servers(tmp_path: Path, seed: int, staleness: int | None) -> None:
    trial = servers.run(tmp_path, seed, kills=8, staleness=staleness)
    summary = tables.summarize_servers([trial], [])
    assert tables.find_server_failures(summary, timed=False) == []
    assert trial.kills >= 8
    assert trial.updates > 0


@pytest.mark.slow
def test_desyncs(pool: Pool, seed: int) -> None:
    drawn = [desyncs.draw(seed, number, 2, MOST) for number in range(5 * len(desyncs.FIELDS))]
    trials = [desyncs.run(pool, desync) for desync in drawn]
    assert tables.summarize_desyncs(trials)["wrong"] == []
    assert all(trial.raised == trial.expected > 0 for trial in trials)


@pytest.mark.slow
def test_operations(pool: Pool, seed: int) -> None:
    for samples in endurance.run(pool, 3, seed, 10_000, 100):
        assert endurance.growth(samples).is_flat, samples
        assert samples[-1].operations == 10_000


# The drivers must detect failures.

RESOURCES = Resources(9, 0, 1, 100 * 2**20)
KILL = kills.Kill(0, "", 3, 1, kills.MOMENTS[0], "SIGKILL", 0, 0.0, 1)
GOOD = kills.CaughtError(
    10_000_000,
    "PeerLost",
    "rank 1 (pid 81) was killed by SIGKILL",
    "barrier",
    0.1,
    RESOURCES,
    RESOURCES,
)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, ""),
        ({"error": "CollectiveTimeout"}, "does not name rank 1 (pid 81)"),
        ({"text": "rank 1 (pid 82) has died"}, "does not name rank 1 (pid 81)"),
        ({"text": "rank 1 (pid 81) was killed by SIGTERM"}, "it died by SIGKILL"),
        ({"leave_seconds": 5.0}, "took 5.0 s to leave the group"),
        ({"resources": dataclasses.replace(RESOURCES, descriptors=10)}, "holds more descriptors"),
        (
            {"resources": dataclasses.replace(RESOURCES, segments=1, threads=2)},
            "more segments, threads",
        ),
        ({"resources": dataclasses.replace(RESOURCES, resident=2**30)}, "has grown by 924 MiB"),
    ],
)
def test_checks_of_a_survivor(changes: dict[str, object], wrong: str) -> None:
    trial = kills.Trial(KILL)
    caught = dataclasses.replace(GOOD, **changes)  # type: ignore[arg-type]
    kills.judge(trial, 0, Answer(caught), 81, 4_000_000, "phalanx")
    assert trial.times == [0.006]
    assert [wrong in text for text in trial.wrong] == [True] * bool(wrong)


def test_checks_of_a_summary() -> None:
    trials = [kills.Trial(KILL, [0.001, 0.2], 2, 2), kills.Trial(KILL, [0.02, 2.0], 1, 0, ["bad"])]
    summary = tables.summarize_kills(trials, ["/dev/shm/x"])
    assert tables.find_kill_failures(summary, timed=True) == [
        "rank 1 of 3 dies by SIGKILL between operations, 0.0 ms after call 0: bad",
        "/dev/shm/x",
        "1 survivors have not named it",
        "50% of the survivors took 0.02 s, not 0.01 s",
        "99% of the survivors took 2.0 s, not 0.1 s",
        "100% of the survivors took 2.0 s, not 1.0 s",
    ]


def test_checks_of_a_desync() -> None:
    sides = (desyncs.Side((calls.Call("barrier"),)), desyncs.Side((calls.Call("reduce"),)))
    desync = desyncs.Desync(0, "", "operation", 2, 1, 3, 0, *sides, ("work", "work"))
    words = "rank 0 is in reduce #4 float32[1] SUM root 0 at rank_0.py:10, rank 1 in barrier #4 at "

    def failures(error: str, text: str) -> list[str]:
        return desyncs.judge(desync, 0, desyncs.CaughtError(error, f"place: {text}", 0.1, ""))

    assert failures("CollectiveMismatch", f"{words}rank_1.py:20") == []
    assert failures("CollectiveMismatch", words) == [
        "the odd rank's call site rank_1.py:20 is missing"
    ]
    assert failures("CollectiveMismatch", "barrier #4 at rank_1.py:20") == [
        "the call site of the others is missing",
        "'reduce #4 float32[1] SUM root 0' is missing",
    ]
    assert failures("PeerLost", "") == ["expected CollectiveMismatch"]


@pytest.mark.parametrize(
    ("growth", "descriptors", "flat"), [(0, 0, True), (100_000, 0, False), (0, 1, False)]
)
def test_growth_is_detected(growth: int, descriptors: int, flat: bool) -> None:
    samples = [
        endurance.Sample(
            number,
            0.0,
            dataclasses.replace(
                RESOURCES,
                resident=RESOURCES.resident + number * growth,
                descriptors=RESOURCES.descriptors + descriptors * (number == 99),
            ),
            0,
        )
        for number in range(100)
    ]
    assert endurance.growth(samples).is_flat is flat


def test_a_trial_depends_only_on_seed_and_number(seed: int) -> None:
    assert kills.draw(seed, 7, 2, 8) == kills.draw(seed, 7, 2, 8)
    assert desyncs.draw(seed, 7, 2, 8) == desyncs.draw(seed, 7, 2, 8)
    drawn = [kills.draw(seed, number, 2, 8) for number in range(500)]
    assert {kill.method for kill in drawn} == set(kills.METHODS)
    assert {kill.moment for kill in drawn} == set(kills.MOMENTS)
    assert {kill.ranks for kill in drawn} == set(range(2, 9))
    fields = {desyncs.draw(seed, number, 2, 8).field for number in range(20)}
    assert fields == set(desyncs.FIELDS)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("command", "last"),
    [
        ("kills --count 3 --nproc-per-node 2-3 --no-timed", "every survivor named the victim"),
        (
            "kills --count 2 --nproc-per-node 2 --backend gloo",
            "this share of the survivors had raised",
        ),
        ("desyncs --count 3 --nproc-per-node 3", "every rank named both sides and both call sites"),
        ("operations --count 3000", "memory and descriptors did not grow"),
    ],
)
def test_the_command_line(repository: Path, tmp_path: Path, command: str, last: str) -> None:
    record = tmp_path / "found"
    ended = subprocess.run(
        [sys.executable, "-m", "tests.fault_injection", *command.split(), "--record", str(record)],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert last in " ".join(ended.stdout.split())
    assert re.match(r"seed \d+\n", ended.stdout)
    assert '"machine"' in record.with_suffix(".json").read_text()
    assert "make faults ARGS=" in record.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("kills --nproc-per-node 1-4", "'1-4': expected a number of ranks or a range such as 2-8"),
        ("desyncs --nproc-per-node 4-3", "'4-3': expected a number of ranks or a range"),
        ("kills --backend mpi", "backend 'mpi': expected phalanx or gloo"),
    ],
)
def test_wrong_options(options: str, message: str) -> None:
    ended = CliRunner().invoke(app, options.split(), env={"COLUMNS": "200"})
    assert ended.exit_code == 2
    assert message in " ".join(ended.output.split())
