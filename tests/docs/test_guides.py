"""README and guides: every block is executed, or names the test that checks it.

The Python blocks of a page are one program. A file in `contexts` has its other lines, and a line
`# ---- block N`, indented as the block shall be, in the place of each block. If its first line is
`# $ COMMAND`, this command runs the program `guide.py`, else two ranks do; `GUIDE` in their
environment is the path of the page.

Sessions in a console run one after another in a directory that has the blocks marked `file NAME`,
the files in `contexts/PAGE`, and `examples`; `prepare.sh` among them runs first.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.docs.fences import read_fences
from tests.docs.sessions import check_session, run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CONTEXTS = Path(__file__).parent / "contexts"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHER_PAGES = [
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs" / "tutorial").glob("*.md")),
    *sorted((ROOT / "docs" / "ko").rglob("*.md")),
]
# These use directives of Sphinx, which executes them.
GENERATED = {"index.md"}


def select(language: str) -> list[object]:
    """Return the pages that have blocks of this language to execute, as parameters of a test."""
    return [
        pytest.param(page, id=page.stem)
        for page in PAGES
        if any(
            fence.language == language and not fence.is_checked_elsewhere
            for fence in read_fences(page)
        )
    ]


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=lambda page: page.stem)
def test_every_block_is_checked(page: Path) -> None:
    if page.name in GENERATED:
        return
    text = page.read_text(encoding="utf-8")
    fences = read_fences(page)
    assert 2 * len(fences) == len(re.findall(r"^(?:> ?)? *```", text, re.MULTILINE))
    for fence in fences:
        if "ko" in page.parts:  # its blocks are those of the English page
            assert fence.language, f"{page.name}:{fence.line}: it has no language"
            continue
        defect = fence.find_defect(page, ROOT)
        assert not defect, f"{page.name}:{fence.line}: {defect}"


@pytest.mark.parametrize(
    ("block", "defect"),
    [
        ("```\n", "it has no language"),
        ("```bash\n", "nothing executes this language"),
        ("```text\n", "text needs a comment"),
        ("```console\nprogram\n", "a session begins with `$ `"),
        ("<!-- seen -->\n```python\n", "the comment 'seen' is unknown"),
        ("<!-- not executed: -->\n```bash\n", "the comment 'not executed:' is unknown"),
        ("<!-- output of absent.py -->\n```text\n", "there is no absent.py"),
        ("<!-- needs MPI: setup.py::test_a -->\n```bash\n", "setup.py has no test_a"),
        ("<!-- needs MPI: setup.py::test_b -->\n```bash\n", ""),
        ("<!-- numbers vary, exit code 3 -->\n```console\n$ program\n", ""),
    ],
)
def test_a_block_without_a_check_is_rejected(block: str, defect: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{block}```\n")
    (tmp_path / "setup.py").write_text("def test_b(): ...\n")
    (fence,) = read_fences(page)
    assert fence.find_defect(page, tmp_path) == defect


def make_program(page: Path) -> str:
    """Return the program that consists of the blocks of a page in their context."""
    context = CONTEXTS / f"{page.stem}.txt"
    assert context.exists(), f"{page.name} has Python blocks: add {context}"
    blocks = {
        str(number): fence
        for number, fence in enumerate(
            (
                fence
                for fence in read_fences(page)
                if fence.language == "python" and not fence.is_checked_elsewhere
            ),
            1,
        )
    }

    def insert(match: re.Match[str]) -> str:
        fence = blocks.pop(match["number"])
        lines = fence.text.splitlines()
        return "\n".join(match["indent"] + line for line in (f"# line {fence.line}", *lines))

    program = re.sub(
        r"^(?P<indent> *)# ---- block (?P<number>\d+)$",
        insert,
        context.read_text(),
        flags=re.MULTILINE,
    )
    assert not blocks, f"{context.name} has no place for the blocks {list(blocks)}"
    return program


@pytest.mark.parametrize("page", select("python"))
def test_python_of_a_page(page: Path, tmp_path: Path) -> None:
    program = make_program(page)
    (tmp_path / "guide.py").write_text(program)
    match = re.match(r"# \$ (.*)", program)
    ended = run(
        match[1] if match else "phalanx run --nproc-per-node 2 guide.py", tmp_path, GUIDE=str(page)
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("page", select("console"))
def test_sessions_of_a_page(page: Path, tmp_path: Path) -> None:
    if (files := CONTEXTS / page.stem).is_dir():
        shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    if (tmp_path / "prepare.sh").exists():
        prepared = run("source prepare.sh", tmp_path)
        assert prepared.returncode == 0, prepared.stderr
    for fence in read_fences(page):
        if fence.file_name:
            (tmp_path / fence.file_name).write_text(fence.text)
        elif fence.is_session:
            check_session(fence, tmp_path)
