"""The tutorial: each of its programs and pages runs as a reader runs it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.docs.fences import Fence, read_fences
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


def is_part(block: str, source: str) -> bool:
    """Return whether a block is part of a program, whatever its indentation and line breaks."""
    return _join_lines(block) in _join_lines(source)


def _join_lines(text: str) -> str:
    return re.sub(r",(?=[)\]}])", "", re.sub(r"\s+", "", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_of_a_page(page: Path, directory: Path) -> None:
    fences = read_fences(page)
    for number, fence in enumerate(fences):
        if fence.is_checked_elsewhere:
            continue
        if fence.comment.endswith(".py"):
            source = (ROOT / fence.comment).read_text()
            assert is_part(fence.text, source), f"{page.name}:{fence.line} is not in the program"
        elif fence.language == "console":
            check_session(fence, directory)
        elif fence.language == "python":
            check_python(fence, [*fences[number + 1 :], None][0], directory)
        else:
            assert fence.language == "text", f"{page.name}:{fence.line}: {fence.language!r}"


def test_a_killed_rank(directory: Path) -> None:
    """The output on the last page, apart from the stack trace, pids and digits."""
    page = (ROOT / "docs" / "tutorial" / "trainer.md").read_text()
    shown = page.partition("--kill 35\n")[2].partition("```")[0].splitlines()
    command = "phalanx run --nproc-per-node 2 --max-restarts 1 trainer.py runs/digits --kill 35"
    varying = Fence(0, "console", "", "digits vary")
    told = None
    # On a busy machine, the launcher may stop rank 0 before that has printed its exception.
    for _ in range(3):
        ended = run(f"{command} 2>&1", directory)
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
        shutil.rmtree(directory / "runs")
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
