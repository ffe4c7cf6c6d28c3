"""The commands `phalanx watch` and `phalanx trace`, with jobs that never ran."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli import main
from phalanx.errors import UsageError
from phalanx.observe import job_reader
from phalanx.observe.model import Job, Process
from tests import perfetto_reader
from tests.synthetic_jobs import NAME, job, rank, straggling

Reading = Callable[..., Job]


@pytest.fixture
def phalanx(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run the command in this process; returns its exit code."""

    def run(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["phalanx", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return code if isinstance(code, int) else int(bool(code))

    return run


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Have the directory of jobs hold these, one after another; an exception is raised."""

    def prepare(*found: Job | BaseException) -> list[Any]:
        asked: list[Any] = []
        rest: Iterator[Job | BaseException] = iter(found)

        def read(name: str | None = None, history: int | None = None) -> Job:
            asked.append(name)
            one = next(rest)
            if isinstance(one, BaseException):
                raise one
            return one

        monkeypatch.setattr(job_reader, "read_job", read)
        return asked

    return prepare


def ended(made: Job, code: int | None) -> Job:
    """The same job, with no process left."""
    ranks = tuple(replace(one, process=Process("gone"), ending="exited") for one in made.ranks)
    return replace(made, ranks=ranks, code=code)


def test_json_has_a_line_for_each_look_until_the_job_ends(
    phalanx: Callable[..., int], reads: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    running = straggling(2, 1)
    asked = reads(running, running, ended(running, 0))
    assert phalanx("watch", "2026", "--json", "--interval", "0.1") == 0
    looks = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [look["running"] for look in looks] == [True, True, False]
    assert asked == ["2026", NAME, NAME], "a later job with that beginning isn't another one"


def test_a_job_that_failed_is_an_exit_code_and_the_way_to_explain(
    phalanx: Callable[..., int], reads: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    reads(ended(straggling(2, 1), 137))
    assert phalanx("watch", "--once") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"Job {NAME} failed with exit code 137. See: phalanx explain {NAME}"


def test_where_stdout_is_no_terminal_one_look_is_printed_in_full(
    phalanx: Callable[..., int], reads: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    reads(straggling(64, 3))
    assert phalanx("watch") == 0
    out = capsys.readouterr().out
    assert "Rank 3 holds up others" in out
    assert all(f"\n{number:4d}  " in out for number in range(64))
    assert "…" not in out
    assert "\x1b" not in out


def test_a_job_whose_directory_goes_away_ended_well(
    phalanx: Callable[..., int], reads: Callable[..., list[Any]]
) -> None:
    reads(straggling(2, 1), UsageError("no such job"))
    assert phalanx("watch", "--json", "--interval", "0.1") == 0


@pytest.mark.parametrize(
    "last",
    [
        ended(straggling(2, 1), 1),
        job(rank(0), rank(1, state="gone")),
        job(rank(0), rank(1, ending="failed", exception="KeyboardInterrupt")),
    ],
    ids=("code", "gone", "interrupted"),
)
def test_a_job_that_had_failed_did_not_end_well_because_it_was_removed(
    phalanx: Callable[..., int],
    reads: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    last: Job,
) -> None:
    from phalanx.cli.watch import _Looks

    monkeypatch.setattr(_Looks, "_is_over", lambda *_: False)
    reads(last, UsageError("no such job"))
    assert phalanx("watch", "--json", "--interval", "0.1") == 1
    reads(last, UsageError("no such job"))
    looks = _Looks(None, 0.1, once=False)
    assert list(looks) == [last]
    well, words = looks.ending
    assert not well
    assert words.endswith("its records are gone.")


def test_a_job_that_can_not_be_read_any_more_is_an_error(
    phalanx: Callable[..., int],
    reads: Callable[..., list[Any]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    reads(replace(straggling(2, 1), path=str(tmp_path)), UsageError("it is a FIFO"))
    assert phalanx("watch", "--json", "--interval", "0.1") == 2
    assert capsys.readouterr().err == "phalanx: error: it is a FIFO\n"


def test_a_job_that_is_not_there_is_an_error_in_a_line(
    phalanx: Callable[..., int], reads: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    reads(UsageError("no such job"))
    assert phalanx("watch", "nothing") == 2
    assert capsys.readouterr().err == "phalanx: error: no such job\n"


def test_ctrl_c_ends_the_watching_alone(
    phalanx: Callable[..., int], reads: Callable[..., list[Any]]
) -> None:
    reads(straggling(2, 1), KeyboardInterrupt())
    assert phalanx("watch", "--json", "--interval", "0.1") == 0


def test_a_launcher_has_time_to_say_how_the_job_ended(
    phalanx: Callable[..., int], reads: Callable[..., list[Any]]
) -> None:
    from phalanx.observe.model import Start

    gone = ended(straggling(1, 0), None)
    gone = replace(gone, ranks=(replace(gone.ranks[0], start=Start(4000, 0, 0.0)),))
    asked = reads(gone, gone, replace(gone, code=3))
    assert phalanx("watch", "--json", "--interval", "0.1") == 1
    assert len(asked) == 3


@pytest.mark.parametrize("wrong", [("--interval", "0"), ("--interval", "x"), ("--bogus",)])
def test_wrong_usage_is_code_2(phalanx: Callable[..., int], wrong: tuple[str, ...]) -> None:
    assert phalanx("watch", *wrong) == 2


def test_a_timeline_is_written_under_the_name_of_the_job(
    phalanx: Callable[..., int],
    reads: Callable[..., list[Any]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    reads(straggling(3, 1))
    assert phalanx("trace") == 0
    found = perfetto_reader.load((tmp_path / f"{NAME}.pftrace").read_bytes())
    assert len(found.processes) == 3
    out = capsys.readouterr().out
    assert out.startswith(f"{NAME}.pftrace: 3 ranks, 60 operations, ")
    assert "https://ui.perfetto.dev" in out


def test_a_file_is_replaced_only_when_told_to(
    phalanx: Callable[..., int],
    reads: Callable[..., list[Any]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    path = tmp_path / "own.txt"
    path.write_text("mine")
    reads(straggling(2, 1), straggling(2, 1))
    assert phalanx("trace", "-o", str(path)) == 2
    assert path.read_text() == "mine"
    error = capsys.readouterr().err
    assert str(path) in error
    assert "--force" in error
    assert phalanx("trace", "-o", str(path), "--force") == 0
    assert perfetto_reader.load(path.read_bytes()).processes


def test_a_full_disk_is_an_error_in_a_line(
    phalanx: Callable[..., int], reads: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    reads(straggling(2, 1))
    assert phalanx("trace", "-o", "/dev/full", "--force") == 2
    assert "can't write /dev/full (No space left on device)" in capsys.readouterr().err
    assert Path("/dev/full").is_char_device()


def test_a_file_that_cannot_be_made_is_an_error_in_a_line(
    phalanx: Callable[..., int], reads: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    reads(straggling(2, 1))
    assert phalanx("trace", "-o", "/nowhere/x.pftrace") == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_half_a_file_does_not_stay(
    phalanx: Callable[..., int],
    reads: Callable[..., list[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> Iterator[object]:
        raise OSError(28, "No space left on device")
        yield

    monkeypatch.setattr("phalanx.observe.trace.write", broken)
    reads(straggling(2, 1))
    assert phalanx("trace", "-o", str(tmp_path / "x")) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_job_of_which_nothing_is_left_has_no_timeline(
    phalanx: Callable[..., int], reads: Callable[..., list[Any]], tmp_path: Path
) -> None:
    reads(job())
    assert phalanx("trace", "-o", str(tmp_path / "x")) == 2
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_from_a_timeline_is_said(
    phalanx: Callable[..., int],
    reads: Callable[..., list[Any]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    lossy = rank(0, operations=5000, problem="torn\x1b[2J")
    reads(job(lossy, rank(1), problems=("odd\n",)))
    assert phalanx("trace", "-o", str(tmp_path / "x")) == 0
    out = capsys.readouterr().out
    assert "note: 5,000 earlier operations are missing" in out
    assert "note: odd\\n" in out
    assert "note: rank 0: torn\\x1b[2J" in out
