"""The keys on the page about JSON output are exactly those that the commands print."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from phalanx.bench import results
from phalanx.cli import test as cli_test
from phalanx.diagnosis import explain, model, watch
from phalanx.diagnosis.kinds.diagnosis import KINDS
from phalanx.diagnosis.model import Call, ReplacedProcess, Start, Worker
from phalanx.doctor.finding import Finding
from phalanx.doctor.peers.links import Host, Link, Network
from phalanx.doctor.report import as_json as doctor_as_json
from phalanx.launcher import launch
from tests.docs.sessions import run
from tests.synthetic_jobs import JobBuilder, build_straggling_job

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "json.md").read_text()
CONTEXT = Path(__file__).parent / "contexts" / "json" / "train.py"


def documented(command: str) -> dict[str, str]:
    """Return the keys of a command's table, with their meaning."""
    section = PAGE.partition(f"## phalanx {command}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", section, re.MULTILINE))


def keys(value: Any, opaque: set[str], prefix: str = "") -> Iterator[str]:
    """Yield the keys of a value, those of nested values included."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from keys(each, opaque, f"{prefix}[]")
    elif isinstance(value, dict) and prefix not in opaque:
        for name, each in value.items():
            path = f"{prefix}.{name}".lstrip(".")
            yield path
            yield from keys(each, opaque, path)


def check(command: str, *printed: Any, summarized: tuple[str, ...] = ()) -> None:
    """Compare the keys of objects with a table.

    Args:
        command: The heading of the table, without `phalanx`.
        printed: What the command prints.
        summarized: Keys whose values the text below the table describes.
    """
    table = documented(command)
    opaque = {key for key, text in table.items() if text.startswith("object by ")}
    opaque |= set(summarized)
    found = {key for each in printed for key in keys(json.loads(json.dumps(each)), opaque)}
    # An object such as `job` needs no row of its own if its members have one.
    found -= {key for key in found - set(table) if any(key + "." in each for each in table)}
    assert found == set(table)


@pytest.fixture(scope="module")
def failed_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the records of a job whose rank 1 was killed."""
    directory = tmp_path_factory.mktemp("job")
    (directory / "train.py").write_text(CONTEXT.read_text())
    assert run("phalanx run --nproc-per-node 3 train.py", directory).returncode == 137
    return directory


def read_json(command: str, directory: Path, code: int = 0) -> Any:
    ended = run(command, directory)
    assert ended.returncode == code, ended.stderr
    return json.loads(ended.stdout)


def test_doctor(tmp_path: Path) -> None:
    printed = read_json("phalanx doctor --json", tmp_path)
    finding = Finding("area", "name", "note", "message", "advice", {"cores": 1})
    links = [Link(0, 1, "network", None, 1e-4, 1e9), Link(0, 0, "memory", (0, 1), 1e-5, 1e10)]
    hosts = [Host("node-a", (0, 1), "10.0.0.1", 1, "", []), Host("node-b", (2,), "", 0, "", [])]
    measured = doctor_as_json([finding], Network(hosts, links))
    check("doctor --json", printed, measured)


def test_jobs(failed_job: Path) -> None:
    check("jobs --json", read_json("phalanx jobs --json", failed_job))


OPERATIONS = (
    "diagnosis.sides[].operation",
    "diagnosis.waiting[].operation",
    "ranks[].operation",
    "ranks[].last_operation",
)


def test_explain(failed_job: Path) -> None:
    builder = JobBuilder(2).run_collectives()
    since = builder.time
    call = Call(0, 1, "ask", since)
    workers = (Worker(800, 0, "a", (call,), ()), Worker(801, 1, "b", (), ()))
    replaced = (ReplacedProcess(1, Start(700, since, ended=since + 1, code=-9)),)
    job = replace(builder.advance(20).build(), workers=workers, replaced=replaced)
    printed = read_json("phalanx explain --json", failed_job)
    check("explain --json", printed, explain.as_json(job), summarized=OPERATIONS)
    (text,) = re.findall(r"^An operation has the keys (.*)\.$", PAGE, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", text)) == set(printed["ranks"][0]["last_operation"])


def test_kinds_of_a_diagnosis() -> None:
    text = PAGE.partition("\n`kind` is one of ")[2].partition(". For ")[0]
    assert set(KINDS) == set(re.findall(r"`(\w+)`", text))


def test_watch(failed_job: Path) -> None:
    job = build_straggling_job(4, 2)
    link = model.Link("node-b", (2, 3, job.now), (1, 1, job.now - 1))
    job = replace(job, ranks=tuple(replace(each, links=(link,)) for each in job.ranks))
    live = watch.as_json(job, watch.build_view(job))
    printed = read_json("phalanx watch --once --json", failed_job, 1)
    check("watch --json", printed, live)
    text = documented("watch --json")["balance"]
    assert set(re.findall(r"`(\w+)`", text)) == set(get_args(watch.Balance))


def test_bench() -> None:
    result = results.Result(
        "all_reduce", "float32", 4, 4, 8, True, 1e-9, {"phalanx": results.Timing(1, 1, 1, 3)}
    )
    report = results.Report("phalanx bench", "", {"cores": 2}, {}, {}, {"copy": 1e9}, [result])
    check("bench --json", results.as_json([report]))
    both = results.as_json([report], algorithms=True)
    assert set(both) == {"format", "unit", "reports"}
    assert f"`{both['format']}`" in PAGE
    assert f"`{results.FORMATS[False]}`" in documented("bench --json")["format"]


def test_trace(failed_job: Path) -> None:
    check("trace --json", read_json("phalanx trace --json --output job.pftrace", failed_job))


def test_selfcheck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = read_json("phalanx test --json", tmp_path)
    assert (right["ok"], right["failures"]) == (True, [])
    monkeypatch.setattr(launch, "launch", lambda *_: [{"send, recv": "7 != 8"}, {"send, recv": ""}])
    with pytest.raises(typer.Exit):
        cli_test.command(2, 60.0, 1, True, tmp_path / "wrong.json")
    wrong = json.loads((tmp_path / "wrong.json").read_text())
    assert (wrong["ok"], wrong["failures"][0]["rank"]) == (False, 0)
    check("test --json", right, wrong)
