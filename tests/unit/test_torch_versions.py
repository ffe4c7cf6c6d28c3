"""Differences between versions of PyTorch are confined to one module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import phalanx
from phalanx import torch_versions
from phalanx.doctor import software

# The names under which modules of Phalanx import PyTorch's.
TORCH = {"torch", "dist", "c10d", "torchrun"}
SOURCES = Path(phalanx.__file__).parent


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("2.10.0", False),
        ("2.11.0", True),
        ("2.13.0+cpu", True),
        ("2.14.1+cu130", True),
        ("2.15.0.dev20261001", False),
        ("3.0.0", False),
    ],
)
def test_tested_versions(version: str, tested: bool) -> None:
    assert torch_versions.is_tested(version) == tested


def test_the_pytorch_in_use_is_tested() -> None:
    assert torch_versions.is_tested(torch.__version__)


def test_doctor_notes_another_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.check_versions()[1].level == "ok"
    monkeypatch.setattr(software.metadata, "version", lambda _name: "2.99.0")
    (_, found, *_) = software.check_versions()
    assert found.level == "note"
    assert found.message.startswith("torch 2.99.0, ")


def version_checks(tree: ast.AST) -> Iterator[int]:
    """Return lines that check whether PyTorch has a name, or compare its version."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "hasattr"}:
            root = ast.unparse(node.args[0]).partition(".")[0]
            named = isinstance(node.args[1], ast.Constant)
            if root in TORCH and (named or len(node.args) == 3):
                yield node.lineno
        elif isinstance(node, ast.Compare) and "torch.__version__" in ast.unparse(node):
            yield node.lineno


def test_no_other_module_checks_versions() -> None:
    found = [
        f"{path.relative_to(SOURCES)}:{line}"
        for path in SOURCES.rglob("*.py")
        if path.name != "torch_versions.py"
        for line in version_checks(ast.parse(path.read_text()))
    ]
    assert found == []


def test_version_checks_are_found() -> None:
    source = 'getattr(dist, "a", None)\nhasattr(torch.ops.c, "b")\nif torch.__version__ < "2": ...'
    assert list(version_checks(ast.parse(source))) == [1, 2, 3]
    assert not list(version_checks(ast.parse("getattr(torch, name)")))
