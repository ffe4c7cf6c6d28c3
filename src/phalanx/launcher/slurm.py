"""Rendezvous of ranks started by `srun`: `init_method="slurm://"`, from Slurm's variables.

Rank 0 runs on the first node of the step and hosts the store there, on a port derived from the job
and step IDs. `MASTER_ADDR` and `MASTER_PORT` override the address and the port if they are set.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch.distributed import default_pg_timeout

from phalanx import env
from phalanx.address import is_loopback, local_address, resolve
from phalanx.errors import UsageError
from phalanx.launcher.store import (
    HOST,
    check_rank_and_size,
    host_store,
    join_store,
    rendezvous_result,
)
from phalanx.system.polling import attempts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Below the ephemeral ports of the kernel. Neighbouring jobs get consecutive ports; the steps of a
# job get ports far apart, at multiples of the golden section of the range.
_FIRST_PORT, _PORTS = 15000, 15000
_STEPS_APART = 9271
_STORE_ID = "phalanx/slurm/store_id"
_ONE_NODE = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_FIRST_NUMBER = re.compile(r"\[(\d+)[^\]]*\]")
_LAST_NUMBER = re.compile(r"\[(?:[^\]]*[^\]\d])?(\d+)\]")
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_joined: set[bytes] = set()


@dataclass(frozen=True)
class SlurmStep:
    """The rank of this task in its step, and the address of rank 0.

    Attributes:
        assignment: The rank, the world size and the local numbers of this task.
        host: The address or name of the host of the store.
        port: The port of the store.
    """

    assignment: env.RankAssignment
    host: str
    port: int
    node: int
    """The index of this task's node in the step."""
    last_node: str
    """The name of the last node, which the first one can reach; empty if there is one node."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> SlurmStep:
        """Read the variables that `srun` has set.

        Args:
            environ: The environment to read.

        Raises:
            ValueError: A variable is missing or malformed.
        """
        tasks = _require_integer(environ, "SLURM_STEP_NUM_TASKS", 1)
        rank = _require_integer(environ, "SLURM_PROCID", 0, tasks - 1)
        counts = _tasks_per_node(environ, tasks)
        node = _require_integer(environ, "SLURM_NODEID", 0, len(counts) - 1)
        local = _require_integer(environ, "SLURM_LOCALID", 0, counts[node] - 1)
        host = HOST if len(counts) == 1 else _node(environ, 0)
        return cls(
            env.RankAssignment(rank, tasks, local, counts[node]),
            environ.get("MASTER_ADDR", "").strip() or host,
            _port(environ),
            node,
            "" if len(counts) == 1 else _node(environ, -1),
        )


def rendezvous_handler(
    url: str, timeout: timedelta = default_pg_timeout, **_options: Any
) -> Iterator[tuple[Any, int, int]]:
    """Return the rendezvous of the tasks of the step; PyTorch calls this function for `slurm://`.

    Blocks until rank 0 hosts the store.

    Args:
        url: The URL from the script, with the rank and world size if the script gave them.
        timeout: The limit of the wait.

    Raises:
        UsageError: This process was not started by `srun`; the script gave another rank or world
            size; or the port is in use.
        torch.distributed.DistError: Rank 0 did not arrive within `timeout`.
    """
    if "SLURM_STEP_ID" not in os.environ:
        hint = " (a batch script is not a step)" if "SLURM_JOB_ID" in os.environ else ""
        raise UsageError(
            f"slurm://: this process was not started by srun{hint}: start the script with "
            "`srun python script.py`, or with `phalanx run` and without slurm://"
        )
    try:
        step = SlurmStep.from_environment()
    except ValueError as error:
        raise UsageError(f"slurm://: {error}") from None
    assignment = step.assignment
    check_rank_and_size(url, assignment.rank, assignment.world_size)
    # On the first node itself, its name may resolve to the loopback interface, where the store does
    # not listen.
    host = step.host if step.node else _listen_address(step)
    store = (
        _join_new_store(host, step.port, timeout)
        if assignment.rank
        else _host_store(step, host, timeout)
    )
    return rendezvous_result(store, assignment.rank, assignment.world_size)


def _host_store(step: SlurmStep, address: str, timeout: timedelta) -> Any:
    try:
        store = host_store(step.port, host=address, timeout=timeout)
    except OSError as error:
        raise UsageError(
            f"slurm://: rank 0 can't listen on port {step.port} of {step.host} "
            f"({os.strerror(error.errno or 0)}): set MASTER_PORT to a port that is free there, for "
            "all tasks"
        ) from None
    store.set(_STORE_ID, secrets.token_hex(8))
    return store


def _join_new_store(host: str, port: int, timeout: timedelta) -> Any:
    """Connect to a store of rank 0 that this process has not joined before.

    All stores of a step have the same port. While rank 0 leaves a group, the store of that group
    still answers the ranks that have already left it and begin the next rendezvous.

    Raises:
        torch.distributed.DistError: There is no such store within `timeout`.
    """
    end = time.monotonic() + timeout.total_seconds()
    for _ in attempts(end):
        # The old store may close between the two calls.
        with contextlib.suppress(dist.DistNetworkError):
            store = join_store(host, port, timedelta(seconds=max(1.0, end - time.monotonic())))
            store_id = store.get(_STORE_ID)
            if store_id not in _joined:
                _joined.add(store_id)
                return store
    raise dist.DistStoreError(
        f"slurm://: rank 0 did not host a store on port {port} of {host} within "
        f"{timeout.total_seconds():g} s"
    )


def _listen_address(step: SlurmStep) -> str:
    """Return the address on which rank 0 listens, never that of all interfaces.

    This is the address to which the name of its node resolves, because other nodes connect to it.
    On the node itself the name may resolve to the loopback interface or not at all. Then it is the
    source address of the route to another node, or the address given by `PHALANX_INTERFACE`.
    """
    if step.host == HOST:
        return HOST
    addresses = resolve(step.host)
    if addresses and not is_loopback(addresses[0]):
        return addresses[0]
    address = local_address(step.last_node)
    if addresses and not step.last_node:  # a single node may use its loopback interface
        return address or addresses[0]
    if not address:
        raise UsageError(
            f"slurm://: the name {step.host} does not resolve to an address that other nodes can "
            f"reach, and this node has no route to {step.last_node or 'other nodes'}: set "
            "MASTER_ADDR to a reachable address, for all tasks"
        )
    return address


def _require_integer(
    environ: Mapping[str, str], name: str, minimum: int, maximum: int | None = None
) -> int:
    value = env.integer(name, minimum=minimum, maximum=maximum, environ=environ)
    if value is None:
        raise ValueError(f"{name} is missing in the environment: srun sets it")
    return value


def _tasks_per_node(environ: Mapping[str, str], tasks: int) -> list[int]:
    """Return the number of tasks on each node: 2, 2, 2 and 1 for "2(x3),1"."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "").strip()
    parts = [_TASKS.fullmatch(part) for part in text.split(",")]
    counts = [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]
    if not all(parts) or sum(counts) != tasks:
        raise ValueError(
            f"SLURM_STEP_TASKS_PER_NODE={text!r} in the environment: expected numbers of tasks as "
            f"in '2(x3),1' with the sum {tasks}, the value of SLURM_STEP_NUM_TASKS"
        )
    return counts


def _node(environ: Mapping[str, str], index: Literal[0, -1]) -> str:
    """Return the first or last node: node01 and node9 for "node[01-03,7],node[8-9]"."""
    pattern = _LAST_NUMBER if index else _FIRST_NUMBER
    text = environ.get("SLURM_STEP_NODELIST", "").strip()
    names = _ONE_NODE.findall(text)
    name = pattern.sub(r"\1", names[index]) if names and ",".join(names) == text else ""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"SLURM_STEP_NODELIST={text!r} in the environment: expected node names such as "
            "'node[01-03,7],other'"
        )
    return name


def _port(environ: Mapping[str, str]) -> int:
    port = env.integer("MASTER_PORT", minimum=1, maximum=65535, environ=environ)
    if port is not None:
        return port
    job = _require_integer(environ, "SLURM_JOB_ID", 0)
    step = _require_integer(environ, "SLURM_STEP_ID", 0)
    return _FIRST_PORT + (job + _STEPS_APART * step) % _PORTS
