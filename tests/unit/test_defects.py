"""The table of defects made by hand: each can still be made, and names tests that are there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.defects import DEFECTS, SOURCE, Defect


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_can_be_made(defect: Defect, repository: Path) -> None:
    source = (SOURCE / defect.file).read_text()
    assert source.count(defect.old) == 1
    ast.parse(source.replace(defect.old, defect.new))
    assert all((repository / "tests" / name).is_file() for name in defect.tests)
