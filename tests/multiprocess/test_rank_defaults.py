"""The default environment variables of ranks."""

import os

import torch

import phalanx
from phalanx.launcher.host_resources import rank_defaults

LIMIT = 60


def test_threads_per_rank(monkeypatch):
    monkeypatch.setattr("phalanx.launcher.host_resources.usable_cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    call = (os.getenv, 2, ("OMP_NUM_THREADS",))
    assert phalanx.launch(*call, timeout=LIMIT) == ["3", "3"]
    assert phalanx.launch(*call, env={"OMP_NUM_THREADS": "5"}, timeout=LIMIT) == ["5", "5"]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert phalanx.launch(*call, timeout=LIMIT) == ["7", "7"]


def test_allocator_keeps_freed_memory_unless_the_user_sets_it(monkeypatch):
    names = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    expected = {names[0]: "33554432", names[1]: "134217728"}
    assert rank_defaults(2, os.environ).items() >= expected.items()
    for name in names:  # if the user sets one of them, both are left alone
        assert names[0] not in rank_defaults(2, {name: "1"})
        assert names[1] not in rank_defaults(2, {name: "1"})
    call = (lambda: [os.getenv(name) for name in names], 1)
    assert phalanx.launch(*call, timeout=LIMIT) == [list(expected.values())]


def test_accelerate_uses_the_cpu_without_an_accelerator(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    expected = {} if torch.accelerator.is_available() else {"ACCELERATE_USE_CPU": "true"}
    assert rank_defaults(2, {}).items() >= expected.items()
    assert "ACCELERATE_USE_CPU" not in rank_defaults(2, {"ACCELERATE_USE_CPU": "false"})
