"""Measurement between the ranks of a job, with commands sent through the job's store."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import phalanx
from phalanx import env
from phalanx.doctor.peers.agents import Agent, LocalAgent, Worker
from phalanx.doctor.peers.links import measure_network
from phalanx.errors import PhalanxError, UsageError
from phalanx.system.polling import attempts
from phalanx.torch_versions import default_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx.doctor.peers.links import Network

_RANK_VARIABLES = {
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE",
    "PMIX_RANK": "PMIX_SIZE",
    "SLURM_PROCID": "SLURM_STEP_NUM_TASKS",
}
"""Variables for rank and world size that mpirun and srun set; mpirun may run inside of srun."""
_CLOSE_SECONDS = 5.0
_IDLE_SECONDS = 900.0
"""Seconds without a command after which a rank ends, since rank 0 must be gone."""


def job_rank() -> int | None:
    """Return this process's rank if a launcher has started it as one of several; else None.

    Raises:
        UsageError: The variables of the launcher are malformed or contradict each other.
    """
    try:
        place = env.assigned_ranks()
        if place is None and env.launcher():
            return _launcher_rank()
    except ValueError as error:
        raise UsageError(str(error)) from None
    return place.rank if place is not None and place.world_size > 1 else None


def _launcher_rank() -> int | None:
    for rank, size in _RANK_VARIABLES.items():
        number = env.integer(rank, minimum=0)
        if number is not None:
            # A shell inside of Slurm is a step of one task.
            return None if env.integer(size, minimum=1) == 1 else number
    return None


def measure_job(
    timeout: float, on_progress: Callable[[str], None] = lambda _: None
) -> Network | None:
    """Measure between the ranks of this job; all ranks must call this.

    Blocks until the measurement ends; takes some seconds for each host.

    Args:
        timeout: Seconds that ranks have to arrive.
        on_progress: Callback that receives progress messages.

    Returns:
        The measurements on rank 0; None on the other ranks.

    Raises:
        PhalanxError: A rank did not arrive, has another version, or is lost.
        UsageError: This machine has no address that the others could reach.
    """
    from phalanx import topology  # needs the core

    # Transports connect two ranks only when an operation needs it. Ranks that can't reach each
    # other therefore do not prevent the group from being formed.
    try:
        session = phalanx.init(timeout=timeout, device="cpu")
    except (PhalanxError, UsageError):
        raise
    except dist.DistError as error:
        message = str(error).partition("\n")[0].rstrip(".")
        raise PhalanxError(
            f"the ranks did not join within {timeout:g} s: {message}. Check that all ranks were "
            "started, and that the host of the rendezvous is reachable from here"
        ) from None
    with session:
        store = dist.PrefixStore("phalanx-doctor", default_store())  # type: ignore[attr-defined]
        limit = timedelta(seconds=timeout)
        _, layout, places, group = topology.join(store, session.rank, session.world_size, limit)
        group.close()
        worker = Worker(lambda: topology.own_address(store, places))
        if session.rank > 0:
            _serve_commands(_Mailbox(store, session.rank), worker)
            return None
        others = {rank: _StoreAgent(store, rank) for rank in range(1, session.world_size)}
        agents: dict[int, Agent] = {0: LocalAgent(worker), **others}
        try:
            return measure_network(agents, layout.hosts, on_progress=on_progress)
        finally:
            for agent in agents.values():
                agent.close()


class _Mailbox:
    """The numbered commands and answers between rank 0 and another rank, in the store."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._counts = {"command": 0, "answer": 0}

    def put(self, kind: str, payload: Mapping[str, Any]) -> None:
        self._store.set(self._key(kind), json.dumps(payload))
        self._counts[kind] += 1

    def get(self, kind: str, seconds: float) -> dict[str, Any] | None:
        """Wait for the next message; return None if there is none after `seconds`."""
        key = self._key(kind)
        for _ in attempts(time.monotonic() + seconds):
            if self._store.check([key]):
                self._counts[kind] += 1
                payload: dict[str, Any] = json.loads(self._store.get(key))
                return payload
        return None

    def _key(self, kind: str) -> str:
        return f"{kind}/{self._rank}/{self._counts[kind]}"


class _StoreAgent(Agent):
    def __init__(self, store: Any, rank: int) -> None:
        self._rank = rank
        self._mailbox = _Mailbox(store, rank)

    def start(self, command: Mapping[str, Any]) -> None:
        self._mailbox.put("command", command)

    def answer(self, seconds: float) -> dict[str, Any]:
        payload = self._mailbox.get("answer", seconds)
        return payload or {"error": f"rank {self._rank} did not answer within {seconds:g} s"}

    def close(self) -> None:
        self._mailbox.put("command", {"do": "close"})
        # This process may host the store, so the rank must have read the command.
        self._mailbox.get("answer", _CLOSE_SECONDS)


def _serve_commands(mailbox: _Mailbox, worker: Worker) -> None:
    while True:
        command = mailbox.get("command", _IDLE_SECONDS)
        if command is None:
            raise PhalanxError(f"rank 0 has sent no command for {_IDLE_SECONDS:g} s")
        if command["do"] == "close":
            worker.close()
            mailbox.put("answer", {})
            return
        mailbox.put("answer", worker.execute(command))
