"""The rendezvous of the hosts and ranks of a job.

PyTorch's rendezvous assigns the ranks to the hosts. This module decides the location of its store
and of the ranks' store, which is a new one for each start of all ranks. On one host, the agent's
store is in its own memory and the ranks' store is on the loopback interface. On several hosts,
both stores are on the loopback interface of one of them. That host has a tunnel server
(`tunnel`) and the others connect through it, so that PyTorch finds a store
at 127.0.0.1 on every host. Rendezvous of other kinds, such as etcd, are left to PyTorch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import uuid
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from phalanx.address import is_loopback, local_address
from phalanx.errors import UsageError
from phalanx.launcher.job_coordinator import end_reason, next_attempt, wait_for_hosts
from phalanx.launcher.options import (
    Job,
    is_store_host,
    read_timeout,
    rendezvous_address,
    rendezvous_parameters,
    rendezvous_timeout,
    uses_phalanx_store,
)
from phalanx.launcher.store import HOST, AttemptStores, host_store, join_store
from phalanx.launcher.tunnel import TunnelClient, TunnelServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.launcher.api import LaunchConfig

# Overrides the variables of an outer job: a rank of another job may have started this one.
_NO_TUNNEL = {"PHALANX_TUNNEL_HOST": "", "PHALANX_RELAY": ""}
_NOTICE_SECONDS = 5.0


@dataclass(frozen=True)
class HostRendezvous:
    """The rendezvous of this host's agent and ranks with the other hosts.

    Attributes:
        handler: The rendezvous handler of the agent.
        environment: Environment variables for the ranks.
        rank_store_port: A function that returns the port of the ranks' store of an attempt, on this
            host's loopback interface; None if PyTorch sets it.
        store: The store that the launchers of several hosts share; None on one host.
        tunnel_server: The tunnel server, if this host has the store; else None.
        name: The name of this host in this rendezvous, unique among the hosts of the job.
    """

    handler: RendezvousHandler
    environment: dict[str, str]
    rank_store_port: Callable[[int], int] | None = None
    store: Any = None
    tunnel_server: TunnelServer | None = None
    name: str = field(default_factory=lambda: uuid.uuid4().hex)


@contextlib.contextmanager
def open_rendezvous(
    job: Job, notify: Callable[[str], None], limit: float | None = None
) -> Iterator[HostRendezvous]:
    """Open the rendezvous of this host; block until the host with the store is reachable.

    Args:
        job: The job to run.
        notify: A function that shows a sentence to the user, for example which host was rejected or
            is being waited for.
        limit: The time to try to join again, in seconds; None for the timeout of the rendezvous,
            if this host has not been in the job before.

    Raises:
        UsageError: A port is in use, or an interface does not exist.
        LaunchError: The host with the store rejects this host, or does not answer.
    """
    config = job.config
    if not uses_phalanx_store(config):
        yield HostRendezvous(_make_torch_handler(config), _NO_TUNNEL)
        return
    host, port = rendezvous_address(config)
    handler: RendezvousHandler
    if config.max_nodes == 1:
        handler = _StaticRendezvous(config, dist.HashStore(), notify)  # type: ignore[attr-defined]
        yield HostRendezvous(handler, _NO_TUNNEL, partial(_local_port, AttemptStores(port), port))
        return
    if job.key is None:
        notify(
            "this job has no key, so anyone who can reach its rendezvous can join it; "
            "`phalanx key PATH` creates one for --key-file on all hosts"
        )
    hello = _make_hello(config)
    tunnel, store = _open_tunnel_server(job, hello, notify) or _open_tunnel_client(
        job, hello, notify, limit
    )
    server = tunnel if isinstance(tunnel, TunnelServer) else None
    mode = "listen" if server else "connect"
    environment = {"PHALANX_TUNNEL_HOST": host, "PHALANX_RELAY": f"{mode}:{tunnel.relay_socket}"}
    try:
        if config.rdzv_backend == "static":
            handler = _StaticRendezvous(config, store, notify, lambda: tunnel.rejection)
        else:
            handler = _make_dynamic_handler(config, store, notify)
        name = hello["id"]
        yield HostRendezvous(handler, environment, tunnel.rank_store_port, store, server, name)
    finally:
        tunnel.close()


def _open_tunnel_server(
    job: Job, hello: dict[str, Any], notify: Callable[[str], None]
) -> tuple[TunnelServer, Any] | None:
    """Open the store and its tunnel server if this host is to have them; otherwise return None."""
    config = job.config
    host, port = rendezvous_address(config)
    is_host, is_certain = is_store_host(config, host)
    if not is_host:
        return None
    address = local_address(host)
    if not address:
        raise UsageError(f"this machine has no route to {host}, the address of the rendezvous")
    store = host_store()
    check = partial(_find_mismatch, hello)
    try:
        tunnel = TunnelServer(address, port, job.key or b"", store.port, check, notify)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and not is_certain:
            return None  # another agent on this machine has the store
        raise UsageError(
            f"{address}:{port} {_describe_listen_error(error)}: choose another port on all hosts, "
            "with --master-port or --rdzv-endpoint"
        ) from None
    if is_loopback(address):
        notify(f"only this machine can reach the rendezvous at {host} ({address})")
    return tunnel, store


def _open_tunnel_client(
    job: Job, hello: dict[str, Any], notify: Callable[[str], None], limit: float | None
) -> tuple[TunnelClient, Any]:
    """Connect to the tunnel server, and through it to the store, on the host that has them."""
    config = job.config
    host, port = rendezvous_address(config)
    local_address(host)  # checks PHALANX_INTERFACE once, before each rank does
    tunnel = TunnelClient(host, port, job.key or b"", hello, notify)
    try:
        seconds = rendezvous_timeout(config) if limit is None else limit
        tunnel.connect(seconds, again=limit is not None)
        timeout = timedelta(seconds=read_timeout(config))
        return tunnel, join_store(HOST, tunnel.store_port, timeout)
    except BaseException:
        tunnel.close()
        raise


def _make_dynamic_handler(
    config: LaunchConfig, store: Any, notify: Callable[[str], None]
) -> RendezvousHandler:
    parameters: Any = rendezvous_parameters(config)
    names = ("join", "last_call", "close", "heartbeat")
    seconds = [parameters.get_as_int(f"{name}_timeout") for name in names]
    timeouts = [None if each is None else timedelta(seconds=each) for each in seconds]
    handler: _DynamicRendezvous = _DynamicRendezvous.from_backend(
        config.run_id,
        store,
        _Backend(store, config.run_id),
        config.min_nodes,
        config.max_nodes,
        config.local_addr,
        RendezvousTimeout(*timeouts),
        parameters.get_as_int("keep_alive_interval", 5),
        parameters.get_as_int("keep_alive_max_attempt", 3),
    )
    notice = f"waiting for hosts at {_describe_endpoint(config)}"
    handler.notify_of_wait = partial(notify, notice)
    return handler


class _DynamicRendezvous(DynamicRendezvousHandler):
    """PyTorch's rendezvous of an elastic job, with a notice for the user if it takes long.

    Attributes:
        notify_of_wait: A function that shows the notice.
    """

    notify_of_wait: Callable[[], None]

    def _create_tcp_store_server(self, *_: Any) -> Any:
        # PyTorch would open another store for the ranks, to which every host could connect.
        return self._store

    def next_rendezvous(self) -> RendezvousInfo:
        # PyTorch does not publish the information that it has kept from an earlier round, and new
        # hosts wait for it in this round.
        self._bootstrap_store_info = None
        notice = threading.Timer(_NOTICE_SECONDS, self.notify_of_wait)
        notice.daemon = True
        notice.start()
        try:
            return super().next_rendezvous()
        finally:
            notice.cancel()

    def num_nodes_waiting(self) -> int:
        try:
            return super().num_nodes_waiting()
        except RendezvousClosedError:  # while ranks run, `JobCoordinator` handles it
            return 0


def _describe_endpoint(config: LaunchConfig) -> str:
    host, port = rendezvous_address(config)
    minimum, maximum = config.min_nodes, config.max_nodes
    count = str(minimum) if minimum == maximum else f"{minimum} to {maximum}"
    return f"{host}:{port} ({count} expected)"


class _Backend(C10dRendezvousBackend):
    """PyTorch's backend, which also ends the wait for other hosts when the job is over.

    Waiting hosts read the state repeatedly.
    """

    def __init__(self, store: Any, run_id: str) -> None:
        super().__init__(store, run_id)
        self._job_store = store

    def get_state(self) -> tuple[bytes, Any] | None:
        if reason := end_reason(self._job_store):
            raise RendezvousClosedError(reason)
        state: tuple[bytes, Any] | None = super().get_state()
        return state


def _make_torch_handler(config: LaunchConfig) -> RendezvousHandler:
    try:
        return get_rendezvous_handler(rendezvous_parameters(config))
    except (ImportError, KeyError, RendezvousError, ValueError) as error:
        raise UsageError(
            f"--rdzv-backend {config.rdzv_backend} at {config.rdzv_endpoint!r} is not available: "
            f"{error}; expected static, c10d or another backend that is installed and running"
        ) from error


def _make_hello(config: LaunchConfig) -> dict[str, Any]:
    """Return the description of this host that the host with the store compares with its own."""
    return {
        "name": socket.gethostname(),
        "id": uuid.uuid4().hex,
        "number": config.rdzv_configs.get("rank", -1),
        "Phalanx": metadata.version("phalanx"),
        "torch": torch.__version__,
        "nnodes": f"{config.min_nodes}:{config.max_nodes}",
        "max-restarts": config.max_restarts,
        "rdzv-id": config.run_id,
    }


def _find_mismatch(own: dict[str, Any], other: dict[str, Any]) -> str:
    """Return why another host cannot join, in words that suit both hosts; empty if it can."""
    name, own_name = other.get("name"), own["name"]
    for each in ("Phalanx", "torch"):
        if other.get(each) != own[each]:
            return (
                f"{name} has {each} {other.get(each)}, but {own_name} has {own[each]}: install "
                "the same version on all hosts"
            )
    for each in ("nnodes", "rdzv-id", "max-restarts"):
        if other.get(each) != own[each]:
            return (
                f"{name} was given --{each} {other.get(each)}, but {own_name} was given "
                f"{own[each]}: pass the same value on all hosts"
            )
    return ""


def _describe_listen_error(error: OSError) -> str:
    """Return the reason for which listening on an address failed, as the end of a sentence."""
    if error.errno == errno.EADDRINUSE:
        return "is in use on this machine"
    return f"can't be bound ({os.strerror(error.errno or 0)})"


def _local_port(stores: AttemptStores, requested_port: int, attempt: int) -> int:
    try:
        return stores.port(attempt)
    except OSError as error:
        raise UsageError(
            f"{HOST}:{requested_port} {_describe_listen_error(error)}: choose another port with "
            "--master-port, or omit it on one host to use a free port"
        ) from None


class _StaticRendezvous(RendezvousHandler):
    """The rendezvous of hosts whose numbers are given."""

    def __init__(
        self,
        config: LaunchConfig,
        store: Any,
        notify: Callable[[str], None],
        get_rejection: Callable[[], str] = lambda: "",
    ) -> None:
        self._config = config
        self._store = store
        self._notify = notify
        self._get_rejection = get_rejection
        self._attempt = -1

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._attempt += 1
        rank, hosts = 0, self._config.max_nodes
        if hosts > 1:
            rank = int(self._config.rdzv_configs["rank"])
            # A launcher that was restarted joins a job that has made more attempts.
            self._attempt = max(self._attempt, next_attempt(self._store))
            wait_for_hosts(
                self._store,
                self._attempt,
                rank,
                hosts,
                rendezvous_timeout(self._config),
                self._notify,
                self._get_rejection,
            )
        prefix = f"{self.get_run_id()}/{self._attempt}"
        store = dist.PrefixStore(prefix, self._store)  # type: ignore[attr-defined]
        return RendezvousInfo(store, rank, hosts, RendezvousStoreInfo(HOST, 0))

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
