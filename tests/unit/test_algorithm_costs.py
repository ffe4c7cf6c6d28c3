"""The messages and bytes in docs/algorithms.md and the docstrings, compared with the code."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from benchmarks import algorithm_costs, algorithm_pictures
from phalanx.bench import results
from phalanx.bench.operations import ALGORITHMS
from phalanx.bench.plan import Variant
from phalanx.bench.results import Report, Result, Timing

if TYPE_CHECKING:
    from pathlib import Path

WORLDS = (2, 3, 4, 5, 6, 7, 8, 9)
COUNT = 2520  # a multiple of all of them, and of every half


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_costs_equal_those_of_code(name: str, ranks: int) -> None:
    messages = algorithm_pictures.trace(name, ranks, COUNT)
    expected = algorithm_costs.cost(name, ranks)
    longest = Counter[int]()
    for message in messages:
        longest[message.step] = max(longest[message.step], message.end - message.start)
    assert len(messages) == expected.all_messages
    sent = sum(message.end - message.start for message in messages)
    assert sent / COUNT == pytest.approx(expected.all_lengths)
    assert len(longest) == expected.path_messages
    assert sum(longest.values()) / COUNT == pytest.approx(expected.path_lengths)


@pytest.mark.parametrize("ranks", WORLDS)
def test_ring_sends_minimum_of_bytes(ranks: int) -> None:
    sent = Counter[int]()
    for message in algorithm_pictures.trace("ring_all_reduce", ranks, COUNT):
        sent[message.source] += message.end - message.start
        assert message.to == (message.source + 1) % ranks
    assert set(sent.values()) == {2 * (ranks - 1) * COUNT // ranks}


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_fewer_elements_than_ranks(name: str, ranks: int) -> None:
    """The trace raises an error if a rank lacks a part; an empty slice makes no message."""
    for count in (1, ranks - 1, ranks + 1):
        assert all(message.parts for message in algorithm_pictures.trace(name, ranks, count))


@pytest.mark.parametrize(("name", "ranks"), algorithm_pictures.PICTURES)
def test_pictures_match_code(name: str, ranks: int, repository: Path) -> None:
    messages = algorithm_pictures.trace(name, ranks, algorithm_pictures.COUNT)
    picture = (repository / f"docs/algorithms/{name}_{ranks}.svg").read_text()
    assert algorithm_pictures.describe(messages) in picture


def test_picture_is_drawn(tmp_path: Path) -> None:
    algorithm_pictures.draw("tree_all_reduce", 2, tmp_path / "tree.svg")
    assert "1: 1 to 0, 0-4; 2: 0 to 1, 0-4" in (tmp_path / "tree.svg").read_text()


def test_fastest_algorithm() -> None:
    """With a core for each rank: few steps for small tensors, few bytes for large ones."""
    unlimited = math.inf
    fastest = algorithm_costs.fastest
    assert fastest(2, 8, 2e-5, 1e-9, unlimited) == "ring_all_reduce_simple"
    assert fastest(16, 8, 2e-5, 1e-9, unlimited) == "halving_doubling_all_reduce"
    assert fastest(12, 2**28, 2e-5, 1e-9, unlimited) == "ring_all_reduce"
    # On one core all messages are sequential, and the tree has the fewest.
    assert fastest(12, 8, 2e-5, 1e-9, 1) == "tree_all_reduce"


def test_fit_recovers_parameters(tmp_path: Path) -> None:
    reports = []
    for ranks in (2, 4):
        entries = []
        for size in (8, 2**20):
            timings = {}
            for name in ALGORITHMS:
                seconds = algorithm_costs.cost(name, ranks).seconds(size, 3e-5, 2e-10, 2)
                timings[Variant("gloo", name).label] = Timing(seconds, seconds, seconds, 5)
            entries.append(Result("all_reduce", "float32", size, size, 0, True, None, timings))
        reports.append(Report("", "", {"cores": 2}, {}, {"ranks": ranks}, {}, entries))
    (tmp_path / "made.json").write_text(json.dumps(results.as_json(reports, algorithms=True)))
    assert algorithm_costs.read(tmp_path / "made.json", "phalanx") == []
    measured = algorithm_costs.read(tmp_path / "made.json", "gloo")
    assert len(measured) == 16
    alpha, beta = algorithm_costs.fit(measured, 2)
    assert alpha == pytest.approx(3e-5, rel=0.06)
    assert beta == pytest.approx(2e-10, rel=0.06)
