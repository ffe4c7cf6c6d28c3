"""`phalanx doctor` on one machine, made unfit by limits and namespaces; and under a launcher."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LIMIT = 100
PHALANX = str(Path(sys.executable).with_name("phalanx"))
APART = shutil.which("unshare") is not None and os.geteuid() == 0


def doctor(
    *arguments: str, before: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, PHALANX, "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )


def examined(
    code: int = 0, before: tuple[str, ...] = (), **environment: str
) -> dict[str, dict[str, Any]]:
    """The findings by name."""
    ended = doctor("--json", before=before, **environment)
    assert ended.returncode == code, ended.stdout + ended.stderr
    found = json.loads(ended.stdout)
    assert found["fit"] is (code == 0)
    for finding in found["findings"]:
        assert bool(finding["advice"]) is (finding["level"] != "ok"), finding
    return {finding["name"]: finding for finding in found["findings"]}


def shell(limits: str) -> tuple[str, ...]:
    return "sh", "-c", f'{limits} && exec "$@"', "sh"


def needs_namespaces() -> None:
    if not APART:
        reason = f"needs root and util-linux (user {os.geteuid()})"
        (pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip)(reason)


def test_a_healthy_machine(tmp_path: Path) -> None:
    """The words are those of the JSON, and the form is that of the guide."""
    path = tmp_path / "found.json"
    ended = doctor("--save", str(path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""
    found = json.loads(path.read_text())
    assert {*found} == {"schema", "phalanx", "host", "fit", "findings", "network"}
    assert found["schema"] == 1
    assert found["network"] is None
    lines = ended.stdout.splitlines()
    for finding in found["findings"]:
        assert {*finding} == {"area", "name", "level", "words", "advice", "values"}
        assert finding["area"] in lines
        if finding["name"] not in {"memory", "records"}:
            assert f"  {finding['level']:<8}{finding['words']}" in lines
    assert lines[-1].startswith("fit: no problem")
    assert not [line for line in lines if line != line.rstrip()]


def test_limits_of_the_process() -> None:
    found = examined(before=shell("ulimit -n 200"))
    assert found["open_files"]["level"] == "note"
    assert found["open_files"]["values"]["soft"] == 200
    found = examined(before=shell("ulimit -v 40000000"))
    assert found["address_space"]["level"] == "note"
    assert found["address_space"]["values"]["limit"] == 40000000 * 1024


def test_files_too_small_for_a_segment() -> None:
    found = examined(1, before=shell("ulimit -f 1000"))
    assert found["segment"]["level"] == "problem"
    assert "File too large" in found["segment"]["words"]
    assert "ulimit -f" in found["segment"]["advice"]


def test_one_core() -> None:
    core = min(os.sched_getaffinity(0))
    found = examined(before=("taskset", "--cpu-list", str(core)))
    assert found["cores"]["values"]["usable"] == 1
    assert found["cores"]["level"] == "note"


def test_a_machine_without_a_network() -> None:
    needs_namespaces()
    found = examined(before=("unshare", "--net"))
    assert "interface" not in found
    assert found["address"]["level"] == "note"
    assert found["address"]["words"] == "there is no way to other hosts"


def test_proc_of_another_pid_namespace() -> None:
    """As in a container that was given the /proc of its host: pids there mean other processes."""
    needs_namespaces()
    found = examined(1, before=("unshare", "--pid", "--fork", "--kill-child"))
    assert found["peer_memory"]["level"] == "problem"
    assert "can't open each other's memory" in found["peer_memory"]["words"]
    assert "same user" in found["peer_memory"]["advice"]


# What the real one says (OpenSSH 9), and its exit code.
SSH = """#!/bin/sh
case "$*" in
  *-G*) echo "hostname 127.0.0.1"; exit;;
  *" locked "*) echo "user@locked: Permission denied (publickey,password)." >&2; exit 255;;
  *" new "*) echo "Host key verification failed." >&2; exit 255;;
  *" typo "*) echo "ssh: Could not resolve hostname typo: Name or service not known" >&2; exit 255;;
  *" bare "*) echo "sh: 1: phalanx: not found" >&2; exit 127;;
  *) echo "ssh: connect to host shut port 22: Connection refused" >&2; exit 255;;
esac
"""


def test_peers_that_ssh_does_not_reach(tmp_path: Path) -> None:
    """Each is named with its own reason. A stand-in for ssh says what ssh would."""
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    ended = doctor(
        *("--peers", "locked,new,typo,bare,shut"), PATH=f"{tmp_path}:{os.environ['PATH']}"
    )
    assert ended.returncode == 1, ended.stderr
    assert "not fit: 5 problems" in ended.stdout
    for words in (
        "locked: ssh would ask for a password, or its key isn't accepted (ssh: user@locked: Perm",
        "Let this user in with a key: `ssh-copy-id locked`",
        "new: ssh doesn't know that machine's key",
        "typo: there is no such host",
        "bare: there is no Phalanx at the place where it is here",
        "--remote-python PATH",
        "shut: nothing listens for ssh there",
    ):
        assert words in ended.stdout, ended.stdout


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (("--save", "/nowhere/found.json"), {}, "there is no folder /nowhere"),
        (
            ("--peers", "a"),
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "--peers is given, but this is a rank of a job",
        ),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], environment: dict[str, str], words: str) -> None:
    ended = doctor(*arguments, **environment)
    assert ended.returncode == 2
    assert words in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


def test_the_ranks_of_a_job_on_simulated_hosts(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    options = ["--nproc-per-node", "3", "--simulate-hosts", "2"]
    ended = subprocess.run(
        [PHALANX, "run", *options, "-m", "phalanx", "doctor", "--save", str(path)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    network = json.loads(path.read_text())["network"]
    assert [host["name"] for host in network["hosts"]] == ["simulated-0", "simulated-1"]
    assert [host["ranks"] for host in network["hosts"]] == [[0, 1], [2]]
    links = {(link["source"], link["target"], link["via"]): link for link in network["links"]}
    assert {*links} == {(0, 1, "network"), (1, 0, "network"), (0, 0, "memory")}
    for link in network["links"]:
        assert {*link} == {
            *("source", "target", "via", "ranks", "latency"),
            *("bandwidth", "error", "slow", "late"),
        }
        assert link["bandwidth"] > 0
        assert link["latency"] > 0
    assert "[rank 0]  simulated-0 (ranks 0-1)" in ended.stdout
    assert "[rank 1]" not in ended.stdout


def test_a_rank_that_does_not_come() -> None:
    """The others say so when their time is up, and what they have found is shown all the same."""
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}
    ended = doctor("--timeout", "2", **place)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert ended.stderr == ""
    assert "ok      Python" in ended.stdout
    assert "problem " in ended.stdout
    assert "not fit: 1 problem" in ended.stdout
