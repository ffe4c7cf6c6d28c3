"""The environment that ranks get besides their place."""

import os

import torch

import phalanx
from phalanx.launcher.rank_environment import rank_defaults

LIMIT = 60


def test_threads_per_rank(monkeypatch):
    monkeypatch.setattr("phalanx.launcher.cores.usable_cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    read = (os.getenv, 2, ("OMP_NUM_THREADS",))
    assert phalanx.launch(*read, timeout=LIMIT) == ["3", "3"]
    assert phalanx.launch(*read, env={"OMP_NUM_THREADS": "5"}, timeout=LIMIT) == ["5", "5"]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert phalanx.launch(*read, timeout=LIMIT) == ["7", "7"]


def test_allocator_keeps_what_a_step_frees_unless_the_user_says_otherwise(monkeypatch):
    names = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    expected = {names[0]: "33554432", names[1]: "134217728"}
    assert rank_defaults(2, os.environ).items() >= expected.items()
    for name in names:  # one of them alone is the user's choice for both
        assert names[0] not in rank_defaults(2, {name: "1"})
        assert names[1] not in rank_defaults(2, {name: "1"})
    read = (lambda: [os.getenv(name) for name in names], 1)
    assert phalanx.launch(*read, timeout=LIMIT) == [list(expected.values())]


def test_ranks_tell_accelerate_to_use_the_cpu_where_there_is_nothing_else(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    wanted = {} if torch.accelerator.is_available() else {"ACCELERATE_USE_CPU": "true"}
    assert rank_defaults(2, {}).items() >= wanted.items()
    assert "ACCELERATE_USE_CPU" not in rank_defaults(2, {"ACCELERATE_USE_CPU": "false"})
