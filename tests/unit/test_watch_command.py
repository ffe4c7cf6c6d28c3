"""The commands `phalanx watch` and `phalanx trace`, with synthetic jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli import main
from phalanx.diagnosis import job_reader
from phalanx.diagnosis.model import Job, Process
from phalanx.errors import UsageError
from tests import perfetto_reader
from tests.synthetic_jobs import NAME, build_straggling_job, job, rank

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
def set_readings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Return a function that sets the results of `read_job`, in order; exceptions are raised."""

    def prepare(*found: Job | BaseException) -> list[Any]:
        names: list[Any] = []
        rest: Iterator[Job | BaseException] = iter(found)

        def read(name: str | None = None, history: int | None = None) -> Job:
            names.append(name)
            one = next(rest)
            if isinstance(one, BaseException):
                raise one
            return one

        monkeypatch.setattr(job_reader, "read_job", read)
        return names

    return prepare


def end_job(made: Job, code: int | None) -> Job:
    """Return the same job after the end of all processes."""
    ranks = tuple(replace(one, process=Process("gone"), ending="exited") for one in made.ranks)
    return replace(made, ranks=ranks, code=code)


def test_json_has_a_line_per_reading_until_the_job_ends(
    phalanx: Callable[..., int],
    set_readings: Callable[..., list[Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    running = build_straggling_job(2, 1)
    names = set_readings(running, running, end_job(running, 0))
    assert phalanx("watch", "2026", "--json", "--interval", "0.1") == 0
    readings = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [reading["running"] for reading in readings] == [True, True, False]
    assert names == ["2026", NAME, NAME], "a later job with that prefix must not be selected"


def test_a_failed_job_sets_the_exit_code_and_refers_to_explain(
    phalanx: Callable[..., int],
    set_readings: Callable[..., list[Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_readings(end_job(build_straggling_job(2, 1), 137))
    assert phalanx("watch", "--once") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"Job {NAME} failed with exit code 137. See: phalanx explain {NAME}"


def test_without_a_terminal_the_full_table_is_printed_once(
    phalanx: Callable[..., int],
    set_readings: Callable[..., list[Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_readings(build_straggling_job(64, 3))
    assert phalanx("watch") == 0
    out = capsys.readouterr().out
    assert "Rank 3 delays the others" in out
    assert all(f"\n{number:4d}  " in out for number in range(64))
    assert "…" not in out
    assert "\x1b" not in out


def test_a_job_whose_directory_is_removed_completed(
    phalanx: Callable[..., int], set_readings: Callable[..., list[Any]]
) -> None:
    set_readings(build_straggling_job(2, 1), UsageError("no such job"))
    assert phalanx("watch", "--json", "--interval", "0.1") == 0


@pytest.mark.parametrize(
    "last",
    [
        end_job(build_straggling_job(2, 1), 1),
        job(rank(0), rank(1, state="gone")),
        job(rank(0), rank(1, ending="failed", exception="KeyboardInterrupt")),
    ],
    ids=("code", "gone", "interrupted"),
)
def test_a_removed_job_that_had_failed_is_a_failure(
    phalanx: Callable[..., int],
    set_readings: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    last: Job,
) -> None:
    from phalanx.cli.watch import _Readings

    monkeypatch.setattr(_Readings, "_has_ended", lambda *_: False)
    set_readings(last, UsageError("no such job"))
    assert phalanx("watch", "--json", "--interval", "0.1") == 1
    set_readings(last, UsageError("no such job"))
    readings = _Readings(None, 0.1, once=False)
    assert list(readings) == [last]
    succeeded, text = readings.outcome
    assert not succeeded
    assert text.endswith("its records have been removed.")


def test_a_job_that_becomes_unreadable_is_an_error(
    phalanx: Callable[..., int],
    set_readings: Callable[..., list[Any]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    set_readings(
        replace(build_straggling_job(2, 1), path=str(tmp_path)), UsageError("it is a FIFO")
    )
    assert phalanx("watch", "--json", "--interval", "0.1") == 2
    assert capsys.readouterr().err == "phalanx: error: it is a FIFO\n"


def test_a_missing_job_is_a_one_line_error(
    phalanx: Callable[..., int],
    set_readings: Callable[..., list[Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_readings(UsageError("no such job"))
    assert phalanx("watch", "nothing") == 2
    assert capsys.readouterr().err == "phalanx: error: no such job\n"


def test_ctrl_c_only_stops_the_command(
    phalanx: Callable[..., int], set_readings: Callable[..., list[Any]]
) -> None:
    set_readings(build_straggling_job(2, 1), KeyboardInterrupt())
    assert phalanx("watch", "--json", "--interval", "0.1") == 0


def test_a_launcher_has_time_to_record_the_end_of_the_job(
    phalanx: Callable[..., int], set_readings: Callable[..., list[Any]]
) -> None:
    from phalanx.diagnosis.model import Start

    gone = end_job(build_straggling_job(1, 0), None)
    gone = replace(gone, ranks=(replace(gone.ranks[0], start=Start(4000, 0.0)),))
    names = set_readings(gone, gone, replace(gone, code=3))
    assert phalanx("watch", "--json", "--interval", "0.1") == 1
    assert len(names) == 3


@pytest.mark.parametrize("wrong", [("--interval", "0"), ("--interval", "x"), ("--bogus",)])
def test_wrong_usage_is_code_2(phalanx: Callable[..., int], wrong: tuple[str, ...]) -> None:
    assert phalanx("watch", *wrong) == 2


def test_a_timeline_is_written_under_the_name_of_the_job(
    phalanx: Callable[..., int],
    set_readings: Callable[..., list[Any]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    set_readings(build_straggling_job(3, 1))
    assert phalanx("trace") == 0
    found = perfetto_reader.load((tmp_path / f"{NAME}.pftrace").read_bytes())
    assert len(found.processes) == 3
    out = capsys.readouterr().out
    assert out.startswith(f"{NAME}.pftrace: 3 ranks, 60 operations, ")
    assert "https://ui.perfetto.dev" in out


def test_a_file_is_replaced_only_with_force(
    phalanx: Callable[..., int],
    set_readings: Callable[..., list[Any]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    path = tmp_path / "own.txt"
    path.write_text("mine")
    set_readings(build_straggling_job(2, 1), build_straggling_job(2, 1))
    assert phalanx("trace", "-o", str(path)) == 2
    assert path.read_text() == "mine"
    error = capsys.readouterr().err
    assert str(path) in error
    assert "--force" in error
    assert phalanx("trace", "-o", str(path), "--force") == 0
    assert perfetto_reader.load(path.read_bytes()).processes


def test_a_full_disk_is_a_one_line_error(
    phalanx: Callable[..., int],
    set_readings: Callable[..., list[Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_readings(build_straggling_job(2, 1))
    assert phalanx("trace", "-o", "/dev/full", "--force") == 2
    assert "can't write /dev/full (No space left on device)" in capsys.readouterr().err
    assert Path("/dev/full").is_char_device()


def test_a_file_that_cannot_be_created_is_a_one_line_error(
    phalanx: Callable[..., int],
    set_readings: Callable[..., list[Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_readings(build_straggling_job(2, 1))
    assert phalanx("trace", "-o", "/nowhere/x.pftrace") == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_an_incomplete_file_is_removed(
    phalanx: Callable[..., int],
    set_readings: Callable[..., list[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> Iterator[object]:
        raise OSError(28, "No space left on device")
        yield

    monkeypatch.setattr("phalanx.diagnosis.trace.write", broken)
    set_readings(build_straggling_job(2, 1))
    assert phalanx("trace", "-o", str(tmp_path / "x")) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_job_without_records_has_no_timeline(
    phalanx: Callable[..., int], set_readings: Callable[..., list[Any]], tmp_path: Path
) -> None:
    set_readings(job())
    assert phalanx("trace", "-o", str(tmp_path / "x")) == 2
    assert list(tmp_path.iterdir()) == []


def test_data_missing_from_a_timeline_is_reported(
    phalanx: Callable[..., int],
    set_readings: Callable[..., list[Any]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    lossy = rank(0, operations=5000, problem="damaged\x1b[2J")
    set_readings(job(lossy, rank(1), problems=("odd\n",)))
    assert phalanx("trace", "-o", str(tmp_path / "x")) == 0
    out = capsys.readouterr().out
    assert "note: 5,000 earlier operations are missing" in out
    assert "note: odd\\n" in out
    assert "note: rank 0: damaged\\x1b[2J" in out
