"""Cells of a notebook in a real kernel: what they show of training and of commands."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
BAR = re.compile(r"training ━+ (\d+/\d+) 0:00:00 loss \d+\.\d{4}  [\d,]+ samples/s  waiting \d+%")
LINE = r"epoch {epoch}  step {step}/6  loss \d+\.\d{{4}}(  [\d,]+ samples/s  waiting \d+%)?\n"

TRAIN = """\
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx
from phalanx.train import Trainer


def loss(model, batch):
    time.sleep(0.4)  # so that the trainer measures its speed
    return model(*batch).square().mean()


def train():
    with phalanx.init() as session:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(12, 4))
        trainer = Trainer(model, optimizer, data, loss, global_batch=4, epochs=2)
        return session.rank, trainer.fit().step
"""


@pytest.fixture
def run_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[Any]]]:
    """Return a function that runs cells in a new kernel and returns the outputs of each."""

    def run(*cells: str) -> list[list[Any]]:
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
        resources = {"metadata": {"path": str(tmp_path)}}
        NotebookClient(book, timeout=250, kernel_name="python3", resources=resources).execute()
        return [cell.outputs for cell in book.cells]

    monkeypatch.setenv("PHALANX_JOBS_DIR", str(tmp_path / "jobs"))
    # A kernel sets these itself, so the environment of the tests must not.
    for name in ("NO_COLOR", "TERM", "PAGER"):
        monkeypatch.delenv(name, raising=False)
    return run


def get_text(outputs: list[Any]) -> str:
    """Return the text on stdout, after a check that nothing is on stderr, which would be red."""
    streams = [each for each in outputs if each.output_type == "stream"]
    assert [each.text for each in streams if each.name != "stdout"] == []
    return "".join(each.text for each in streams)


def check_progress(outputs: list[Any]) -> None:
    """Check the progress of a training: one bar, which is full, and the lines of the epochs."""
    (bar,) = [each for each in outputs if each.output_type == "display_data"]
    found = BAR.fullmatch(bar.data["text/plain"])
    assert found, bar.data
    assert found[1] == "6/6"
    assert bar.data["text/html"].startswith("<pre")
    assert re.sub(r"<[^>]*>", "", bar.data["text/html"]).rstrip() == found[0]
    lines = LINE.format(epoch=1, step=3) + LINE.format(epoch=2, step=6)
    assert re.fullmatch(lines, get_text(outputs))


@pytest.mark.timeout(300)
def test_training_shows_a_bar_and_lines(run_cells: Any) -> None:
    _, launched, alone = run_cells(TRAIN, "phalanx.launch(train, 2)", "train()")
    check_progress(launched)
    assert launched[-1].data["text/plain"] == "[(0, 6), (1, 6)]"
    check_progress(alone)
    assert alone[-1].data["text/plain"] == "(0, 6)"


def as_lines(text: str) -> str:
    """Return the lines of a command's output, after a check for control codes except colours."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text.replace("\r\n", "\n"))
    assert not CONTROL.search(plain), repr(text)
    return plain


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_commands_in_cells_write_lines(run_cells: Any, tmp_path: Path) -> None:
    script = f"{TRAIN}\n\nrank, _ = train()\nif rank == 1:\n    raise ValueError('no data')\n"
    (tmp_path / "train.py").write_text(script)
    phalanx = f"!{sys.executable} -m phalanx"
    run, jobs, explain, watch, once = map(
        as_lines,
        map(
            get_text,
            run_cells(
                f"{phalanx} run --nproc-per-node 2 train.py",
                f"{phalanx} jobs",
                f"{phalanx} explain",
                f"{phalanx} watch",  # as with --once: a cell can't be redrawn
                f"{phalanx} watch --once",
            ),
        ),
    )
    for epoch, step in ((1, 3), (2, 6)):
        line = LINE.format(epoch=epoch, step=step)
        assert len(re.findall(rf"^\[rank 0\] {line}", run, re.MULTILINE)) == 1
    assert "━" not in run
    assert "ValueError: no data" in run
    assert "failed" in jobs
    assert re.search(r"Rank 1 \(pid \d+\) failed", explain)
    assert watch.count("All ranks have ended.") == once.count("All ranks have ended.") == 1
