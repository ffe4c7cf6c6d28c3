"""torchrun's parser, read from the sources of PyTorch."""

from __future__ import annotations

import subprocess
import sys
from argparse import Action, ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run as torchrun

from phalanx import torch_sources


def describe(parser: ArgumentParser) -> list[tuple[Any, ...]]:
    """Return all that decides how a parser reads arguments; functions by their names."""

    def describe_action(action: Action) -> tuple[Any, ...]:
        converter = getattr(action.type, "__qualname__", action.type)
        kind = type(action).__qualname__
        names = (tuple(action.option_strings), action.dest, action.nargs, action.const)
        return (kind, *names, action.default, converter, action.choices, action.required)

    return [describe_action(action) for action in parser._actions]


def read_in_new_process(code: str, *paths: Path) -> list[str]:
    """Return the words that a program prints which has not imported torch."""
    search = f"import sys; sys.path[:0] = {[str(path) for path in paths]}; "
    command = [sys.executable, "-c", search + code]
    return subprocess.check_output(command, text=True, timeout=100).split()


@pytest.mark.parametrize("variable", ["", "PET_NNODES", "PET_MODULE", "PET_MASTER_PORT"])
def test_the_parser_is_that_of_torchrun(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if variable:
        monkeypatch.setenv(variable, "1")
    loaded = torch_sources._Sources().load("torch.distributed.run", "get_args_parser")
    assert loaded is not torchrun.get_args_parser
    assert describe(loaded()) == describe(torchrun.get_args_parser())
    assert len(loaded()._actions) > 20


def test_lists_are_read_by_a_function_inside_the_function() -> None:
    loaded = torch_sources._Sources().load("torch.distributed.run", "get_args_parser")()
    args = loaded.parse_args(["--duplicate-stdout-filters", "a,,b,c", "x.py", "--lr", "1"])
    assert args.duplicate_stdout_filters == ["a,b", "c"]
    assert (args.training_script, args.training_script_args) == ("x.py", ["--lr", "1"])


def test_torch_is_not_imported() -> None:
    code = (
        "from phalanx.torch_sources import make_torchrun_parser; "
        "print(len(make_torchrun_parser()._actions), 'torch' in sys.modules)"
    )
    count, is_imported = read_in_new_process(code)
    assert int(count) == len(torchrun.get_args_parser()._actions)
    assert is_imported == "False"


MINIMAL = "def get_args_parser(): return 'minimal'\n"


@pytest.mark.parametrize(
    "source",
    [
        "from argparse import ArgumentParser\n",  # there is no such function
        "from numpy import array\n" + MINIMAL.replace("'minimal'", "array()"),
        MINIMAL.replace("'minimal'", "unknown"),
    ],
)
def test_sources_that_are_not_as_expected(source: str, tmp_path: Path) -> None:
    """They do not matter: torch is imported, whose function is another one here."""
    (tmp_path / "distributed").mkdir()
    (tmp_path / "distributed/run.py").write_text(source)
    code = (
        "from pathlib import Path; import phalanx.torch_sources as s; "
        "read = s._Sources.__init__; "
        f"s._Sources.__init__ = lambda self: (read(self), setattr(self, '_root', "
        f"Path({str(tmp_path)!r})))[0]; "
        "print(len(s.make_torchrun_parser()._actions), 'torch' in sys.modules)"
    )
    count, is_imported = read_in_new_process(code)
    assert int(count) == len(torchrun.get_args_parser()._actions)
    assert is_imported == "True"


def test_the_shutdown_timeout_of_torchrun() -> None:
    assert torch_sources.shutdown_timeout(Namespace(shutdown_timeout=7)) == 7
    assert torch_sources.shutdown_timeout(Namespace(shutdown_timeout=None), 10) is None
    assert torch_sources.shutdown_timeout(Namespace(), 10) == 10
