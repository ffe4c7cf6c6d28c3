"""`phalanx bench --algorithms`: options, storage and display."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from rich.console import Console

from phalanx.bench import machine, results
from phalanx.bench.messages import PrepareCommand, TurnCommand
from phalanx.bench.operations import ALGORITHMS, STORAGE
from phalanx.bench.plan import Plan, Variant, parse_rank_counts
from phalanx.bench.plot import ALGORITHM_STYLES, plot_algorithms
from phalanx.bench.results import Report, Result, Timing
from phalanx.bench.systems import SYSTEMS
from phalanx.bench.table import SHORT_NAMES, AlgorithmsDisplay, fastest_algorithm
from phalanx.bench.timed_operation import TimedOperation
from phalanx.cli.bench import make_plans
from phalanx.cli.output import write_json
from phalanx.errors import UsageError
from phalanx.parallel import algorithms

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_every_algorithm_has_a_name_and_a_style() -> None:
    assert tuple(algorithms.ALGORITHMS) == ALGORITHMS
    assert tuple(SHORT_NAMES) == tuple(ALGORITHM_STYLES) == ("", *ALGORITHMS)


def test_rank_counts_are_sorted_without_duplicates() -> None:
    assert parse_rank_counts("4, 2,3,2", several=True) == [2, 3, 4]
    assert parse_rank_counts("64", several=False) == [64]


@pytest.mark.parametrize("text", ["1", "65", "2,x", "", "-2", "2.5"])
def test_invalid_rank_counts_are_rejected(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"^--nproc-per-node '.*' given, expected a number from 2 to 64$"
    ):
        parse_rank_counts(text, several=True)


def test_several_rank_counts_need_algorithms() -> None:
    with pytest.raises(
        UsageError, match=r"^--nproc-per-node '2,3' given, expected one number: several"
    ):
        parse_rank_counts("2,3", several=False)


def test_algorithms_are_planned_for_each_number_of_ranks() -> None:
    plans = make_plans("all", "4,8", "", "float32", "", None, 60.0, algorithms=True)
    assert [plan.ranks for plan in plans] == [2, 3, 4]
    assert {(*plan.systems, *plan.operations) for plan in plans} == {
        ("phalanx", "gloo", "all_reduce")
    }
    labels = [each.label for each in plans[0].variants("gloo")]
    assert labels == ["gloo", *(f"gloo {name}" for name in ALGORITHMS)]
    (plain,) = make_plans("barrier", "4,8", "", "float32", "", None, 60.0, algorithms=False)
    assert (plain.ranks, tuple(plain.systems)) == (2, SYSTEMS)
    assert [each.label for each in plain.variants("gloo")] == ["gloo"]


class SystemWithAlgorithms:
    """A system of one rank that records the calls of each algorithm."""

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


def make_operation(system: SystemWithAlgorithms) -> TimedOperation:
    prepare = PrepareCommand(
        "all_reduce", "float32", 10, 2, 5, ("ring_all_reduce", "tree_all_reduce")
    )
    return TimedOperation(system, prepare)


def test_a_turn_times_the_named_algorithm() -> None:
    system = SystemWithAlgorithms()
    operation = make_operation(system)
    assert operation.time(TurnCommand(1, 3, 1, "tree_all_reduce")) > 0
    assert system.calls == ["tree_all_reduce"] * 4
    assert operation.time(TurnCommand(1, 2, 0)) > 0
    assert system.calls[4:] == ["all_reduce"] * 2


def test_every_algorithm_is_checked_and_a_wrong_one_named() -> None:
    assert make_operation(SystemWithAlgorithms()).check(5) == ""
    system = SystemWithAlgorithms(ring_all_reduce=77.0)
    assert make_operation(system).check(5).startswith("ring_all_reduce: 1 of 10 elements are wrong")
    # No early exit: other ranks whose result is right call all of them.
    assert system.calls == ["all_reduce", "ring_all_reduce", "tree_all_reduce"]


def timing(median: float) -> Timing:
    return Timing.of([median * 0.9e-6, median * 1e-6, median * 1.3e-6])


def report(ranks: int) -> Report:
    plan = Plan(["all_reduce"], ["float32"], [4, 1024], ["phalanx", "gloo"], ranks)
    entries = []
    for size in (4, 1024):
        medians = [6.0, 40.0, 80.0 * ranks, 70.0, 30.0 + size]
        timings = {
            Variant(system, name).label: timing(median * factor)
            for system, factor in (("phalanx", 1), ("gloo", 5))
            for name, median in zip(("", *ALGORITHMS), medians, strict=True)
        }
        entries.append(Result("all_reduce", "float32", size, size, 0, True, 1e-6, timings))
    return Report(
        command="phalanx bench --algorithms",
        date="2025-01-01 00:00 UTC",
        machine=machine.machine(),
        versions=machine.versions(),
        settings={**vars(plan), "rounds_at_least": 5},
        bandwidth={"copy": 40e9},
        results=entries,
    )


def test_the_fastest_algorithm() -> None:
    small, large = report(2).results
    assert fastest_algorithm(small, "gloo") == "tree_all_reduce"
    assert fastest_algorithm(large, "phalanx") == "ring_all_reduce_simple"
    assert fastest_algorithm(small, "mpich") is None


def test_reports_are_stored_and_read(tmp_path: Path) -> None:
    reports = [report(2), report(3)]
    write_json(results.as_json(reports, algorithms=True), False, tmp_path / "out.json")
    again = results.read(tmp_path / "out.json", algorithms=True)
    assert [each.results for each in again] == [each.results for each in reports]
    assert [each.settings["ranks"] for each in again] == [2, 3]


def test_a_file_of_the_other_kind_is_rejected(tmp_path: Path) -> None:
    write_json(results.as_json([report(2)]), False, tmp_path / "plain.json")
    write_json(results.as_json([report(2)], algorithms=True), False, tmp_path / "algorithms.json")
    with pytest.raises(UsageError, match="measure again with phalanx bench --algorithms --output"):
        results.read(tmp_path / "plain.json", algorithms=True)
    with pytest.raises(UsageError, match=f"has the format {results.FORMATS[True]!r}, expected"):
        results.read(tmp_path / "algorithms.json")


@pytest.mark.parametrize("terminal", [False, True])
def test_the_table_has_a_line_for_each_size_and_system(terminal: bool) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=140, highlight=False)
    entry = report(2)
    plan = Plan(["all_reduce"], ["float32"], [4], ["phalanx", "gloo"], 2, algorithms=ALGORITHMS)
    with AlgorithmsDisplay(plan, console) as display:
        display.begin(entry, 2)
        display.begin_section("all_reduce", "float32", ["phalanx", "gloo"])
        for result in entry.results:
            display.add_result(result)
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
def test_the_plot(tmp_path: Path, name: str) -> None:
    plot_algorithms([report(2), report(3)], tmp_path / name)
    assert (tmp_path / name).stat().st_size > 5000


def test_a_plot_without_results_is_rejected(tmp_path: Path) -> None:
    empty = report(2)
    empty.results.clear()
    with pytest.raises(UsageError, match="no algorithm was measured"):
        plot_algorithms([empty], tmp_path / "out.png")
