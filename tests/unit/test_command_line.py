"""Properties that all commands share: options, exit codes, messages, colours and completion."""

from __future__ import annotations

import ast
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import typer.main

from phalanx.cli import COMMANDS, main, make_app
from phalanx.system import extras
from phalanx.system.processes import ExitCode
from tests.job_directories import JobFixture

ROOT = Path(__file__).parents[2]
PHALANX = [sys.executable, "-c", "from phalanx.cli import main; main()"]
COLOR = re.compile(rb"\x1b\[[0-9;]*(3[0-8]|4[0-8]|9[0-7]|10[0-7])[0-9;]*m")


@pytest.fixture
def phalanx(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[Any, str, str]]:
    """Run the command in this process; returns its exit code, its output and its errors."""

    def run(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr("sys.argv", ["phalanx", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


def options(command: str) -> dict[str, Any]:
    """Return the options of a command by name."""
    parameters = typer.main.get_command(make_app()).commands[command].params  # type: ignore[attr-defined]
    return {name: each for each in parameters for name in each.opts}


@pytest.mark.parametrize(
    "command", [name for name in COMMANDS if name not in ("run", "key", "examples")]
)
def test_every_report_is_available_as_json_and_in_a_file(command: str) -> None:
    found = options(command)
    assert found["--json"].is_flag
    assert found["--output"] is found["-o"]
    assert found["--output"].metavar == "FILE"


@pytest.mark.parametrize("command", ["jobs", "explain", "watch"])
def test_the_json_of_a_job_is_printed_and_written(
    command: str,
    jobs: Path,
    job: JobFixture,
    tmp_path: Path,
    phalanx: Callable[..., tuple[Any, str, str]],
) -> None:
    path = tmp_path / "found.json"
    once = ["--once"] if command == "watch" else []
    _, printed, _ = phalanx(command, *once, "--json", "--output", str(path))
    written = json.loads(path.read_text())
    assert job.name in path.read_text()
    assert json.loads(printed).keys() == written.keys() if isinstance(written, dict) else True
    _, printed, _ = phalanx(command, *once, "-o", str(path))
    assert not printed.startswith(("{", "["))
    assert json.loads(path.read_text())


def test_the_trace_is_described_as_json(
    jobs: Path, job: JobFixture, tmp_path: Path, phalanx: Callable[..., tuple[Any, str, str]]
) -> None:
    path = tmp_path / "found.pftrace"
    code, printed, errors = phalanx("trace", job.name, "-o", str(path), "--json")
    assert code == 0, errors
    found = json.loads(printed)
    assert (found["job"], found["file"]) == (job.name, str(path))
    assert path.stat().st_size > 0
    code, _, errors = phalanx("trace", job.name, "-o", "/proc/none/found")
    assert code == ExitCode.USAGE
    assert "can't write /proc/none/found" in errors


def test_the_options_of_the_list_do_not_remove(
    jobs: Path, phalanx: Callable[..., tuple[Any, str, str]]
) -> None:
    code, _, errors = phalanx("jobs", "--remove-ended", "--json")
    assert code == ExitCode.USAGE
    assert "--json" in errors


def test_the_examples_are_copied_and_replace_nothing(
    tmp_path: Path, phalanx: Callable[..., tuple[Any, str, str]]
) -> None:
    folder = tmp_path / "new" / "examples"
    code, printed, _ = phalanx("examples", str(folder))
    assert code == ExitCode.SUCCESS
    programs = {
        path.relative_to(ROOT / "examples"): path.read_text()
        for path in (ROOT / "examples").rglob("*.py")
    }
    assert f"{len(programs)} programs" in printed
    copied = {path.relative_to(folder): path.read_text() for path in folder.rglob("*.*")}
    assert copied == programs
    (folder / "train_digits.py").write_text("mine")
    code, _, errors = phalanx("examples", str(folder))
    assert code == ExitCode.USAGE
    assert f"{folder} exists" in errors
    assert (folder / "train_digits.py").read_text() == "mine"


def test_the_exit_codes_of_the_help_are_those_of_the_documentation(
    phalanx: Callable[..., tuple[Any, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    page = (ROOT / "docs/reference/exceptions.md").read_text()
    documented = re.findall(
        r"^\| (\S.*?) \| .* \| .* \|$", page.partition("## Exit codes")[2], re.MULTILINE
    )
    assert list(dict.fromkeys(documented[2:])) == list(ExitCode.MEANINGS)
    _, help_text, _ = phalanx("--help")
    for code, meaning in ExitCode.MEANINGS.items():
        assert f"{code:>7}  {meaning}" in help_text
    _, help_text, _ = phalanx("run", "--help")
    assert "`phalanx --help` lists the exit codes" in help_text


@pytest.mark.parametrize("command", [(), ("jobs",), ("run",)], ids=" ".join)
def test_the_help_links_to_the_documentation_once_it_has_an_address(
    command: tuple[str, ...],
    phalanx: Callable[..., tuple[Any, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published = Message()
    monkeypatch.setattr("importlib.metadata.metadata", lambda _name: published)
    _, text, _ = phalanx(*command, "--help")
    assert "Documentation" not in text
    published["Project-URL"] = "Issues, https://example.org/issues"
    published["Project-URL"] = "Documentation, https://example.org/phalanx"
    _, text, _ = phalanx(*command, "--help")
    assert "Documentation: https://example.org/phalanx" in text


def test_no_module_of_a_command_writes_an_exit_code_as_a_number() -> None:
    for path in (ROOT / "src/phalanx/cli").glob("*.py"):
        assert not re.search(r"(Exit|exit)\(\d", path.read_text()), path


def strings_of(path: Path) -> list[tuple[int, str]]:
    """Return the strings of a module, docstrings included, with their lines."""
    tree = ast.parse(path.read_text())
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def test_no_text_names_a_file_of_the_repository_or_an_extra() -> None:
    """A wheel has no such file, and the package index does not know the project."""
    is_wrong = re.compile(r"\b(docs|benchmarks|tests)/\w|\w\.md\b|phalanx\\?\[[a-z,]+\]")
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]}"
        for path in (ROOT / "src/phalanx").rglob("*.py")
        for line, text in strings_of(path)
        if (match := is_wrong.search(text.replace("[bold]phalanx", "")))
    ]
    assert not found


def test_the_named_packages_are_those_of_the_extras() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for extra, packages in extras.PACKAGES.items():
        declared = re.search(rf"^{extra} = \[(.*?)\]$", project, re.MULTILINE)
        assert declared is not None
        assert packages == tuple(re.findall(r'"([\w-]+)>=', declared[1]))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("explain", "--help"),
        ("unknown",),
        ("jobs",),
        ("explain",),
        ("watch", "--once"),
        ("trace",),
        ("bench", "--op", "unknown"),
        ("run", "missing.py"),
        ("key", "job.key"),
    ],
    ids=" ".join,
)
def test_no_color_is_honoured(
    arguments: tuple[str, ...], jobs: Path, job: JobFixture, tmp_path: Path
) -> None:
    output = on_terminal(arguments, {"NO_COLOR": "1", "TERM": "xterm-256color"}, tmp_path)
    assert output
    assert not COLOR.search(output), output


def test_a_terminal_has_colours_and_a_dumb_one_no_escape_sequence(
    jobs: Path, job: JobFixture, tmp_path: Path
) -> None:
    assert COLOR.search(on_terminal(("jobs",), {"TERM": "xterm-256color"}, tmp_path))
    for arguments in (["jobs"], ["explain"], ["watch", "--once"], ["--help"]):
        assert b"\x1b" not in on_terminal(arguments, {"TERM": "dumb"}, tmp_path)


def test_force_color_colours_a_pipe_and_does_not_redraw_it(jobs: Path, job: JobFixture) -> None:
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    for command in ("jobs", "explain", "watch"):
        ended = subprocess.run(
            [*PHALANX, command], capture_output=True, env=environment, timeout=60
        )
        assert b"\x1b[" in ended.stdout
        assert b"\x1b[?1049h" not in ended.stdout  # the alternate screen


def on_terminal(arguments: Any, environment: dict[str, str], folder: Path) -> bytes:
    """Return the output of a command on a terminal."""
    control, terminal = pty.openpty()
    cleared = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    with subprocess.Popen(
        [*PHALANX, *arguments],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=folder,
        env={**cleared, **environment},
    ) as process:
        os.close(terminal)
        output = b""
        try:
            while data := os.read(control, 1 << 16):
                output += data
        except OSError:  # the command has closed the terminal
            pass
        process.wait(60)
    os.close(control)
    assert b"Traceback" not in output
    return output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("unknown", "there is no command 'unknown': expected one of run, jobs, explain"),
        ("rnu train.py --lr 1", "did you mean `phalanx run train.py --lr 1`?"),
        ("train.py --lr 1", "did you mean `phalanx run train.py --lr 1`?"),
        ("--elastic train.py", "did you mean `phalanx run --elastic train.py`?"),
        ("--unknown", "No such option: --unknown"),
        ("run", "no script: expected `phalanx run [OPTIONS] SCRIPT [ARGS]...`"),
        ("run --unknown train.py", "unrecognized arguments: --unknown"),
        ("run missing.py", "there is no script 'missing.py'"),
        ("run --nproc-per-node two {file}", "--nproc-per-node is 'two': expected an integer"),
        ("run --key-file missing {file}", "--key-file is missing, which cannot be read"),
        ("run --hosts @missing {file}", "missing"),
        ("run --hosts node-a:x {file}", "node-a:x"),
        ("run --master-port 70000 {file}", "--master-port is 70000: expected 1 to 65535"),
        ("run --master-port x {file}", "x"),
        ("run --max-restarts x {file}", "max-restarts"),
        ("run --log-dir /proc/logs {file}", "/proc/logs"),
        ("jobs --unknown", "No such option: --unknown"),
        ("jobs --remove missing", "there is no job 'missing'"),
        ("jobs --output /proc/none/found", "there is no directory /proc/none"),
        ("explain missing", "there is no job 'missing'"),
        ("explain a b", "Got unexpected extra argument(s) (b)"),
        ("explain --output {folder}", "which is a directory: expected a file"),
        ("watch missing", "there is no job 'missing'"),
        ("watch --interval x", "Invalid value for '--interval'"),
        ("watch -o /proc/found", "which cannot be written: No such file or directory"),
        ("trace missing", "there is no job 'missing'"),
        ("doctor --peers a,", "'' is not a host name"),
        ("doctor --timeout x", "Invalid value for '--timeout'"),
        ("doctor --output {folder}", "which is a directory: expected a file"),
        ("test --nproc-per-node 1", "Invalid value for '--nproc-per-node'"),
        ("test --output /proc/none/found", "there is no directory /proc/none"),
        ("bench --op unknown", "operation 'unknown' given, expected one or several of all_reduce"),
        ("bench --sizes x", "size 'x' given, expected bytes such as 4, 16KiB or 64MiB"),
        ("bench --output {folder}", "which is a directory: expected a file"),
        ("bench --from missing --plot plot.png", "can't read missing: No such file or directory"),
        ("bench --from {file} --plot plot.png", "is not JSON"),
        ("bench --plot plot.txt", "expected a name that ends with .png or .svg"),
        ("key", "Missing argument 'PATH'"),
        ("key /proc/none/key", "/proc/none/key cannot be created: No such file or directory"),
    ],
)
def test_a_typing_error_is_reported_without_a_stack_trace(
    arguments: str,
    message: str,
    jobs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    phalanx: Callable[..., tuple[Any, str, str]],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "train.py").write_text("print(1)\n")
    words = arguments.format(file="train.py", folder=tmp_path).split()
    code, _, errors = phalanx(*words)
    assert code == ExitCode.USAGE, errors
    assert message in errors
    assert "Traceback" not in errors


def test_a_wrong_variable_is_reported_without_the_stack_trace_of_a_rank(
    jobs: Path,
    phalanx: Callable[..., tuple[Any, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PHALANX_TRANSPORT", "unknown")
    code, _, errors = phalanx("test")
    assert code == ExitCode.USAGE
    assert "transport is 'unknown': expected one of gloo" in errors
    assert len(errors.splitlines()) == 1


def test_an_error_of_a_file_is_one_line(
    phalanx: Callable[..., tuple[Any, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_JOBS_DIR", "/proc/none")
    for command in ("jobs", "explain"):
        code, output, errors = phalanx(command)
        assert "Traceback" not in errors
        assert "/proc/none" in output + errors
        assert code in (ExitCode.SUCCESS, ExitCode.FAILURE, ExitCode.USAGE)


def completion(environment: dict[str, str]) -> str:
    """Return what a shell gets from the command; fails if the command has imported torch."""
    script = (
        "import atexit, sys\n"
        "atexit.register(lambda: sys.stderr.write(str('torch' in sys.modules)))\n"
        "from phalanx.cli import main; main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=60,
    )
    assert ended.stderr == "False"
    return ended.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_of_commands_and_options(shell: str) -> None:
    for words, expected in (("phalanx wat", "watch"), ("phalanx explain --js", "--json")):
        request = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        if shell != "bash":
            request = {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
        assert expected in completion({**request, "_PHALANX_COMPLETE": f"complete_{shell}"})


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_asks_the_command(shell: str) -> None:
    script = completion({"_PHALANX_COMPLETE": f"source_{shell}"})
    assert f"_PHALANX_COMPLETE=complete_{shell}" in script
    assert "phalanx" in script.strip().splitlines()[-1]


def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    script = completion({"_PHALANX_COMPLETE": "source_bash"})
    command = tmp_path / "phalanx"
    command.write_text(f"#!{sys.executable}\nfrom phalanx.cli import main\nmain()\n")
    command.chmod(0o700)
    ended = subprocess.run(
        [
            "bash",
            "-c",
            f"{script}\nCOMP_WORDS=(phalanx do) COMP_CWORD=1\n"
            '_phalanx_completion phalanx; echo "${COMPREPLY[@]}"',
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        timeout=60,
    )
    assert ended.stdout.split() == ["doctor"], ended.stderr


def test_help_of_a_public_function_shows_the_function() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "import phalanx; help(phalanx.launch)"],
        capture_output=True,
        text=True,
        env={**os.environ, "PAGER": "cat"},
        timeout=60,
    )
    assert "launch(" in ended.stdout
    assert "in module phalanx.launcher.launch" in ended.stdout
    assert "nprocs" in ended.stdout
