"""Ranks started as by `srun`, simulated by its environment variables."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from phalanx import env
from phalanx.errors import UsageError
from phalanx.launcher import slurm
from phalanx.launcher.arguments import parse_arguments
from phalanx.launcher.options import make_job
from phalanx.launcher.slurm import SlurmStep, _listen_address
from phalanx.launcher.store import join_store
from phalanx.system.polling import wait_until
from tests.ports import find_free_port

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import torch, torch.distributed as dist

def check():
    tensor = torch.full((5,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [sum(range(dist.get_world_size()))] * 5

dist.init_process_group("phalanx", init_method="slurm://")
check()
dist.destroy_process_group()
import phalanx
with phalanx.init() as session:
    check()
    print("place", session.rank, session.world_size, session.local_rank, session.local_world_size)
"""
LIMIT = 100


def slurm_variables(
    rank: int, per_node: tuple[int, ...], nodes: str, text: str = ""
) -> dict[str, str]:
    """Return the variables that srun sets for a task, with those of the batch script."""
    node = next(node for node in range(len(per_node)) if rank < sum(per_node[: node + 1]))
    return {
        "SLURM_JOB_ID": "41712",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_NTASKS": str(sum(per_node)),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_NODES": str(len(per_node)),
        "SLURM_STEP_NUM_TASKS": str(sum(per_node)),
        "SLURM_STEP_TASKS_PER_NODE": text or ",".join(map(str, per_node)),
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(rank - sum(per_node[:node])),
        "SLURM_SRUN_COMM_HOST": "192.0.2.1",
        "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1",
    }


@pytest.mark.parametrize(
    ("nodes", "first", "last"),
    [
        ("node[01-03,7],other", "node01", "other"),
        ("other,node[01-03]", "other", "node03"),
        ("rack[0-1]-node[12,15-16].cluster,x", "rack0-node12.cluster", "x"),
        ("a1,rack[0-1]-node[12,15].cluster", "a1", "rack1-node15.cluster"),
        ("a[1]", "a1", "a1"),
        ("a1,b2", "a1", "b2"),
    ],
)
def test_the_first_and_the_last_node(nodes: str, first: str, last: str) -> None:
    step = SlurmStep.from_environment(slurm_variables(0, (2, 1), nodes))
    assert (step.host, step.last_node) == (first, last)


@pytest.mark.parametrize("interface", ("", "127.0.0.1"))
def test_a_name_that_resolves_to_loopback(interface: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in /etc/hosts of many systems: rank 0 listens on a reachable address, and only there."""
    monkeypatch.setenv("PHALANX_INTERFACE", interface)
    step = SlurmStep.from_environment(
        {**slurm_variables(0, (1, 1), "localhost,x"), "MASTER_ADDR": "localhost"}
    )
    assert _listen_address(replace(step, last_node="127.0.0.9")) == "127.0.0.1"
    if not interface:
        with pytest.raises(
            UsageError, match="the name localhost does not resolve to an address that other"
        ):
            _listen_address(replace(step, last_node="no-such-node.invalid"))
    assert _listen_address(replace(step, host="192.0.2.7")) == "192.0.2.7"


def test_ranks_of_a_task() -> None:
    environ = slurm_variables(5, (2, 2, 2, 1), "n[1-4]", "2(x3),1")
    assert SlurmStep.from_environment(environ).assignment == env.RankAssignment(5, 7, 1, 2)
    assert SlurmStep.from_environment(
        slurm_variables(6, (2, 2, 2, 1), "n[1-4]")
    ).assignment == env.RankAssignment(6, 7, 0, 1)
    assert SlurmStep.from_environment(slurm_variables(1, (3,), "n1")).host == "127.0.0.1"
    overrides = {"MASTER_ADDR": "n1.cluster", "MASTER_PORT": "4711"}
    step = SlurmStep.from_environment({**environ, **overrides})
    assert (step.host, step.port) == ("n1.cluster", 4711)


def test_ports_of_steps_differ() -> None:
    environ = slurm_variables(0, (2,), "n1")
    ports = {
        SlurmStep.from_environment(
            {**environ, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        ).port
        for job in range(41700, 41750)
        for step in range(10)
    }
    assert len(ports) == 500
    assert min(ports) >= 15000
    assert max(ports) < 30000


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID='x' in the environment: expected an integer"),
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID=3 in the environment: .* from 0 to 2"),
        ({"SLURM_LOCALID": ""}, "SLURM_LOCALID is missing in the environment: srun sets it"),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "2,2"},
            "PER_NODE='2,2' .* with the sum 3, the value of SLURM_STEP_NUM",
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "2x1"}, "PER_NODE='2x1' in the environment: expected"),
        ({"SLURM_STEP_NODELIST": "[1-2"}, r"SLURM_STEP_NODELIST='\[1-2' in the environment"),
    ],
)
def test_malformed_variables(changed: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SlurmStep.from_environment({**slurm_variables(1, (2, 1), "n[1-2]"), **changed})


@pytest.mark.parametrize(
    ("names", "launcher"),
    [
        ((), ""),
        (("SLURM_JOB_ID", "SLURM_PROCID"), ""),  # a batch script
        (("SLURM_STEP_ID", "SLURM_PROCID"), "slurm"),
        (("SLURM_STEP_ID", "SLURM_PROCID", "PMI_SIZE", "PMIX_RANK"), "slurm"),
        # mpirun has started its processes with srun.
        (("SLURM_STEP_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK"), "mpi"),
        (("SLURM_STEP_ID", "SLURM_PROCID", "MPI_LOCALNRANKS", "PMI_SIZE"), "mpi"),
        (("PMIX_RANK",), "mpi"),
    ],
)
def test_detection_of_the_launcher(names: tuple[str, ...], launcher: str) -> None:
    assert env.launcher(dict.fromkeys(names, "1")) == launcher


def run(script: Path, environments: list[dict[str, str]]) -> list[tuple[int, str, str]]:
    # The tests may run in a Slurm job.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**clean, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    try:
        return [(process.wait(LIMIT), *process.communicate()) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_rendezvous(tmp_path: Path) -> None:
    """Two nodes, both of them this machine, with addresses instead of names."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environ = [slurm_variables(rank, (2, 1), "127.0.0.[1-2]") for rank in range(3)]
    results = run(script, environ)
    assert [code for code, _, _ in results] == [0, 0, 0], results
    lines = [out.strip() for _, out, _ in results]
    assert lines == ["place 0 3 0 2", "place 1 3 1 2", "place 2 3 0 1"]


def test_the_previous_store_is_not_joined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that leaves a group before rank 0 does still finds the store of that group."""
    seconds = timedelta(seconds=30)
    step = SlurmStep(env.RankAssignment(0, 2, 0, 1), "127.0.0.1", find_free_port(), 0, "")
    joins: list[object] = []

    def count(*arguments: Any) -> Any:
        joins.append(arguments)
        return join_store(*arguments)

    monkeypatch.setattr(slurm, "join_store", count)
    stores = [slurm._host_store(step, step.host, seconds)]
    slurm._join_new_store(step.host, step.port, seconds)
    with pytest.raises(dist.DistStoreError, match="rank 0 did not host a store on port"):
        slurm._join_new_store(step.host, step.port, timedelta(seconds=0.1))
    del joins[:]
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(slurm._join_new_store, step.host, step.port, seconds)
        assert wait_until(lambda: len(joins) > 2, 20)  # it waits
        del stores[:]
        stores.append(slurm._host_store(step, step.host, seconds))
        stores[0].set("group", "the second one")
        assert future.result(30).get("group") == b"the second one"


def test_a_port_in_use(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        environ = {**slurm_variables(0, (2,), "n1"), "MASTER_PORT": str(port)}
        ((code, _, err),) = run(script, [environ])
    assert code == 1
    message = (
        f"rank 0 can't listen on port {port} of 127.0.0.1 (Address already in use): set MASTER"
    )
    assert message in err.splitlines()[-1]


def test_a_step_of_one_task_needs_no_network(tmp_path: Path) -> None:
    """As in the shell of an allocation, in which a script may run twice at the same time."""
    script = tmp_path / "script.py"
    script.write_text(
        "import phalanx\nwith phalanx.init() as session: print(session.rank, session.world_size)"
    )
    with socket.create_server(("127.0.0.1", 0)) as other:
        environ = {**slurm_variables(0, (1,), "n1"), "MASTER_PORT": str(other.getsockname()[1])}
        ((code, out, err),) = run(script, [environ])
    assert (code, out) == (0, "0 1\n"), err


def test_processes_outside_a_step(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    no_step, batch_script = run(script, [{}, {"SLURM_JOB_ID": "41712", "SLURM_PROCID": "0"}])
    assert "slurm://: this process was not started by srun: start" in no_step[2].splitlines()[-1]
    assert "by srun (a batch script is not a step): start" in batch_script[2].splitlines()[-1]


@pytest.mark.parametrize(
    ("environ", "other"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun"),
        ({"MPI_LOCALNRANKS": "2", "PMI_SIZE": "4"}, "mpirun"),
        (slurm_variables(0, (2, 2), "n[1-2]"), "srun"),
    ],
)
def test_phalanx_run_under_another_launcher(
    environ: dict[str, str], other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    message = (
        f"^{other} has started several instances of `phalanx run`.*`{other} ... python SCRIPT`"
    )
    with pytest.raises(UsageError, match=message):
        make_job(parse_arguments([str(script)]))
    assert make_job(parse_arguments(["--nnodes", "2", "--master-addr", "n1", str(script)]))
