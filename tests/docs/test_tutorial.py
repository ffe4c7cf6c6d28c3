"""The tutorial: each of its programs and pages runs as a reader runs it.

A reader types the listings of one page into an empty directory, and runs its commands there. That
the site shows these listings and commands is checked by `tools/check_site.py` when it is built.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.docs.fences import Fence, read_fences, type_programs
from tests.docs.sessions import check_session, mask, run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "tutorial").glob("*.md"))
PROGRAMS = ROOT / "examples" / "tutorial"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with the programs of the tutorial, as a reader has it."""
    return Path(shutil.copytree(PROGRAMS, tmp_path / "tutorial"))


def check_python(fence: Fence, following: Fence | None, directory: Path) -> None:
    (directory / "block.py").write_text(fence.text)
    ended = run("python block.py", directory)
    assert ended.returncode == 0, ended.stderr
    if following is not None and following.language == "text" and not following.comment:
        assert ended.stdout == following.text


def type_page(page: Path, directory: Path) -> None:
    """Write the files that a page lists, and check that they are the programs."""
    for name, text in type_programs(page).items():
        assert text == (PROGRAMS / name).read_text(), f"{page.name} is not {name}"
        (directory / name).write_text(text)


def test_every_program_is_listed_whole_by_one_page() -> None:
    listed = [name for page in PAGES for name in type_programs(page)]
    assert sorted(listed) == sorted(path.name for path in PROGRAMS.glob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_of_a_page(page: Path, tmp_path: Path) -> None:
    type_page(page, tmp_path)
    fences = read_fences(page)
    for number, fence in enumerate(fences):
        if fence.is_checked_elsewhere or fence.program:
            continue
        if fence.language == "console":
            check_session(fence, tmp_path)
        elif fence.language == "python":
            check_python(fence, [*fences[number + 1 :], None][0], tmp_path)
        else:
            assert fence.language == "text", f"{page.name}:{fence.line}: {fence.language!r}"


def test_a_killed_rank(tmp_path: Path) -> None:
    """The output on the last page, apart from the stack trace, pids and digits."""
    page = ROOT / "docs" / "tutorial" / "trainer.md"
    type_page(page, tmp_path)
    [(command, shown)] = [
        each
        for fence in read_fences(page)
        for each in fence.commands
        if each[0].endswith(" --kill 35")
    ]
    varying = Fence(0, "console", "", "digits vary")
    told = None
    # On a busy machine, the launcher may stop rank 0 before that has printed its exception.
    for _ in range(3):
        ended = run(f"{command} 2>&1", tmp_path)
        assert ended.returncode == 0, ended.stdout
        found = [mask(line, varying) for line in ended.stdout.splitlines()]
        early = ("PeerLost", "because of it")
        for line in shown:
            if line != "..." and not any(text in line for text in early):
                assert mask(line, varying) in found
        pattern = (
            r"(?s)PeerLost: [^\n]* rank 1 \(pid N\) was killed by SIGKILL.*"
            r"\n  failed because of it: rank 0\n"
        )
        if told := re.search(pattern, "\n".join(found)):
            break
        shutil.rmtree(tmp_path / "runs")
    assert told, ended.stdout


@pytest.mark.parametrize("program", sorted(PROGRAMS.glob("*.py")), ids=lambda path: path.stem)
@pytest.mark.parametrize(("ranks", "backend"), [(1, "phalanx"), (4, "phalanx"), (2, "gloo")])
def test_program_on_other_ranks_and_backends(
    program: Path, ranks: int, backend: str, directory: Path
) -> None:
    """It works, or says in one line what to do."""
    name = program.stem
    arguments = {"trainer": f"runs --backend {backend}", "initialization": f"{ranks} {backend}"}
    launcher = "python" if name == "initialization" else f"phalanx run --nproc-per-node {ranks}"
    # Gloo fails in a rank that is still connecting when another one ends.
    barrier = {"TORCH_DIST_INIT_BARRIER": "1"} if backend == "gloo" else {}
    ended = run(f"{launcher} {program.name} {arguments.get(name, backend)}", directory, **barrier)
    if ended.returncode:
        assert ranks == 1, ended.stderr
        assert re.search(r": phalanx run --nproc-per-node \d", ended.stderr), ended.stderr
        assert "Traceback" not in ended.stderr
