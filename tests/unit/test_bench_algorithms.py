"""`phalanx bench --algorithms`: what it is asked, what it keeps and what it shows."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from rich.console import Console

from phalanx.bench import machine, results
from phalanx.bench.algorithms import record
from phalanx.bench.algorithms.plot import STYLES, plot
from phalanx.bench.algorithms.table import SHORT, AlgorithmsDisplay
from phalanx.bench.dtypes import STORAGE
from phalanx.bench.messages import Prepare, Turn
from phalanx.bench.operations import ALGORITHMS
from phalanx.bench.plan import Contender, Plan, ranks_of
from phalanx.bench.results import Figure, Report, Timing
from phalanx.bench.systems import SYSTEMS
from phalanx.bench.timed_operation import Work
from phalanx.cli.bench import plans_of
from phalanx.errors import UsageError
from phalanx.parallel import algorithms

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_every_algorithm_has_its_place() -> None:
    assert tuple(algorithms.ALGORITHMS) == ALGORITHMS
    assert tuple(SHORT) == tuple(STYLES) == ("", *ALGORITHMS)


def test_ranks_are_read_once_each_in_order() -> None:
    assert ranks_of("4, 2,3,2", several=True) == [2, 3, 4]
    assert ranks_of("64", several=False) == [64]


@pytest.mark.parametrize("text", ["1", "65", "2,x", "", "-2", "2.5"])
def test_ranks_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^ranks '.*' given, expected a number from 2 to 64$"):
        ranks_of(text, several=True)


def test_several_ranks_need_algorithms() -> None:
    with pytest.raises(UsageError, match=r"^ranks '2,3' given, expected one number: several need"):
        ranks_of("2,3", several=False)


def test_algorithms_are_planned_for_each_number_of_ranks() -> None:
    plans = plans_of("all", "4,8", "", "float32", "", None, 60.0, algorithms=True)
    assert [plan.ranks for plan in plans] == [2, 3, 4]
    assert {(*plan.systems, *plan.operations) for plan in plans} == {
        ("phalanx", "gloo", "all_reduce")
    }
    ways = [each.label for each in plans[0].contenders_of("gloo")]
    assert ways == ["gloo", *(f"gloo {name}" for name in ALGORITHMS)]
    (plain,) = plans_of("barrier", "4,8", "", "float32", "", None, 60.0, algorithms=False)
    assert (plain.ranks, tuple(plain.systems)) == (2, SYSTEMS)
    assert [each.label for each in plain.contenders_of("gloo")] == ["gloo"]


class Ways:
    """A system of one rank with a way to do the operation for each name that it is asked for."""

    rank, ranks, version = 0, 1, ""

    def __init__(self, **wrong: float) -> None:
        self.wrong, self.calls = wrong, list[str]()

    def empty(self, count: int, dtype: str) -> tuple[Any, Any]:
        array = np.empty(count, STORAGE[dtype])
        return array, array

    def bind(self, operation: str, source: Any, target: Any, dtype: str) -> Callable[[], object]:
        def call() -> None:
            self.calls.append(operation)
            if operation in self.wrong:
                target[3] = self.wrong[operation]

        return call

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


def work(system: Ways) -> Work:
    prepare = Prepare("all_reduce", "float32", 10, 2, 5, ("ring_all_reduce", "tree_all_reduce"))
    return Work(system, prepare)


def test_a_turn_times_the_way_that_it_names() -> None:
    system = Ways()
    ready = work(system)
    assert ready.time(Turn(1, 3, 1, "tree_all_reduce")) > 0
    assert system.calls == ["tree_all_reduce"] * 4
    assert ready.time(Turn(1, 2, 0)) > 0
    assert system.calls[4:] == ["all_reduce"] * 2


def test_every_way_is_checked_and_the_wrong_one_named() -> None:
    assert work(Ways()).check(5) == ""
    system = Ways(ring_all_reduce=77.0)
    assert work(system).check(5).startswith("ring_all_reduce: 1 of 10 elements are wrong")
    # Other ranks, whose result is right, take part in all of them.
    assert system.calls == ["all_reduce", "ring_all_reduce", "tree_all_reduce"]


def timing(median: float) -> Timing:
    return Timing.of([median * 0.9e-6, median * 1e-6, median * 1.3e-6])


def report(ranks: int) -> Report:
    plan = Plan(["all_reduce"], ["float32"], [4, 1024], ["phalanx", "gloo"], ranks)
    entries = []
    for size in (4, 1024):
        medians = [6.0, 40.0, 80.0 * ranks, 70.0, 30.0 + size]
        timings = {
            Contender(system, name).label: timing(median * factor)
            for system, factor in (("phalanx", 1), ("gloo", 5))
            for name, median in zip(("", *ALGORITHMS), medians, strict=True)
        }
        entries.append(Figure("all_reduce", "float32", size, size, 0, True, 1e-6, timings))
    return Report(
        command="phalanx bench --algorithms",
        date="2025-01-01 00:00 UTC",
        machine=machine.machine(),
        versions=machine.versions(),
        settings={**vars(plan), "rounds_at_least": 5},
        bandwidth={"copy": 40e9},
        figures=entries,
    )


def test_the_fastest_is_one_of_the_algorithms() -> None:
    small, large = report(2).figures
    assert record.fastest(small, "gloo") == "tree_all_reduce"
    assert record.fastest(large, "phalanx") == "ring_all_reduce_simple"
    assert record.fastest(small, "mpich") is None


def test_reports_are_stored_and_read(tmp_path: Path) -> None:
    reports = [report(2), report(3)]
    record.write(reports, tmp_path / "out.json")
    again = record.read(tmp_path / "out.json")
    assert [each.figures for each in again] == [each.figures for each in reports]
    assert [each.settings["ranks"] for each in again] == [2, 3]


def test_a_file_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    results.write(report(2), tmp_path / "plain.json")
    record.write([report(2)], tmp_path / "algorithms.json")
    with pytest.raises(UsageError, match="record it again with phalanx bench --algorithms --json"):
        record.read(tmp_path / "plain.json")
    with pytest.raises(UsageError, match=f"has the format {record.FORMAT!r}, expected"):
        results.read(tmp_path / "algorithms.json")


@pytest.mark.parametrize("terminal", [False, True])
def test_the_table_has_a_line_for_each_size_and_system(terminal: bool) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=140, highlight=False)
    entry = report(2)
    plan = Plan(["all_reduce"], ["float32"], [4], ["phalanx", "gloo"], 2, algorithms=ALGORITHMS)
    with AlgorithmsDisplay(plan, console) as display:
        display.begin(entry, 2)
        display.section("all_reduce", "float32", ["phalanx", "gloo"])
        for figure in entry.figures:
            display.figure(figure)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    tail = text[text.rindex("fastest") :]
    lines = [line.split() for line in tail.splitlines() if " phalanx " in line or " gloo " in line]
    assert [line[2] for line in lines] == ["phalanx", "gloo", "phalanx", "gloo"]
    assert lines[1][3:] == [
        *("30.0", "±3.00", "200", "±20.0", "800", "±80.0", "350", "±35.0", "170", "±17.0"),
        "tree",
    ]
    assert lines[2][-2:] == ["ring,", "simple"]
    assert "own: the backend's all_reduce" in text


@pytest.mark.parametrize("name", ["out.png", "out.svg"])
def test_the_picture(tmp_path: Path, name: str) -> None:
    plot([report(2), report(3)], tmp_path / name)
    assert (tmp_path / name).stat().st_size > 5000


def test_nothing_is_no_picture(tmp_path: Path) -> None:
    empty = report(2)
    empty.figures.clear()
    with pytest.raises(UsageError, match="no algorithm was measured"):
        plot([empty], tmp_path / "out.png")
