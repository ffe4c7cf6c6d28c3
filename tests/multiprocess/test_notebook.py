"""Cells of a notebook in a real kernel: what they show of training and of commands.

The same in JupyterLab, in a browser, is a test of `make ecosystem`, on a machine with Chromium.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.ports import find_free_port
from tests.waiting import wait_for

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


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
IS_COMPLETE = CHROMIUM and all(map(importlib.util.find_spec, ("jupyterlab", "playwright")))
OUTPUTS = """
() => [...document.querySelectorAll(".jp-Cell")].map((cell) =>
  [...cell.querySelectorAll(".jp-OutputArea-output")].map((output) =>
    [output.dataset.mimeType, output.textContent]))
"""


@contextlib.contextmanager
def open_in_jupyterlab(book: Path) -> Iterator[Any]:
    """Open a notebook in JupyterLab, and yield the page, with a kernel that waits for cells."""
    from playwright.sync_api import sync_playwright

    port, token = find_free_port(), secrets.token_hex(16)
    options = {
        "ServerApp.port": port,
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.root_dir": book.parent,
        "IdentityProvider.token": token,
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += [
        "--expose-app-in-browser",
        *(f"--{name}={value}" for name, value in options.items()),
    ]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    folders = {f"JUPYTER_{name}_DIR": f"{book.parent}/jupyter" for name in ("CONFIG", "RUNTIME")}
    with (
        (book.parent / "server.log").open("w") as log,
        subprocess.Popen(
            command, env={**os.environ, **folders, "PATH": path}, stdout=log, stderr=log
        ) as server,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]) as browser,
    ):
        try:
            # Cells that are not in view would not be drawn.
            page = browser.new_page(viewport={"width": 1400, "height": 4000})
            page.set_default_timeout(120_000)
            wait_for(lambda: "is running at" in Path(log.name).read_text(), 120)
            page.goto(f"http://127.0.0.1:{port}/lab/tree/{book.name}?token={token}")
            page.locator(".jp-Dialog .jp-mod-accept").click()  # the kernel
            page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for()
            yield page
        finally:
            server.terminate()


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.skipif(not IS_COMPLETE, reason="needs Chromium, and what `make ecosystem` installs")
def test_jupyterlab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_JOBS_DIR", str(tmp_path / "jobs"))
    script = f"{TRAIN}\n\nrank, _ = train()\nif rank == 1:\n    raise ValueError('no data')\n"
    (tmp_path / "train.py").write_text(script)
    run = "!phalanx run --nproc-per-node 2 train.py"
    commands = (run, "!phalanx explain", "!phalanx watch --once", "print('the', 'end')")
    cells = (TRAIN, "phalanx.launch(train, 2)", "train()", *commands)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
    nbformat.write(book, tmp_path / "book.ipynb")
    steps: list[set[str]] = [set() for _ in cells]
    outputs: list[Any] = []

    with open_in_jupyterlab(tmp_path / "book.ipynb") as page:
        page.evaluate("() => { void jupyterapp.commands.execute('runmenu:run-all') }")

        def has_ended() -> bool:
            page.wait_for_timeout(100)
            outputs[:] = page.evaluate(OUTPUTS)
            for seen, cell in zip(steps, outputs, strict=True):
                seen.update(re.findall(r"training ━*[╸╺]?━* (\d+/6)", "".join(t for _, t in cell)))
            return any("the end" in text for _, text in outputs[-1])

        wait_for(has_ended, 300)

    texts = ["".join(text for _, text in cell) for cell in outputs]
    kinds = {kind for cell in outputs for kind, _ in cell}
    # Nothing is on stderr, which has a red background.
    assert kinds == {"text/html", "application/vnd.jupyter.stdout", "text/plain"}
    assert not CONTROL.search("".join(texts).replace("\r\n", "\n"))
    for number, result in ((1, "[(0, 6), (1, 6)]"), (2, "(0, 6)")):
        (bar,) = [text for kind, text in outputs[number] if kind == "text/html"]
        found = BAR.fullmatch(bar.rstrip())
        assert found, bar
        assert found[1] == "6/6"
        assert len(steps[number]) > 1, "the bar did not move"
        assert texts[number].endswith(result)
    assert "━" not in texts[3]
    assert "[rank 1] ValueError: no data" in texts[3]
    assert all("Rank 1 (pid" in texts[number] for number in (3, 4))
    assert "All ranks have ended." in texts[5]
    # The kernel has left its own job, and goes on.
    assert "another job is running" not in texts[4] + texts[5]
