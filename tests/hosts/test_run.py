"""Simulated hosts, and the selection of transports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import phalanx
from tests.ranks import RankServer

PHALANX = str(Path(sys.executable).with_name("phalanx"))
SCRIPT = """
import os, torch, torch.distributed as dist, phalanx
with phalanx.init(transport="gloo") as session:
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    native = dist.group.WORLD._membership.native
    print(os.environ["PHALANX_HOST_ID"], type(native).__name__, tensor.tolist())
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PHALANX, "run", *arguments], capture_output=True, text=True, timeout=100)


def test_simulated_hosts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = run("--nproc-per-node", "3", "--simulate-hosts", "2", str(script))
    assert result.returncode == 0, result.stderr
    lines = sorted(result.stdout.splitlines())
    hosts = ("simulated-0", "simulated-0", "simulated-1")
    assert lines == [
        f"[rank {rank}] {host} HierarchicalGroup [3.0, 3.0, 3.0, 3.0]"
        for rank, host in enumerate(hosts)
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--simulate-hosts", "3"), "--simulate-hosts is 3: expected an integer from 1 to 2"),
        (("--simulate-hosts", "two"), "--simulate-hosts is 'two': expected an integer"),
        (
            ("--simulate-hosts", "2", "--nnodes", "2"),
            "simulates hosts on one machine: omit --nnodes",
        ),
    ],
)
def test_invalid_numbers_of_simulated_hosts(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    result = run("--nproc-per-node", "2", *options, str(script))
    assert result.returncode == 2
    assert message in " ".join(result.stderr.split())


def init_with_unknown_transport() -> str:
    os.environ["PHALANX_TRANSPORT"] = "pigeons"
    with pytest.raises(phalanx.UsageError) as caught:
        dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    del os.environ["PHALANX_TRANSPORT"]
    with pytest.raises(phalanx.UsageError, match=r"^transport is 'carrots': expected one of gloo"):
        phalanx.init(transport="carrots")
    if not dist.is_nccl_available():  # the CPU wheel, with which CI runs
        with pytest.raises(phalanx.UsageError, match=r"'nccl', but this torch \(.*\) has no NCCL"):
            phalanx.init(transport="nccl")
    return str(caught.value)


def test_an_unknown_transport(ranks: RankServer) -> None:
    text = ranks.run(1, init_with_unknown_transport, timeout=None)[0]
    message = "PHALANX_TRANSPORT in the environment: transport is 'pigeons': expected one of gloo, "
    assert text.startswith(message)


def init_with_different_versions() -> str:
    rank = int(os.environ["RANK"])
    with pytest.raises(phalanx.PhalanxError) as caught:
        dist.init_process_group(
            "phalanx",
            init_method=f"file://{os.environ['FOLDER']}/store",
            rank=rank,
            world_size=2,
            pg_options=phalanx.Options("gloo"),
        )
    return str(caught.value)


def test_ranks_of_different_versions(ranks: RankServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank pretends to have another version of torch, because only one is installed here."""

    def init_with_another_version() -> str:
        if os.environ["RANK"] == "1":
            torch.__version__ = "2.99.0"
        return init_with_different_versions()

    first, second = ranks.run(2, init_with_another_version, timeout=None, hosts="ab")
    assert "this rank (pid" in second
    assert "2.99.0: install the same version everywhere" in second
    assert "rank 1 could not join: rank 0 (pid" in first
