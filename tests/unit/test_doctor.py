"""The doctor's parts: who is measured with whom, what is an outlier, limits of control groups."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from phalanx.doctor import devices, environment, libraries, machine, network
from phalanx.doctor.finding import Finding
from phalanx.doctor.machine import _version1, _version2
from phalanx.doctor.peers.links import Host, Link, Network
from phalanx.doctor.peers.matrix import show_matrix
from phalanx.doctor.peers.ranks import rank_in_a_job
from phalanx.doctor.peers.round_robin import rounds
from phalanx.doctor.peers.ssh import _SshAgent, peer_names
from phalanx.doctor.peers.tcp_probe import Answering, Unreached, measure
from phalanx.errors import LaunchError, UsageError
from phalanx.launcher.cores import cgroup_limits
from phalanx.launcher.ssh import connection
from phalanx.launcher.ssh.host_list import HostSpec


@given(st.integers(0, 40))
def test_everybody_meets_everybody_once(count: int) -> None:
    plan = rounds(count)
    met = [tuple(sorted(pair)) for pairs in plan for pair in pairs]
    assert sorted(met) == list(combinations(range(count), 2))
    for pairs in plan:
        players = [player for pair in pairs for player in pair]
        assert len(players) == len(set(players))
    assert len(plan) <= count  # no fewer would do


def test_who_does_not_know_the_token_gets_no_answer() -> None:
    token = secrets.token_bytes(32)
    answering = Answering("127.0.0.1", token)
    try:
        with pytest.raises(Unreached, match="small packets get no answer"):
            measure("127.0.0.1", answering.port, bytes(32))
        measured = measure("127.0.0.1", answering.port, token)
    finally:
        answering.close()
    assert 0 < measured.latency < 1
    assert measured.bandwidth > 1e6
    with pytest.raises(Unreached, match=r"127\.0\.0\.1: Connection refused"):
        measure("127.0.0.1", answering.port, token)


def host(name: str, version: str = "2.13.0", level: str = "ok", words: str = "") -> Host:
    torch = Finding("versions", "torch", "ok", f"torch {version}", "", {"version": version})
    other = Finding("machine", "thing", level, words, "Do this.")  # type: ignore[arg-type]
    return Host(name, (0,), "192.0.2.1", 1, "", [torch, other])


def joined(hosts: list[Host], **special: Link) -> Network:
    links = {}
    for source in range(len(hosts)):
        for target in range(len(hosts)):
            if source != target:
                links[source, target] = Link(source, target, "network", None, 1e-4, 1e9)
    links.update({(link.source, link.target): link for link in special.values()})
    return Network(hosts, list(links.values()))


def test_a_good_network_has_no_findings() -> None:
    assert joined([host("a"), host("b"), host("c")]).findings() == []


def test_one_way_that_is_slow_and_late() -> None:
    odd = Link(1, 2, "network", None, 5e-3, 4e8)
    found = joined([host("a"), host("b"), host("c")], odd=odd).findings()
    assert [finding.level for finding in found] == ["note"]
    assert found[0].words == (
        "b to c: 3.20 Gbit/s, less than half of the best and a round trip of 5.0 ms, "
        "more than 3 times the best"
    )


def test_a_way_back_is_mentioned() -> None:
    blocked = Link(0, 1, "network", error="no answer")
    found = joined([host("a"), host("b")], blocked=blocked).findings()
    assert [finding.level for finding in found] == ["problem"]
    assert found[0].words == "a can't reach b: no answer; b does reach a"


def test_versions_that_differ_and_findings_of_others() -> None:
    hosts = [host("a"), host("b", "2.12.0", "note", "x"), host("c", level="note", words="x")]
    found = joined(hosts).findings()
    assert [(finding.level, finding.words) for finding in found] == [
        ("problem", "torch 2.13.0 on a, c; torch 2.12.0 on b"),
        ("note", "b, c: x"),
    ]


def test_the_matrix_has_units_and_says_where_memory_is() -> None:
    blocked = Link(0, 1, "network", error="no answer")
    memory = Link(0, 0, "memory", (0, 1), 4e-6, 12e9)
    found = joined([host("a"), host("b")], blocked=blocked, memory=memory)
    console = Console(width=100, highlight=False)
    with console.capture() as captured:
        show_matrix(found, console)
    text = captured.get()
    for words in ("4 us", "12.0 GB/s", "memory", "blocked", "100 us", "8.00 Gbit/s", "a (rank 0)"):
        assert words in text


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "4096\n"}, 4096),
        (
            {
                "proc/self/cgroup": "4:memory:/a\n0::/\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "8192\n",
            },
            8192,
        ),
    ],
)
def test_memory_of_the_control_group(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert min(cgroup_limits("memory", _version2, _version1, tmp_path), default=None) == expected


def named(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.mark.parametrize(
    ("variable", "value", "check", "name"),
    [
        ("PHALANX_TRANSPORT", "pigeons", environment.check, "PHALANX_TRANSPORT"),
        ("PHALANX_ISA", "sse", environment.check, "PHALANX_ISA"),
        ("PHALANX_JOBS_KEPT", "many", environment.check, "jobs_kept"),
        ("PHALANX_INTERFACE", "eth77", network.check, "address"),
    ],
)
def test_variables_that_are_wrong(
    variable: str,
    value: str,
    check: Callable[[], list[Finding]],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, value)
    found = named(check())[name]
    assert found.level == "problem"
    assert f"{variable}={value!r}" in found.words
    assert found.advice


def test_a_variable_that_is_misspelt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_ENGIN", "gloo")
    found = named(environment.check())["PHALANX_ENGIN"]
    assert (found.level, found.advice) == ("note", "Is it PHALANX_TRANSPORT?")


def test_a_directory_of_jobs_that_others_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("PHALANX_JOBS_DIR", str(tmp_path))
    found = named(machine.check())["records"]
    assert found.level == "problem"
    assert str(tmp_path) in found.words


def test_an_mpi_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    found = named(libraries.check())["mpi"]
    assert found.level == "note"
    assert found.values["library"] is None
    assert "MPI4PY_LIBMPI" in found.advice


def test_an_mpi_library_that_works() -> None:
    found = named(libraries.check())["mpi"]
    assert found.level == "ok"
    assert "MPI" in found.values["library"]


def test_gpus_that_torch_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be none here: the driver's tool is a stand-in, and torch is told to use none."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho NVIDIA Abacus\necho NVIDIA Abacus\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = named(devices.check())["gpus"]
    assert found.level == "note"
    assert found.words.startswith("2 GPUs (NVIDIA Abacus), which torch ")


@pytest.mark.parametrize("text", ("", "a,,b", "-oProxyCommand=x", "a,b,a", "a b"))
def test_names_that_ssh_would_not_take(text: str) -> None:
    with pytest.raises(UsageError, match="--peers is "):
        peer_names(text)


def test_names_that_ssh_takes() -> None:
    assert peer_names("a, me@b.c,192.0.2.1") == ["a", "me@b.c", "192.0.2.1"]


def test_a_place_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UsageError, match="lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        rank_in_a_job()


@pytest.mark.parametrize(
    ("given", "rank"),
    [
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, 3),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),  # a shell in Slurm
        ({"SLURM_PROCID": "0", "PMI_RANK": "1", "PMI_SIZE": "2"}, 1),  # mpirun there
        ({}, None),
    ],
)
def test_the_number_that_another_launcher_gave(
    given: dict[str, str], rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**given, "SLURM_STEP_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert rank_in_a_job() == rank


def ssh_of(tmp_path: Path, text: str) -> list[str]:
    """A program in ssh's place."""
    path = tmp_path / "ssh"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return [str(path)]


LATE = """
import json, sys, time
print("welcome", end="", flush=True)
asked = [json.loads(sys.stdin.readline())["number"]]
asked.append(json.loads(sys.stdin.readline())["number"])
for number in asked:
    answer = {"name": f"answer {number}", "number": number}
    print("\\nphalanx-doctor " + json.dumps(answer), flush=True)
"""


def test_an_answer_that_comes_late_is_not_the_next_one(tmp_path: Path) -> None:
    agent = _SshAgent("node-a", ssh_of(tmp_path, LATE), "python")
    try:
        agent.start({"do": "open"})
        assert "no answer over ssh within" in agent.answer(0.2)["error"]
        agent.start({"do": "measure"})
        assert agent.answer(60) == {"name": "answer 2"}
    finally:
        agent.close()


def test_who_answers_over_ssh_keeps_the_number() -> None:
    command = [sys.executable, "-m", "phalanx", "doctor", "--answer"]
    asked = json.dumps({"do": "measure", "address": "", "port": "none", "number": 7}) + "\n"
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=100)
    first, line = done.stdout.splitlines()
    assert first == ""
    assert json.loads(line.removeprefix("phalanx-doctor "))["number"] == 7


def test_a_configuration_of_ssh_that_takes_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CONFIGURATION_TIMEOUT", 0.2)
    message = r"-G -- node-a` did not end within 0.2 s: check for commands in ssh's"
    with pytest.raises(LaunchError, match=message):
        connection.resolve_address(
            HostSpec("node-a", None), ssh_of(tmp_path, "import time; time.sleep(60)")
        )
