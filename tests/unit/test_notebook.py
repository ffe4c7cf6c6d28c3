"""The way of an output to a notebook's cell, without a kernel."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.system import notebook
from phalanx.train.progress import Display


class RecordingCell:
    """A cell that keeps what it has to show."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, Any]] = []

    def show(self, output_id: str, html: str, text: str, *, replaces: bool) -> None:
        self.outputs.append({"id": output_id, "html": html, "text": text, "replaces": replaces})


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The read end of the pipe through which this process, as a rank, reaches its cell."""
    monkeypatch.setattr(notebook, "_inherited", None)
    read, write = os.pipe()
    notebook.inherit_cell(write)
    yield read
    os.close(read)


def use_kernel(monkeypatch: pytest.MonkeyPatch, pid: int) -> list[tuple[Any, ...]]:
    """Let this process have a kernel of a process; return the list of what it publishes."""
    published: list[tuple[Any, ...]] = []
    publisher = SimpleNamespace(
        publish=lambda data, *, transient, update: published.append((data, transient, update))
    )
    kernel = SimpleNamespace(session=SimpleNamespace(pid=pid))
    shell = SimpleNamespace(kernel=kernel, display_pub=publisher)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    return published


def test_only_a_kernel_has_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", None)
    assert notebook.find_cell() is None
    shell = SimpleNamespace()  # that of a terminal
    for get_ipython in (lambda: None, lambda: shell):
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=get_ipython))
        assert notebook.find_cell() is None
    use_kernel(monkeypatch, os.getpid() + 1)  # this process is a fork of the kernel
    assert notebook.find_cell() is None


def test_a_kernel_replaces_an_output_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    published = use_kernel(monkeypatch, os.getpid())
    cell = notebook.find_cell()
    assert cell is not None
    cell.show("bar", "<b>1</b>", "1", replaces=False)
    cell.show("bar", "<b>2</b>", "2", replaces=True)
    transient = {"display_id": "bar"}
    assert published == [
        ({"text/html": "<b>1</b>", "text/plain": "1"}, transient, False),
        ({"text/html": "<b>2</b>", "text/plain": "2"}, transient, True),
    ]


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_outputs_arrive_in_any_parts(pipe: int, size: int) -> None:
    sender = notebook.find_cell()
    assert sender is not None
    texts = ["", "line\nline", "\r\x1b[2K", "ü━" * 400]
    for number, text in enumerate(texts):
        sender.show("bar", f"<pre>{text}</pre>", text, replaces=number > 0)
    cell = RecordingCell()
    reader = notebook.OutputReader(cell)
    data = os.read(pipe, 1 << 16)
    for begin in range(0, len(data), size):
        reader.write(None, b"", data[begin : begin + size])
    assert [each["text"] for each in cell.outputs] == texts
    assert [each["html"] for each in cell.outputs] == [f"<pre>{text}</pre>" for text in texts]
    assert [each["replaces"] for each in cell.outputs] == [False, True, True, True]


def test_a_bar_in_a_cell_is_one_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = RecordingCell()
    monkeypatch.setattr(notebook, "_inherited", cell)
    monkeypatch.setenv("FORCE_COLOR", "1")  # every kernel sets it
    with Display(is_main=True, enabled=True, has_recorder=False) as display:
        display.begin(0, 3, None)
        for step in (1, 2, 3):
            display.step(step, 0, {"loss": 0.5}, 4, 0.0)
        display.end_epoch(3, 0, 0.5, {})
    first, *others = cell.outputs
    assert not first["replaces"]
    assert all(each["replaces"] and each["id"] == first["id"] for each in others)
    assert "0/3" in first["text"]
    assert "3/3" in others[-1]["text"]
    assert "loss 0.5000" in others[-1]["text"]
    assert capsys.readouterr() == ("epoch 1  step 3/3  loss 0.5000\n", "")
    with Display(is_main=False, enabled=True, has_recorder=False) as display:
        display.begin(0, 3, None)
    assert len(cell.outputs) == len(others) + 1


def test_forced_colours_do_not_make_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Display(is_main=True, enabled=True, has_recorder=False) as display:
        display.begin(0, 1, None)
        display.step(1, 0, {"loss": 0.5}, 4, 0.0)
        display.end_epoch(1, 0, 0.5, {})
    assert capsys.readouterr() == ("", "epoch 1  step 1/1  loss 0.5000\n")
