"""The parts of the doctor: the schedule of pairs, outliers, and limits of control groups."""

from __future__ import annotations

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

from phalanx import _native
from phalanx.doctor import machine, network, software
from phalanx.doctor.finding import Finding
from phalanx.doctor.machine import _version1, _version2
from phalanx.doctor.peers.links import Host, Link, Network, schedule_rounds
from phalanx.doctor.peers.probes import ProbeServer, UnreachableError, measure
from phalanx.doctor.peers.ranks import job_rank
from phalanx.doctor.peers.ssh import _SshAgent, parse_peer_names
from phalanx.doctor.report import print_matrix
from phalanx.errors import LaunchError, UsageError
from phalanx.launcher.host_resources import cgroup_limits
from phalanx.system import ssh


@given(st.integers(0, 40))
def test_every_pair_occurs_once(count: int) -> None:
    plan = schedule_rounds(count)
    scheduled = [tuple(sorted(pair)) for pairs in plan for pair in pairs]
    assert sorted(scheduled) == list(combinations(range(count), 2))
    for pairs in plan:
        participants = [participant for pair in pairs for participant in pair]
        assert len(participants) == len(set(participants))
    assert len(plan) <= count  # the minimum


def test_a_client_without_the_token_gets_no_answer() -> None:
    token = secrets.token_bytes(32)
    server = ProbeServer("127.0.0.1", token)
    try:
        with pytest.raises(UnreachableError, match="small packets get no answer"):
            measure("127.0.0.1", server.port, bytes(32))
        measured = measure("127.0.0.1", server.port, token)
    finally:
        server.close()
    assert 0 < measured.latency < 1
    assert measured.bandwidth > 1e6
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1: Connection refused"):
        measure("127.0.0.1", server.port, token)


def make_host(name: str, version: str = "2.13.0", level: str = "ok", message: str = "") -> Host:
    torch = Finding("versions", "torch", "ok", f"torch {version}", "", {"version": version})
    other = Finding("machine", "thing", level, message, "Do this.")  # type: ignore[arg-type]
    return Host(name, (0,), "192.0.2.1", 1, "", [torch, other])


def make_network(hosts: list[Host], **special: Link) -> Network:
    links = {}
    for source in range(len(hosts)):
        for target in range(len(hosts)):
            if source != target:
                links[source, target] = Link(source, target, "network", None, 1e-4, 1e9)
    links.update({(link.source, link.target): link for link in special.values()})
    return Network(hosts, list(links.values()))


def test_a_good_network_has_no_findings() -> None:
    assert make_network([make_host("a"), make_host("b"), make_host("c")]).findings() == []


def test_a_slow_and_late_link() -> None:
    odd = Link(1, 2, "network", None, 5e-3, 4e8)
    found = make_network([make_host("a"), make_host("b"), make_host("c")], odd=odd).findings()
    assert [finding.level for finding in found] == ["note"]
    assert found[0].message == (
        "b to c: 3.20 Gbit/s, less than half of the best and a round trip of 5.0 ms, "
        "more than 3 times the best"
    )


def test_a_slow_network_is_compared_with_what_trainings_send() -> None:
    slow = Link(0, 1, "network", None, 1e-2, 12.5e6)
    hosts = [make_host(name) for name in "abcd"]
    found = [each for each in make_network(hosts, odd=slow).findings() if each.name == "methods"]
    assert [finding.level for finding in found] == ["note"]
    assert found[0].message == (
        "the slowest link, a to b, carries 100 Mbit/s: for each million parameters, each of 4 "
        "hosts sends 1.5 million values in a step, in 480 ms (float32, 4 bytes each) or 122 ms "
        "(int8, 1.02 bytes); DiLoCo with every=128 in int8 needs 952 us per step"
    )
    seconds = found[0].values["seconds_per_million_parameters"]
    assert seconds["float32"] == pytest.approx(2 * 3 / 4 * 4e6 / 12.5e6)
    int8 = _native.quantized_size(256_000, _native.ENCODINGS["int8"]) / 256_000
    assert seconds["int8"] == pytest.approx(seconds["float32"] * int8 / 4)


def test_a_working_reverse_link_is_mentioned() -> None:
    blocked = Link(0, 1, "network", error="no answer")
    found = make_network([make_host("a"), make_host("b")], blocked=blocked).findings()
    assert [finding.level for finding in found] == ["problem"]
    assert found[0].message == "a can't reach b: no answer; b can reach a"


def test_different_versions_and_findings_of_other_hosts() -> None:
    hosts = [
        make_host("a"),
        make_host("b", "2.12.0", "note", "x"),
        make_host("c", level="note", message="x"),
    ]
    found = make_network(hosts).findings()
    assert [(finding.level, finding.message) for finding in found] == [
        ("problem", "torch 2.13.0 on a, c; torch 2.12.0 on b"),
        ("note", "b, c: x"),
    ]


def test_the_matrix_has_units_and_marks_memory() -> None:
    blocked = Link(0, 1, "network", error="no answer")
    memory = Link(0, 0, "memory", (0, 1), 4e-6, 12e9)
    found = make_network([make_host("a"), make_host("b")], blocked=blocked, memory=memory)
    console = Console(width=100, highlight=False)
    with console.capture() as captured:
        print_matrix(found, console)
    text = captured.get()
    for message in (
        "4 us",
        "12.0 GB/s",
        "memory",
        "blocked",
        "100 us",
        "8.00 Gbit/s",
        "a (rank 0)",
    ):
        assert message in text


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


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.mark.parametrize(
    ("variable", "value", "check", "name"),
    [
        ("PHALANX_TRANSPORT", "pigeons", software.check_environment, "PHALANX_TRANSPORT"),
        ("PHALANX_ISA", "sse", software.check_environment, "PHALANX_ISA"),
        ("PHALANX_JOBS_KEPT", "many", software.check_environment, "jobs_kept"),
        ("PHALANX_DIRECT_CALLS", "maybe", software.check_versions, "direct_calls"),
        ("PHALANX_INTERFACE", "eth77", network.check, "address"),
    ],
)
def test_invalid_variables(
    variable: str,
    value: str,
    check: Callable[[], list[Finding]],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, value)
    found = by_name(check())[name]
    assert found.level == "problem"
    assert f"{variable}={value!r}" in found.message
    assert found.advice


def test_direct_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    found = by_name(software.check_versions())["direct_calls"]
    assert (found.level, found.values["used"]) == ("ok", True)
    monkeypatch.setenv("PHALANX_DIRECT_CALLS", "0")
    found = by_name(software.check_versions())["direct_calls"]
    assert (found.level, found.values["used"]) == ("note", False)
    assert "PHALANX_DIRECT_CALLS=0" in found.message
    monkeypatch.delenv("PHALANX_DIRECT_CALLS")
    monkeypatch.setattr("torch.__version__", "2.99.0")
    found = by_name(software.check_versions())["direct_calls"]
    assert "not tested with torch 2.99.0" in found.message


def test_a_misspelt_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TRANSPOR", "gloo")
    found = by_name(software.check_environment())["PHALANX_TRANSPOR"]
    assert (found.level, found.advice) == ("note", "Did you mean PHALANX_TRANSPORT?")


def test_a_job_directory_that_is_writable_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("PHALANX_JOBS_DIR", str(tmp_path))
    found = by_name(machine.check_resources())["records"]
    assert found.level == "problem"
    assert str(tmp_path) in found.message


def test_a_missing_mpi_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    found = by_name(software.check_libraries())["mpi"]
    assert found.level == "note"
    assert found.values["library"] is None
    assert "MPI4PY_LIBMPI" in found.advice


def test_a_working_mpi_library() -> None:
    found = by_name(software.check_libraries())["mpi"]
    assert found.level == "ok"
    assert "MPI" in found.values["library"]


BROKEN_CORE = """
import sys
sys.modules["phalanx._native"] = None  # as if the core could not be loaded
from phalanx.cli import main
main()
"""


def test_a_core_that_cannot_be_loaded_is_reported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BROKEN_CORE, "doctor"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1, done.stderr
    assert "whose core can't be loaded: " in done.stdout
    assert "not fit: 1 problem" in done.stdout


def test_gpus_that_torch_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script replaces the driver's tool, and torch sees no GPU."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho NVIDIA Abacus\necho NVIDIA Abacus\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = by_name(machine.check_gpus())["gpus"]
    assert found.level == "note"
    assert found.message.startswith("2 GPUs (NVIDIA Abacus), which torch ")


@pytest.mark.parametrize("text", ("", "a,,b", "-oProxyCommand=x", "a,b,a", "a b"))
def test_invalid_peer_names(text: str) -> None:
    with pytest.raises(UsageError, match="--peers is "):
        parse_peer_names(text)


def test_valid_peer_names() -> None:
    assert parse_peer_names("a, me@b.c,192.0.2.1") == ["a", "me@b.c", "192.0.2.1"]


def test_an_incomplete_rank_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UsageError, match="lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        job_rank()


@pytest.mark.parametrize(
    ("given", "rank"),
    [
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, 3),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),  # a shell in Slurm
        ({"SLURM_PROCID": "0", "PMI_RANK": "1", "PMI_SIZE": "2"}, 1),  # mpirun in Slurm
        ({}, None),
    ],
)
def test_the_rank_set_by_another_launcher(
    given: dict[str, str], rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**given, "SLURM_STEP_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert job_rank() == rank


def make_ssh(tmp_path: Path, text: str) -> list[str]:
    """Create a program that replaces ssh."""
    path = tmp_path / "ssh"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return [str(path)]


LATE = """
import sys
from phalanx.system.ssh import pack_message, unpack_message
print("welcome", end="", flush=True)
asked = []
while len(asked) < 2:
    if message := unpack_message(sys.stdin.buffer.readline()):
        asked.append(message["number"])
for number in asked:
    answer = pack_message(name=f"answer {number}", number=number)
    print(answer.decode(), end="", flush=True)
"""


def test_a_late_answer_is_not_used_for_the_next_command(tmp_path: Path) -> None:
    agent = _SshAgent("node-a", make_ssh(tmp_path, LATE), "python")
    try:
        agent.start({"do": "open"})
        assert "no answer over ssh within" in agent.answer(0.2)["error"]
        agent.start({"do": "measure"})
        assert agent.answer(60) == {"name": "answer 2"}
    finally:
        agent.close()


def test_an_answer_over_ssh_contains_the_number_of_its_command() -> None:
    command = [sys.executable, "-m", "phalanx", "doctor", "--answer"]
    asked = ssh.pack_message(do="measure", address="", port="none", number=7)
    done = subprocess.run(command, input=b"noise\n" + asked, capture_output=True, timeout=100)
    first, line = done.stdout.splitlines(keepends=True)
    assert first == b"\n"
    answer = ssh.unpack_message(line)
    assert answer is not None
    assert answer["number"] == 7


def test_a_configuration_of_ssh_that_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "CONFIGURATION_TIMEOUT", 0.2)
    message = r"-G -- node-a` did not end within 0.2 s: check for commands in ssh's"
    with pytest.raises(LaunchError, match=message):
        ssh.resolve_address("node-a", make_ssh(tmp_path, "import time; time.sleep(60)"))
