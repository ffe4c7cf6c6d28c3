"""Run the small examples as a user does, and compare their output with the expected one."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BACKENDS = ("gloo", "phalanx")
TIMEOUT = 60.0


def run(script: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    # Run from another directory: an example must not depend on the current one.
    command = [sys.executable, str(script), *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT, cwd=script.parents[2], check=False
    )


def output(script: Path, *options: str) -> list[str]:
    result = run(script, *options)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


@pytest.fixture(scope="module")
def examples(repository: Path) -> Path:
    return repository / "examples"


@pytest.mark.parametrize("backend", BACKENDS)
def test_send_recv(examples: Path, backend: str) -> None:
    assert output(examples / "send_recv.py", "--backend", backend) == [
        f"rank {rank} has [{rank}.0, {rank}.0, {rank}.0]" for rank in range(4)
    ]


@pytest.mark.parametrize(("backend", "nproc"), [("gloo", 2), ("phalanx", 4)])
def test_isend_irecv(examples: Path, backend: str, nproc: int) -> None:
    printed = output(
        examples / "isend_irecv.py", "--backend", backend, "--nproc-per-node", str(nproc)
    )
    assert printed == [
        f"rank {rank} got {(rank - 1) % nproc} from the left, {(rank + 1) % nproc} from the right, "
        f"and computed {rank * rank}"
        for rank in range(nproc)
    ]


def test_subgroup_all_reduce(examples: Path) -> None:
    assert output(examples / "subgroup_all_reduce.py", "--backend", "phalanx") == [
        "rank 0 in [0, 2]: 101",
        "rank 1 in [1, 3]: 1010",
        "rank 2 in [0, 2]: 101",
        "rank 3 in [1, 3]: 1010",
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_collectives(examples: Path, backend: str) -> None:
    ranks = range(3)
    gathered = [[1.5 * rank] for rank in ranks]
    expected = {
        "broadcast": [[7.0, 8.0]] * 3,
        "reduce": [[3.0, 3.0], "-", "-"],
        "all_reduce": [[3.0, 3.0]] * 3,
        "scatter": [[10.0 * rank, 1.0] for rank in ranks],
        "gather": [gathered, "-", "-"],
        "all_gather": [gathered] * 3,
        "barrier": ["passed"] * 3,
    }
    lines = []
    for name, results in expected.items():
        lines += [name, *(f"  rank {rank}: {results[rank]}" for rank in ranks)]
    assert (
        output(examples / "collectives.py", "--backend", backend, "--nproc-per-node", "3") == lines
    )


def test_fault_injection(examples: Path) -> None:
    """The output is the one in the documentation."""
    text = (examples.parent / "docs/testing-against-failure.md").read_text()
    shown = text.partition("$ python examples/fault_injection.py\n")[2].partition("```")[0]
    assert output(examples / "fault_injection.py") == shown.splitlines()


@pytest.mark.parametrize("options", [("--nproc-per-node", "1"), ("--steps", "1")])
def test_fault_injection_with_invalid_options(examples: Path, options: tuple[str, str]) -> None:
    result = run(examples / "fault_injection.py", *options)
    assert result.returncode == 2
    assert "given, expected at least 2 of each" in result.stderr


@pytest.mark.parametrize(
    "name", ["send_recv", "isend_irecv", "subgroup_all_reduce", "collectives", "train_digits"]
)
def test_zero_ranks(
    examples: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--nproc-per-node", "0"])
    monkeypatch.syspath_prepend(examples)  # as `python examples/NAME.py` does
    with pytest.raises(SystemExit) as raised:
        runpy.run_path(str(examples / f"{name}.py"), run_name="__main__")
    assert raised.value.code == 2
    errors = capsys.readouterr().err
    assert "--nproc-per-node" in errors
    assert "given, expected" in errors
