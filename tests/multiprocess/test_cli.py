"""`phalanx test` and `phalanx bench`, as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from phalanx.bench.collectives import Timing, label_of
from phalanx.bench.report import ratio, row

from phalanx.testing import selfcheck

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 100


def phalanx(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from phalanx.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        stdin=subprocess.DEVNULL,
        check=False,
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_selfcheck_names_every_operation_and_ends_with_a_verdict(ranks: int) -> None:
    result = phalanx("test", "--ranks", str(ranks), "--seed", "7")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert f"{ranks} ranks, seed 7" in lines[0]
    for name in selfcheck.CHECKS:
        assert any(line.split("ok", 1)[-1].strip() == name for line in lines), (name, lines)
    assert lines[-1].startswith(f"all {len(selfcheck.CHECKS)} operations agree with numpy")


def test_selfcheck_says_what_is_wrong() -> None:
    def wrong(count: int, seed: int) -> selfcheck.Pair:
        expected = np.random.default_rng(seed).uniform(1, 2, count)
        got = torch.from_numpy(expected.copy())
        if count > 3:
            got[3] += 1
        return got, expected

    assert selfcheck._verdict(wrong, 1).startswith("7 elements: 1 are wrong, the first at 3: ")


def test_selfcheck_does_not_take_poison_for_a_result() -> None:
    def untouched(count: int, _seed: int) -> selfcheck.Pair:
        return selfcheck._empty(count), np.zeros(count)

    assert "1 elements: 1 are wrong" in selfcheck._verdict(untouched, 1)


def test_selfcheck_takes_at_least_one_rank() -> None:
    result = phalanx("test", "--ranks", "0")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_bench_measures_both_backends_and_stores_the_figures(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = phalanx("bench", "--sizes", "4,4KiB,1MiB", "--rounds", "2", "--json", str(path))
    assert result.returncode == 0, result.stdout + result.stderr
    for size in ("4 B", "4 KiB", "1 MiB"):
        assert any(line.strip().startswith(size) for line in result.stdout.splitlines())
    stored = json.loads(path.read_text())
    assert stored["command"].startswith("phalanx bench")
    assert stored["machine"]["torch"] == torch.__version__
    assert set(stored["all_reduce"]) == {"4", "4096", "1048576"}
    for timings in stored["all_reduce"].values():
        for timing in (timings["phalanx"], timings["gloo"]):
            assert 0 < timing["low"] <= timing["median"] <= timing["high"] < LIMIT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "3"], "a multiple of 4 bytes"),
        (["--sizes", "4,oops"], "'oops' given"),
        (["--backends", "phalanx,nonsense"], "'nonsense' is not available"),
        (["--ranks", "1"], "ranks"),
    ],
)
def test_bench_refuses_what_it_cannot_measure(arguments: list[str], message: str) -> None:
    result = phalanx("bench", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_row_gives_median_quartiles_and_ratio() -> None:
    timings = {"phalanx": Timing.of([1e-6, 2e-6, 3e-6]), "gloo": Timing.of([8e-6, 9e-6, 10e-6])}
    assert ratio(timings) == "4.5x"
    assert row(4096, timings).split() == [
        *("4", "KiB", "2.0", "1.5", "-", "2.5", "9.0", "8.5", "-", "9.5", "4.5x")
    ]
    assert label_of(3 * 2**20) == "3 MiB"
    assert label_of(1500) == "1500 B"
