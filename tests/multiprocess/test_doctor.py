"""`phalanx doctor` on one machine, with limits and namespaces, and under a launcher."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

LIMIT = 100
PHALANX = str(Path(sys.executable).with_name("phalanx"))
CAN_UNSHARE = shutil.which("unshare") is not None and os.geteuid() == 0


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


def find(
    code: int = 0, before: tuple[str, ...] = (), **environment: str
) -> dict[str, dict[str, Any]]:
    """Run the doctor and return the findings by name."""
    completed = doctor("--json", before=before, **environment)
    assert completed.returncode == code, completed.stdout + completed.stderr
    found = json.loads(completed.stdout)
    assert found["fit"] is (code == 0)
    for finding in found["findings"]:
        assert bool(finding["advice"]) is (finding["level"] != "ok"), finding
    return {finding["name"]: finding for finding in found["findings"]}


def shell(limits: str) -> tuple[str, ...]:
    return "sh", "-c", f'{limits} && exec "$@"', "sh"


def require_namespaces() -> None:
    if not CAN_UNSHARE:
        reason = f"needs root and util-linux (user {os.geteuid()})"
        (pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip)(reason)


def test_a_healthy_machine(tmp_path: Path) -> None:
    """The text contains the messages of the JSON, whose schema is that of the guide."""
    path = tmp_path / "found.json"
    completed = doctor("--output", str(path))
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert completed.stderr == ""
    found = json.loads(path.read_text())
    assert {*found} == {"schema", "phalanx", "host", "fit", "findings", "network"}
    assert found["schema"] == 1
    assert found["network"] is None
    lines = completed.stdout.splitlines()
    for finding in found["findings"]:
        assert {*finding} == {"area", "name", "level", "message", "advice", "values"}
        assert finding["area"] in lines
        if finding["name"] not in {"memory", "records"}:
            assert f"  {finding['level']:<8}{finding['message']}" in lines
    assert lines[-1].startswith("fit: no problem")
    assert not [line for line in lines if line != line.rstrip()]


def test_limits_of_the_process() -> None:
    found = find(before=shell("ulimit -n 200"))
    assert found["open_files"]["level"] == "note"
    assert found["open_files"]["values"]["soft"] == 200
    found = find(before=shell("ulimit -v 40000000"))
    assert found["address_space"]["level"] == "note"
    assert found["address_space"]["values"]["limit"] == 40000000 * 1024


def test_files_too_small_for_a_segment() -> None:
    found = find(1, before=shell("ulimit -f 1000"))
    assert found["segment"]["level"] == "problem"
    assert "File too large" in found["segment"]["message"]
    assert "ulimit -f" in found["segment"]["advice"]


def test_one_core() -> None:
    core = min(os.sched_getaffinity(0))
    found = find(before=("taskset", "--cpu-list", str(core)))
    assert found["cores"]["values"]["usable"] == 1
    assert found["cores"]["level"] == "note"


def test_a_machine_without_a_network() -> None:
    require_namespaces()
    found = find(before=("unshare", "--net"))
    assert "interface" not in found
    assert found["address"]["level"] == "note"
    assert found["address"]["message"] == "there is no route to other hosts"


def test_proc_of_another_pid_namespace() -> None:
    """As in a container with the /proc of its host, where pids denote other processes."""
    require_namespaces()
    found = find(1, before=("unshare", "--pid", "--fork", "--kill-child"))
    assert found["peer_memory"]["level"] == "problem"
    assert "can't open each other's memory" in found["peer_memory"]["message"]
    assert "same user" in found["peer_memory"]["advice"]


# Messages and exit codes of OpenSSH 9.
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
    """Each is reported with its own reason. A script replaces ssh."""
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    completed = doctor(
        *("--peers", "locked,new,typo,bare,shut"), PATH=f"{tmp_path}:{os.environ['PATH']}"
    )
    assert completed.returncode == 1, completed.stderr
    assert "not fit: 5 problems" in completed.stdout
    for text in (
        "locked: ssh needs a password, or its key is not accepted (ssh: user@locked: Perm",
        "Set up a key: run `ssh-copy-id locked`",
        "new: the host key is unknown to ssh",
        "typo: the host name can't be resolved",
        "bare: Phalanx was not found at the path of this machine's Python",
        "--remote-python PATH",
        "shut: no ssh server is listening there",
    ):
        assert text in completed.stdout, completed.stdout


@pytest.mark.parametrize(
    ("arguments", "environment", "text"),
    [
        (("--output", "/nowhere/found.json"), {}, "there is no directory /nowhere"),
        (
            ("--peers", "a"),
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "--peers is given, but this is a rank of a job",
        ),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], environment: dict[str, str], text: str) -> None:
    completed = doctor(*arguments, **environment)
    assert completed.returncode == 2
    assert text in " ".join(completed.stderr.split())
    assert "Traceback" not in completed.stderr


def test_the_ranks_of_a_job_on_simulated_hosts(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    options = ["--nproc-per-node", "3", "--simulate-hosts", "2"]
    completed = subprocess.run(
        [PHALANX, "run", *options, "-m", "phalanx", "doctor", "--output", str(path)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
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
    assert "[rank 0]  simulated-0 (ranks 0-1)" in completed.stdout
    assert "[rank 1]" not in completed.stdout


def test_a_rank_that_does_not_join() -> None:
    """The others report it after the timeout and still show the findings about their machine."""
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29531",
    }
    completed = doctor("--timeout", "2", **environment)
    assert completed.returncode == 1, completed.stdout + completed.stderr
    assert completed.stderr == ""
    assert "ok      Python" in completed.stdout
    assert "problem " in completed.stdout
    assert "not fit: 1 problem" in completed.stdout
