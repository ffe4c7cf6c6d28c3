"""The wheel, installed in an empty environment of a machine that has no compiler."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.docs.fences import read_fences

ROOT = Path(__file__).parents[2]
LIMIT = 110.0
BUILD_LIMIT = 280.0
# Beside those of the environment, the programs that the commands of the tutorial use.
PROGRAMS = ("bash", "env", "grep")
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++")
# A directory of wheels to test instead of one that is built here.
RELEASE = os.environ.get("PHALANX_TEST_WHEELS")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(command: list[str | Path], limit: float = LIMIT, **options: object) -> str:
    """Run a command that must succeed; return its output."""
    ended = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=limit, **options
    )
    assert ended.returncode == 0, f"{command}:\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@dataclass
class Environment:
    """A virtual environment with the wheel and its requirements, and a PATH without a compiler."""

    folder: Path
    programs: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(self, command: str, cwd: Path) -> str:
        """Run a command of a shell that must succeed; return its output."""
        kept = {"HOME", "TMPDIR", "LANG", "PHALANX_JOBS_DIR", "PHALANX_TEST_SESSION"}
        variables = {name: value for name, value in os.environ.items() if name in kept}
        variables["PATH"] = f"{self.folder / 'bin'}:{self.programs}"
        shell = [self.programs / "bash", "-o", "pipefail", "-c", command]
        return run(shell, cwd=cwd, env=variables)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wheel")


def build_wheel(source: Path, output: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    run([*pip, "--wheel-dir", output, source], BUILD_LIMIT)
    (wheel,) = output.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def sdist(folder: Path) -> Path:
    backend = "import sys, scikit_build_core.build as b; b.build_sdist(sys.argv[1])"
    run([sys.executable, "-c", backend, folder], cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(folder: Path, sdist: Path) -> Path:
    """The wheel that the sdist builds, or that of the release for this interpreter."""
    if RELEASE is None:
        return build_wheel(sdist, folder / "from-sdist")
    find = ["--no-index", "--no-deps", "--find-links", RELEASE, "phalanx"]
    run([sys.executable, "-m", "pip", "download", "--dest", folder / "release", *find])
    (wheel,) = (folder / "release").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def environment(folder: Path, wheel: Path) -> Environment:
    environment = Environment(folder / "environment", folder / "programs")
    run([sys.executable, "-m", "venv", "--without-pip", environment.folder])
    pip = [sys.executable, "-m", "pip", "--python", environment.python]
    run([*pip, "install", "--no-deps", "--no-index", wheel])
    (packages,) = environment.folder.glob("lib/python*/site-packages")
    # torch takes minutes to install: the requirements, and nothing else, are shared.
    shared = folder / "requirements"
    shared.mkdir()
    for entry in requirement_files("phalanx"):
        (shared / entry.name).symlink_to(entry)
    (packages / "requirements.pth").write_text(f"{shared}\n")
    environment.programs.mkdir()
    for program in PROGRAMS:
        found = shutil.which(program)
        assert found, program
        (environment.programs / program).symlink_to(found)
    return environment


def requirement_files(name: str) -> Iterator[Path]:
    """Yield the top-level files and directories of all that a distribution requires."""
    found: set[str] = set()
    pending, top_level = [name], set()
    while pending:
        distribution = importlib.metadata.distribution(pending.pop())
        for text in distribution.requires or ():
            requirement = Requirement(text)
            key = re.sub(r"[-_.]+", "-", requirement.name).lower()
            is_required = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if is_required and key not in found:
                found.add(key)
                pending.append(key)
    assert "torch" in found
    for key in found:
        distribution = importlib.metadata.distribution(key)
        for file in distribution.files or ():
            if file.parts[0] not in ("..", "__pycache__"):
                top_level.add(Path(str(distribution.locate_file(file.parts[0]))))
    return iter(sorted(top_level))


@pytest.fixture
def sources(environment: Environment, tmp_path: Path) -> Path:
    """The examples, as they are in the wheel."""
    environment.run("phalanx examples", tmp_path)
    return tmp_path / "examples"


def contents(wheel: Path) -> dict[str, bytes]:
    """Return the files of a wheel, but its metadata, which contain a hash of the extension."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/RECORD")]
        return {name: b"" if name.endswith(".so") else archive.read(name) for name in names}


def test_the_environment_has_the_wheel_and_no_compiler(
    environment: Environment, tmp_path: Path
) -> None:
    where = "import phalanx, phalanx._native as n; print(phalanx.__file__, n.__file__, sep='\\n')"
    for path in environment.run(f'python -c "{where}"', tmp_path).splitlines():
        assert Path(path).is_relative_to(environment.folder)
    found = [shutil.which(name, path=str(environment.programs)) for name in COMPILERS]
    assert not any(found)
    # Tools of the tests are no requirements.
    environment.run("! python -c 'import pytest' 2>&1", tmp_path)


def test_the_self_check(environment: Environment, tmp_path: Path) -> None:
    environment.run("phalanx test", tmp_path)


def test_the_main_job(environment: Environment, sources: Path) -> None:
    output = environment.run("phalanx run --nproc-per-node 2 train_digits.py", sources)
    accuracy = re.search(r"accuracy on held-out digits: (\d+\.\d+)%", output)
    assert accuracy, output
    assert float(accuracy[1]) >= 97.0


def test_the_programs_of_the_tutorial(environment: Environment, sources: Path) -> None:
    commands = {
        command
        for page in sorted((ROOT / "docs" / "tutorial").glob("*.md"))
        for fence in read_fences(page)
        for command, _ in fence.commands
        if ".py" in command
    }
    for command in sorted(commands):
        environment.run(command, sources / "tutorial")
    programs = {path.name for path in (sources / "tutorial").glob("*.py")}
    assert programs == {name for command in commands for name in re.findall(r"\w+\.py", command)}


@pytest.mark.skipif(RELEASE is not None, reason="compares wheels that are built here")
def test_the_sdist_builds_the_same(folder: Path, wheel: Path) -> None:
    # This is fast: what the installation in .venv has compiled is used again.
    from_tree = build_wheel(ROOT, folder / "from-tree")
    assert from_tree.name == wheel.name
    assert contents(from_tree) == contents(wheel)
