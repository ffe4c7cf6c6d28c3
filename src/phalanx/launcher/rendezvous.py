"""The rendezvous of the hosts and ranks of a job.

PyTorch's rendezvous assigns the ranks to the hosts. This module decides the location of its store
and of the ranks' store, which is a new one for each start of all ranks. On one host, the agent's
store is in its own memory and the ranks' store is on the loopback interface. On several hosts,
both stores are on the loopback interface of one of them. That host has a gate (`gate`) and the
others have a way through it (`way`), so that PyTorch finds a store at 127.0.0.1 on every host.
Rendezvous of other kinds, such as etcd, are left to PyTorch.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import threading
import uuid
from datetime import timedelta
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from phalanx import topology
from phalanx.errors import UsageError
from phalanx.launcher import endpoint
from phalanx.launcher.job_coordinator import first_attempt, is_over, meet
from phalanx.launcher.store import HOST, AttemptStores, host_store
from phalanx.launcher.tunnel_client import Way
from phalanx.launcher.tunnel_server import Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.launcher.api import LaunchConfig

    from phalanx.launcher.options import Job

__all__ = ["Meeting", "meeting"]

# Overrides the variables of an outer job: a rank of another job may have started this one.
_NO_GATE = {"PHALANX_TUNNEL_HOST": "", "PHALANX_RELAY": ""}
_NOTICE_SECONDS = 5.0
_NAME = uuid.uuid4().hex


class Meeting:
    """The rendezvous of this host's agent and ranks with the other hosts.

    Attributes:
        handler: The rendezvous handler of the agent.
        environment: Environment variables for the ranks.
        name: The name of this host, unique among the hosts of the job.
        store: The store that the launchers of several hosts share; None on one host.
        has_store: True if this host has the store.
    """

    def __init__(
        self,
        handler: RendezvousHandler,
        environment: dict[str, str],
        port: Callable[[int], int] | None = None,
        end: _End | None = None,
    ) -> None:
        self.handler = handler
        self.environment = environment
        self.name = _NAME
        self.store = end.store if end else None
        self.has_store = end is not None and end.gate is not None
        self._gate = end.gate if end else None
        self._port = port

    def place(self, attempt: int) -> tuple[str, int] | None:
        """Return the host and port of the ranks' store of an attempt; None if PyTorch sets them."""
        return None if self._port is None else (HOST, self._port(attempt))

    def watch(self, gone: Callable[[str, str], None]) -> None:
        """Call a function for each host that leaves, if this host has the store.

        Args:
            gone: The function, called with the unique name of the host and its name for people.
                It must not block.
        """
        if self._gate is not None:
            self._gate.on_gone = gone


@contextlib.contextmanager
def meeting(job: Job, tell: Callable[[str], None]) -> Iterator[Meeting]:
    """Open the rendezvous of this host; block until the host with the gate is reachable.

    Args:
        job: The job to run.
        tell: A function that shows a sentence to the user, for example which host was rejected or
            is being waited for.

    Raises:
        UsageError: A port is in use, or an interface does not exist.
        LaunchError: The gate rejects this host, or does not answer.
    """
    config = job.config
    if not endpoint.is_ours(config):
        yield Meeting(_others_handler(config), _NO_GATE)
    elif config.max_nodes == 1:
        port = endpoint.endpoint(config)[1]
        place = partial(_local_port, AttemptStores(port), port)
        yield Meeting(_Known(config, dist.HashStore()), _NO_GATE, place)  # type: ignore[attr-defined]
    else:
        if job.key is None:
            tell(
                "this job has no key: whoever reaches its rendezvous can join it. `phalanx key "
                "PATH` makes one, to be given to all hosts by --key-file"
            )
        end = _gate(job, tell) or _way(job, tell)
        try:
            handler = _handler(config, end, tell)
            yield Meeting(handler, end.environment, end.ranks_port, end)
        finally:
            end.close()


class _End(NamedTuple):
    """This host's end of the connection to the store of several hosts."""

    store: Any
    """The store of the launchers."""
    ranks_port: Callable[[int], int]
    """A function that returns the port of the ranks' store of an attempt."""
    environment: dict[str, str]
    close: Callable[[], None]
    wrong: Callable[[], str]
    """A function that returns why a host that tried to join was rejected; empty if none was."""
    gate: Gate | None
    """The gate, on the host that has the store; None on the others."""


def _gate(job: Job, tell: Callable[[str], None]) -> _End | None:
    """Open the gate and return this end if this host has the store; otherwise return None."""
    config = job.config
    host, port = endpoint.endpoint(config)
    here, sure = endpoint.has_gate(config, host)
    if not here:
        return None
    address = topology.local_address(host)
    if not address:
        raise UsageError(
            f"there is no way from this machine to {host}, where the hosts are to meet"
        )
    own = _hello(config)
    store = host_store()
    try:
        gate = Gate(address, port, job.key or b"", store.port, partial(_differs, own), tell)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and not sure:
            return None  # another agent on this machine has the gate
        raise UsageError(
            f"{address}:{port} {_why(error)}: give another port on all hosts, with --master-port "
            "or --rdzv-endpoint"
        ) from None
    if ipaddress.ip_address(address).is_loopback:
        tell(f"the hosts are to meet at {host} ({address}), which only this machine reaches")
    environment = {"PHALANX_TUNNEL_HOST": host, "PHALANX_RELAY": f"listen:{gate.relay}"}
    ranks = gate.stores.port
    return _End(store, ranks, environment, gate.close, lambda: gate.wrong, gate)


def _way(job: Job, tell: Callable[[str], None]) -> _End:
    """Open the way through the gate of another host and return this end."""
    config = job.config
    host, port = endpoint.endpoint(config)
    topology.local_address(host)  # checks PHALANX_INTERFACE once, before each rank does
    way = Way(host, port, job.key or b"", _hello(config), tell)
    try:
        way.enter(endpoint.patience(config))
        limit = timedelta(seconds=endpoint.read_limit(config))
        store = dist.TCPStore(HOST, way.port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
    except BaseException:
        way.close()
        raise
    environment = {"PHALANX_TUNNEL_HOST": host, "PHALANX_RELAY": f"connect:{way.relay}"}

    def ranks_port(attempt: int) -> int:
        way.attempt = attempt
        return way.ranks_port

    return _End(store, ranks_port, environment, way.close, str, None)


def _handler(config: LaunchConfig, end: _End, tell: Callable[[str], None]) -> RendezvousHandler:
    if config.rdzv_backend == "static":
        number, seconds = int(config.rdzv_configs["rank"]), endpoint.patience(config)

        def meet_others(attempt: int) -> None:
            meet(end.store, attempt, number, config.max_nodes, seconds, tell, end.wrong)

        return _Known(config, end.store, meet_others)
    handler = create_handler(end.store, _Backend(end.store, config.run_id), _parameters(config))
    # PyTorch would otherwise open another store for the ranks, to which every host can connect.
    handler._create_tcp_store_server = lambda *_: end.store  # type: ignore[method-assign]
    join = handler.next_rendezvous

    def next_rendezvous() -> RendezvousInfo:
        # PyTorch does not publish the information that it has kept from an earlier round, and new
        # hosts wait for it in this round.
        handler._bootstrap_store_info = None
        notice = threading.Timer(_NOTICE_SECONDS, tell, [f"waiting for hosts at {_place(config)}"])
        notice.daemon = True
        notice.start()
        try:
            return join()
        finally:
            notice.cancel()

    count = handler.num_nodes_waiting

    def num_nodes_waiting() -> int:
        try:
            return count()
        except RendezvousClosedError:  # while ranks run, `News` handles it
            return 0

    handler.next_rendezvous = next_rendezvous  # type: ignore[method-assign]
    handler.num_nodes_waiting = num_nodes_waiting  # type: ignore[method-assign]
    return handler


def _place(config: LaunchConfig) -> str:
    host, port = endpoint.endpoint(config)
    least, most = config.min_nodes, config.max_nodes
    wanted = str(least) if least == most else f"{least} to {most}"
    return f"{host}:{port}, where {wanted} are to meet"


class _Backend(C10dRendezvousBackend):
    """PyTorch's backend, which also ends the wait for other hosts when the job is over.

    Waiting hosts read the state repeatedly.
    """

    def __init__(self, store: Any, run_id: str) -> None:
        super().__init__(store, run_id)
        self._job_store = store

    def get_state(self) -> tuple[bytes, Any] | None:
        if words := is_over(self._job_store):
            raise RendezvousClosedError(words)
        state: tuple[bytes, Any] | None = super().get_state()
        return state


def _others_handler(config: LaunchConfig) -> RendezvousHandler:
    try:
        return get_rendezvous_handler(_parameters(config))
    except (ImportError, KeyError, RendezvousError, ValueError) as error:
        raise UsageError(
            f"--rdzv-backend {config.rdzv_backend} at {config.rdzv_endpoint!r} can't be had: "
            f"{error}; expected static, c10d, or one that is installed and runs"
        ) from error


def _hello(config: LaunchConfig) -> dict[str, Any]:
    """Return the description of this host that the gate's host compares with its own."""
    return {
        "name": socket.gethostname(),
        "id": _NAME,
        "number": config.rdzv_configs.get("rank", -1),
        "Phalanx": metadata.version("phalanx"),
        "torch": torch.__version__,
        "nnodes": f"{config.min_nodes}:{config.max_nodes}",
        "max-restarts": config.max_restarts,
        "rdzv-id": config.run_id,
    }


def _differs(own: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Return why another host cannot join, in words that suit both hosts; empty if it can."""
    name, here = theirs.get("name"), own["name"]
    for what in ("Phalanx", "torch"):
        if theirs.get(what) != own[what]:
            return (
                f"{name} has {what} {theirs.get(what)}, {here} {own[what]}: install the same "
                "version on all hosts"
            )
    for what in ("nnodes", "rdzv-id", "max-restarts"):
        if theirs.get(what) != own[what]:
            return (
                f"{name} was given --{what} {theirs.get(what)}, {here} {own[what]}: give all hosts "
                "the same"
            )
    return ""


def _why(error: OSError) -> str:
    """Return the reason for which listening on an address failed, as the end of a sentence."""
    if error.errno == errno.EADDRINUSE:
        return "is in use on this machine"
    return f"can't be listened on ({os.strerror(error.errno or 0)})"


def _parameters(config: LaunchConfig) -> RendezvousParameters:
    return RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )


def _local_port(stores: AttemptStores, wanted: int, attempt: int) -> int:
    try:
        return stores.port(attempt)
    except OSError as error:
        raise UsageError(
            f"{HOST}:{wanted} {_why(error)}: give another port with --master-port, or, on one "
            "host, none: then a free one is found"
        ) from None


class _Known(RendezvousHandler):
    """The rendezvous of hosts whose numbers are given."""

    def __init__(
        self, config: LaunchConfig, store: Any, meet_others: Callable[[int], None] | None = None
    ) -> None:
        self._config = config
        self._store = store
        self._meet_others = meet_others
        self._attempt = -1

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._attempt += 1
        if self._meet_others is not None:
            # A launcher that was restarted joins a job that has made more attempts.
            self._attempt = max(self._attempt, first_attempt(self._store))
            self._meet_others(self._attempt)
        prefix = f"{self.get_run_id()}/{self._attempt}"
        store = dist.PrefixStore(prefix, self._store)  # type: ignore[attr-defined]
        rank = int(self._config.rdzv_configs.get("rank", 0)) if self._config.max_nodes > 1 else 0
        return RendezvousInfo(store, rank, self._config.max_nodes, RendezvousStoreInfo(HOST, 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._config.run_id

    def shutdown(self) -> bool:
        return True
