"""The Python blocks of the guides run, one after another.

A file in `contexts` defines the names that they take for granted. Its part before the first mark
runs first, the part after `# ---- block 3` before the third block, and the one after `# ---- end`
last.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.fences import read_fences

ROOT = Path(__file__).parents[2]
CONTEXTS = sorted((Path(__file__).parent / "contexts").glob("*.txt"))
LIMIT = 100.0


def read_context(path: Path) -> dict[str, str]:
    """Return the parts of a context, by "start", the number of a block, or "end"."""
    start, *rest = re.split(r"^# ---- (?:block )?(\w+)$", path.read_text(), flags=re.MULTILINE)
    return {"start": start, **dict(zip(rest[::2], rest[1::2], strict=True))}


def make_program(context: Path) -> str:
    """Return the program that consists of the blocks of a page in their context."""
    page = ROOT / "docs" / f"{context.stem}.md"
    parts = read_context(context)
    blocks = [fence for fence in read_fences(page) if fence.language == "python"]
    program = [parts.pop("start")]
    for number, block in enumerate(blocks, 1):
        program += [parts.pop(str(number), ""), f"# line {block.line}\n", block.text]
    program.append(parts.pop("end"))
    assert not parts, f"{context.name} has parts for blocks that {page.name} lacks: {list(parts)}"
    return "".join(program)


@pytest.mark.parametrize("context", CONTEXTS, ids=lambda path: path.stem)
def test_blocks_of_a_guide(context: Path, tmp_path: Path) -> None:
    (tmp_path / "guide.py").write_text(make_program(context))
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", "guide.py"]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert ended.returncode == 0, ended.stderr
