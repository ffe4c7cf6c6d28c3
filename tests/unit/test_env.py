import os
import re
from pathlib import Path

import pytest

from phalanx import env
from phalanx.launcher.host_resources import threads_per_rank, usable_cores

RANKS = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_no_ranks_without_a_launcher():
    assert env.assigned_ranks({}) is None
    assert env.assigned_ranks({"RANK": " ", "LOCAL_RANK": "3"}) is None


def test_ranks_of_a_launcher():
    given = {**RANKS, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    assert env.assigned_ranks(given) == env.RankAssignment(1, 4, 0, 2)
    assert env.assigned_ranks(RANKS) == env.RankAssignment(1, 4, 1, 4)


@pytest.mark.parametrize("missing", RANKS)
def test_missing_variables_are_named(missing):
    given = {name: value for name, value in RANKS.items() if name != missing}
    with pytest.raises(ValueError, match=f"lacks {missing}:"):
        env.assigned_ranks(given)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "one", "RANK='one'.*an integer from 0"),
        ("RANK", "-1", "RANK=-1.*an integer from 0"),
        ("RANK", "4", "RANK=4 and WORLD_SIZE=4.*expected 0 to 3"),
        ("WORLD_SIZE", "0", "WORLD_SIZE=0.*an integer from 1"),
        ("WORLD_SIZE", "4.0", "WORLD_SIZE='4.0'"),
        ("MASTER_PORT", "99999", "MASTER_PORT=99999.*1 to 65535"),
        ("LOCAL_RANK", "4", "LOCAL_RANK=4.*0 to 3"),
        ("LOCAL_WORLD_SIZE", "5", "LOCAL_WORLD_SIZE=5.*1 to 4"),
    ],
)
def test_malformed_ranks(name, value, message):
    with pytest.raises(ValueError, match=message):
        env.assigned_ranks({**RANKS, name: value})


def test_every_variable_of_phalanx_is_documented(repository):
    pattern = re.compile(
        r"(?:environ(?:\.get|\.setdefault|\.pop)?[\[(]|getenv\()\s*[\"'](PHALANX_\w+)"
    )
    sources = [*(repository / "src").rglob("*.py"), *(repository / "native").rglob("*.cpp")]
    read = {name for path in sources for name in pattern.findall(path.read_text())}
    assert read <= env.VARIABLES.keys()
    assert all(len(text) > 40 for text in env.VARIABLES.values())


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def many_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),
        ({"proc/self/cgroup": "0::/\n"}, 16),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 16),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "350000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 1),
        # Inside a container the group's path is often that of the host.
        ({"proc/self/cgroup": "0::/host/x\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/c\n",
                "sys/fs/cgroup/cpu,cpuacct/c/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu,cpuacct/c/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            16,
        ),
    ],
)
def test_usable_cores_respect_the_quota(tmp_path, files, cores):
    assert usable_cores(write(tmp_path, files)) == cores


def test_threads_share_the_cores(monkeypatch):
    monkeypatch.setattr("phalanx.launcher.host_resources.usable_cores", lambda: 8)
    assert [threads_per_rank(nprocs) for nprocs in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]
