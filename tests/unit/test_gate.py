"""tools/gate.py on a small project: it ends what it began, runs failed tests again, and counts."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_for
from tools import gate

MAKEFILE = """
good:
\ttouch good-ran
bad:
\tfalse
hangs:
\tsleep 600
nothing:
\t@{pytest} -m nothing $(OPTIONS) tests
crashes:
\t@{pytest} $(OPTIONS) tests -k crash
cut-off:
\t@{pytest} $(OPTIONS) tests -k "unstable or cut_off"
python-tests:
\t@{pytest} $(OPTIONS) tests -k "not crash and not cut_off"
pytest:
\t@{pytest} $(ARGS) tests
native:
\t@mkdir -p build/native/native/Testing/Temporary
\t@if [ -e fixed ]; then rm $(LOG); else echo "3:test_wait" >$(LOG); touch fixed; false; fi
LOG := build/native/native/Testing/Temporary/LastTestsFailed.log
"""

TESTS = """
import os
import pathlib
import pytest

def test_good():
    pass

@pytest.mark.parametrize("case", range(4))
def test_unstable(case):
    if case < int(pathlib.Path("unstable").read_text()):
        seen = pathlib.Path(f"seen-{case}")
        assert seen.exists() or seen.touch()

def test_bad():
    assert not pathlib.Path("bad").exists()

def test_crash():
    os._exit(3)

def test_cut_off():
    raise KeyboardInterrupt
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    command = f"{shlex.quote(sys.executable)} -m pytest -q -p no:randomly"
    (tmp_path / "Makefile").write_text(MAKEFILE.format(pytest=command))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text(TESTS)
    (tmp_path / "tests/conftest.py").write_text("from tools.gate import pytest_sessionfinish")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "unstable").write_text("0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(gate.ROOT))
    for name in ("MAKEFLAGS", "MAKELEVEL", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run(*sections: gate.Section, limit: float | None = None) -> tuple[int, list[str]]:
    lines: list[str] = []
    code = gate.run(sections, limit, lines.append)
    return code, lines


PYTHON = gate.PythonTests("tests", ("python-tests",))


def test_all_sections_run_whatever_fails(project: Path) -> None:
    code, lines = run(gate.Section("bad", ("bad",)), gate.Section("good", ("good",)))
    assert code == 1
    assert (project / "good-ran").exists()
    assert "FAILED: bad" in lines
    table = [line.split() for line in lines if line.startswith(("bad", "good"))]
    assert [row[:4] for row in table] == [["bad", "0", "1", "0"], ["good", "1", "0", "0"]]


def test_a_run_without_a_failure(project: Path) -> None:
    code, lines = run(PYTHON, gate.Section("good", ("good",)))
    assert code == 0
    assert lines[-1].strip().startswith("7 passed, 0 failed")
    (row, _) = json.loads((project / "build/gate/result.json").read_text())
    assert (row["passed"], row["failed"], row["unstable"]) == (6, [], [])


@pytest.mark.parametrize("count", [3, 4])
def test_a_test_that_passes_again_is_unstable(project: Path, count: int) -> None:
    (project / "unstable").write_text(str(count))
    code, lines = run(PYTHON)
    names = [f"tests/test_it.py::test_unstable[{case}]" for case in range(count)]
    assert [line for line in lines if line.startswith("unstable")] == [
        f"unstable: {name}" for name in names
    ]
    assert code == (count > gate.MAX_UNSTABLE)
    (row,) = json.loads((project / "build/gate/result.json").read_text())
    assert (row["passed"], row["failed"], row["unstable"]) == (6, [], names)


def test_a_test_that_fails_twice(project: Path) -> None:
    (project / "bad").touch()
    (project / "unstable").write_text("1")
    code, lines = run(PYTHON)
    assert code == 1
    assert lines.count("FAILED: tests/test_it.py::test_bad") == 1
    assert lines.count("unstable: tests/test_it.py::test_unstable[0]") == 1


@pytest.mark.parametrize("target", ["nothing", "crashes"])
def test_a_run_that_names_no_test(project: Path, target: str) -> None:
    """No test was chosen, or pytest itself has died: that is a failure of the section."""
    code, lines = run(gate.PythonTests("tests", (target,)))
    assert code == 1
    assert "FAILED: tests" in lines


def test_a_run_that_is_cut_off_after_a_failure(project: Path) -> None:
    """Its last tests have not run: that the failed one passes alone says nothing of them."""
    (project / "unstable").write_text("1")
    code, lines = run(gate.PythonTests("tests", ("cut-off",)))
    assert code == 1
    assert "FAILED: tests" in lines
    assert "FAILED: tests/test_it.py::test_unstable[0]" in lines


def test_a_failure_of_an_earlier_run_is_forgotten(project: Path) -> None:
    (project / "bad").touch()
    assert run(PYTHON)[0] == 1
    (project / "bad").unlink()
    assert run(PYTHON)[0] == 0


def test_a_test_of_the_core_is_run_again(project: Path) -> None:
    code, lines = run(gate.NativeTests("native", ("native",)))
    assert code == 0
    assert "unstable: test_wait" in lines


def test_a_section_that_hangs_ends_at_the_limit(project: Path) -> None:
    code, lines = run(gate.Section("hangs", ("hangs",)), gate.Section("good", ("good",)), limit=1)
    assert code == 1
    assert "FAILED: hangs" in lines
    assert any(line.split()[:2] == ["hangs", "0"] for line in lines)


@pytest.mark.parametrize("victim", ["gate", "parent"])
def test_a_gate_that_ends_early_leaves_nothing_behind(project: Path, victim: str) -> None:
    (project / "gate.py").write_text(
        "from tools import gate\n"
        "gate.ROOT, gate.LAYERS = '.', {'all': [gate.Section('hangs', ('hangs',))]}\n"
        "gate.main()\n"
    )
    command = f"{shlex.quote(sys.executable)} gate.py all; true"
    parent = psutil.Popen(["bash", "-c", command], cwd=project)
    try:
        wait_for(lambda: [p for p in parent.children(recursive=True) if p.name() == "sleep"])
        started = parent.children(recursive=True)
        if victim == "gate":
            parent.children()[0].terminate()
        else:
            parent.kill()
        _, left = psutil.wait_procs(started, timeout=90)
        assert not left
    finally:
        for process in [parent, *parent.children(recursive=True)]:
            process.kill()
        parent.wait()


def test_a_section_is_run_once_for_the_same_sources(project: Path) -> None:
    (project / "native").mkdir()
    source = project / "native/source"
    section = gate.Section("good", ("good",), ("native",))
    for content in ("one", "two"):
        source.write_text(content)
        assert run(section)[0] == 0
        (project / "good-ran").unlink()
        code, lines = run(section)
        assert code == 0
        assert not (project / "good-ran").exists()
        assert "\n== good: passed with the same native" in lines
        assert any(line.split()[-1:] == ["known"] for line in lines)


def test_a_section_that_fails_is_not_known(project: Path) -> None:
    (project / "native").mkdir()
    section = gate.Section("bad", ("bad",), ("native",))
    assert [run(section)[0] for _ in range(2)] == [1, 1]


def test_every_layer_names_targets_of_the_makefile(repository: Path) -> None:
    makefile = (repository / "Makefile").read_text()
    makefile += (repository / "native/native.mk").read_text()
    for layer, sections in gate.LAYERS.items():
        assert f"python tools/gate.py {layer}\n" in makefile
        for section in sections:
            target = next(word for word in section.target if word.islower() and word[0] != "-")
            assert f"\n{target}" in makefile or f" {target} " in makefile
    assert os.access(repository / ".ci/run", os.R_OK)
    assert "make test-all" in (repository / ".ci/run").read_text()
