"""The tutorial: each of its programs and pages runs as a reader runs it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.fences import Fence, read_fences

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "tutorial").glob("*.md"))
PROGRAMS = ROOT / "examples" / "tutorial"
LIMIT = 100.0


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with the programs of the tutorial, as a reader has it."""
    return Path(shutil.copytree(PROGRAMS, tmp_path / "tutorial"))


def run(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of a page in a shell that finds `phalanx` and `python`."""
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", f'PATH="{Path(sys.executable).parent}:$PATH"; {command}'],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def normalize(lines: list[str], *, digits_vary: bool = True) -> list[str]:
    """Sort lines, since ranks print in any order, and mask numbers that vary."""
    pattern = r"\d+\.\d+|\d+(?=%)|(?<=pid )\d+|(?<=, )\S*(?=runs/digits)"
    return sorted(re.sub(pattern, "N", line) if digits_vary else line for line in lines)


def check_console(fence: Fence, directory: Path) -> None:
    for command, expected in fence.commands:
        ended = run(command, directory)
        assert ended.returncode == 0, ended.stderr
        vary = fence.comment == "digits vary"
        found = normalize(ended.stdout.splitlines(), digits_vary=vary)
        assert found == normalize(expected, digits_vary=vary), command


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
            check_console(fence, directory)
        elif fence.language == "python":
            check_python(fence, [*fences[number + 1 :], None][0], directory)
        else:
            assert fence.language == "text", f"{page.name}:{fence.line}: {fence.language!r}"


def test_a_killed_rank(directory: Path) -> None:
    """The output on the last page, apart from the stack trace, pids and digits."""
    page = (ROOT / "docs" / "tutorial" / "trainer.md").read_text()
    shown = page.partition("--kill 35\n")[2].partition("```")[0].splitlines()
    command = "phalanx run --nproc-per-node 2 --max-restarts 1 trainer.py runs/digits --kill 35"
    ended = run(f"{command} 2>&1", directory)
    assert ended.returncode == 0, ended.stdout
    found = normalize(ended.stdout.splitlines())
    for line in normalize([line for line in shown if "PeerLost" not in line and line != "..."]):
        assert line in found
    assert re.search(r"PeerLost: .* rank 1 \(pid N\) was killed by SIGKILL", "\n".join(found))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_a_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("program", sorted(PROGRAMS.glob("*.py")), ids=lambda path: path.stem)
@pytest.mark.parametrize(("ranks", "backend"), [(1, "phalanx"), (8, "phalanx"), (3, "gloo")])
@pytest.mark.sampled(3)
def test_program_on_other_ranks_and_backends(
    program: Path, ranks: int, backend: str, directory: Path
) -> None:
    """It works, or says in one line what to do."""
    name = program.stem
    arguments = {"trainer": f"runs --backend {backend}", "initialization": f"{ranks} {backend}"}
    launcher = "python" if name == "initialization" else f"phalanx run --nproc-per-node {ranks}"
    ended = run(f"{launcher} {program.name} {arguments.get(name, backend)}", directory)
    if ended.returncode:
        assert ranks == 1, ended.stderr
        assert re.search(r": phalanx run --nproc-per-node \d", ended.stderr), ended.stderr
        assert "Traceback" not in ended.stderr
