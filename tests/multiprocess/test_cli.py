"""`phalanx test`, run as a command."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from phalanx.testing import selfcheck

pytestmark = pytest.mark.slow

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
def test_selfcheck_prints_every_operation_and_a_summary(ranks: int) -> None:
    result = phalanx("test", "--nproc-per-node", str(ranks), "--seed", "7")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert f"{ranks} ranks, seed 7" in lines[0]
    for name in selfcheck.CHECKS:
        assert any(line.split("ok", 1)[-1].strip() == name for line in lines), (name, lines)
    assert lines[-1].startswith(f"all {len(selfcheck.CHECKS)} operations agree with numpy")


def test_selfcheck_describes_a_wrong_result() -> None:
    def wrong(count: int, seed: int) -> selfcheck.Pair:
        expected = np.random.default_rng(seed).uniform(1, 2, count)
        got = torch.from_numpy(expected.copy())
        if count > 3:
            got[3] += 1
        return got, expected

    assert selfcheck._run_check(wrong, 1).startswith("7 elements: 1 are wrong, the first at 3: ")


def test_selfcheck_detects_an_untouched_output() -> None:
    def untouched(count: int, _seed: int) -> selfcheck.Pair:
        return selfcheck._empty(count), np.zeros(count)

    assert "1 elements: 1 are wrong" in selfcheck._run_check(untouched, 1)


def test_selfcheck_needs_at_least_one_rank() -> None:
    result = phalanx("test", "--nproc-per-node", "0")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
