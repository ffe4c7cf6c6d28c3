"""Initialization and shutdown of RPC.

The options have PyTorch's names, so that scripts for its RPC run with only the import changed.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import itertools
import math
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from phalanx.address import local_address, rendezvous_host, url_host
from phalanx.errors import ArgumentTypeError, PeerLost, PhalanxError, UsageError
from phalanx.recorder import exception_hook, flight_recorder
from phalanx.rpc import workers
from phalanx.rpc.agent import Agent, agent, agent_or_none, set_agent
from phalanx.rpc.autograd.graph import AutogradGraph, PeerGraphs
from phalanx.rpc.dynamic_group import DynamicGroup, has_members, wait_until_idle
from phalanx.rpc.functions import end_at_first_failure
from phalanx.rpc.local_connection import HANDSHAKE_TIMEOUT
from phalanx.rpc.message import Kind
from phalanx.rpc.peer import Peer
from phalanx.rpc.server import RpcServer
from phalanx.rpc.shared_memory import ShmSender
from phalanx.rpc.workers import WorkerInfo, WorkerRecord
from phalanx.system.polling import wait_until
from phalanx.torch_versions import default_store, imported_rpc

_INIT_SECONDS = 300.0
_EXIT_MILLISECONDS = 5000
_LEAVE_SECONDS = 1.0
_STATIC, _DYNAMIC = "phalanx-rpc", "phalanx-rpc-dynamic"
"""The prefixes of the entries in the store of groups with a fixed size and without one."""
_RUNNING = f"{_STATIC}/running"
"""An entry that exists while there is a group with a fixed size."""
_MANY = 2
"""Stands for the number of workers of a group in which it is not fixed."""
_init_numbers = itertools.count(1)
"""The numbers of the calls of `init_rpc`, which keep the entries of each in the store apart."""
_stores: list[Any] = []
"""Stores that this module made: rank 0's serves the others until all have left."""
_DEFAULT_INIT_METHOD = "env://"
_DEFAULT_TIMEOUT = 60.0
"""The default timeout of a call, in seconds; the same as PyTorch's."""


class BackendType(enum.Enum):
    """The names of the backend; all mean the same one.

    Example:
        >>> rpc.init_rpc("ps", rpc.BackendType.TENSORPIPE)
    """

    TENSORPIPE = "TENSORPIPE"
    PHALANX = "PHALANX"


@dataclass
class RpcBackendOptions:
    """Options of `init_rpc`.

    Attributes:
        rpc_timeout: The default timeout of a call, in seconds; 0 means no limit.
        init_method: The rendezvous, a URL as for `torch.distributed.init_process_group`; by default
            that of the process group.

    Example:
        >>> options = rpc.RpcBackendOptions(rpc_timeout=10)
        >>> rpc.init_rpc("ps", rpc_backend_options=options)
    """

    rpc_timeout: float = _DEFAULT_TIMEOUT
    init_method: str = _DEFAULT_INIT_METHOD


@dataclass(kw_only=True)
class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """Options of `init_rpc` with PyTorch's signature.

    Attributes:
        num_worker_threads: Unused: there are as many threads as there are requests that wait.
        device_maps: Must be empty: only CPU tensors can be sent.
        devices: Unused.

    Example:
        >>> options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=10)
        >>> rpc.init_rpc("ps", rpc_backend_options=options)
    """

    num_worker_threads: int = 16
    rpc_timeout: float = _DEFAULT_TIMEOUT
    init_method: str = _DEFAULT_INIT_METHOD
    device_maps: Mapping[str, Any] | None = None
    devices: Sequence[Any] | None = None
    _transports: InitVar[Any] = None
    _channels: InitVar[Any] = None

    def __post_init__(self, _transports: object, _channels: object) -> None:
        if not isinstance(self.rpc_timeout, int | float):
            raise ArgumentTypeError(
                f"incompatible constructor arguments: rpc_timeout={self.rpc_timeout!r}, expected "
                "seconds"
            )
        if self.device_maps:
            raise UsageError(
                "device_maps: RPC sends CPU tensors only; send tensor.cpu(), and move it to the "
                "device on the receiver"
            )

    def set_device_map(self, to: str, device_map: Mapping[Any, Any]) -> None:
        """Raise `UsageError`: only CPU tensors can be sent."""
        raise UsageError(f"set_device_map({to!r}, {device_map!r}): RPC sends CPU tensors only")

    def set_devices(self, devices: Sequence[Any]) -> None:
        """Set `devices`, which is unused."""
        self.devices = devices


def _check_options(backend: object, options: Any) -> Any:
    """Return the options to use.

    Raises:
        ArgumentTypeError: An argument has a type that `init_rpc` does not accept.
    """
    if backend is not None and not (
        isinstance(backend, enum.Enum) and backend.name in BackendType.__members__
    ):
        raise ArgumentTypeError(
            f"Argument backend must be a member of BackendType, got {backend!r}"
        )
    if options is None:
        return RpcBackendOptions()
    if type(options) is RpcBackendOptions or isinstance(options, TensorPipeRpcBackendOptions):
        return options
    # PyTorch's own options, if a script has changed only some of its imports.
    torch_rpc = imported_rpc()
    if torch_rpc is not None and isinstance(options, torch_rpc._TensorPipeRpcBackendOptionsBase):
        return TensorPipeRpcBackendOptions(
            rpc_timeout=options.rpc_timeout,
            init_method=options.init_method,
            device_maps=options.device_maps,
        )
    if not isinstance(options, RpcBackendOptions):
        expected = "Argument rpc_backend_options must be an instance of RpcBackendOptions"
    elif backend is None:
        expected = "Could not infer backend for options: expected TensorPipeRpcBackendOptions"
    else:
        expected = "`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`"
    raise ArgumentTypeError(f"{expected}, got {options!r}")


def init_rpc(
    name: str,
    backend: object = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
    *,
    timeout: float = _INIT_SECONDS,
) -> None:
    """Become a worker that others can call; block until all workers have joined.

    The workers rendezvous through the store of the process group. If there is no process group, or
    it has fewer ranks than there are workers, they use `env://`: `MASTER_ADDR`, `MASTER_PORT`,
    `RANK` and `WORLD_SIZE`, as `phalanx run` and torchrun set them. Another
    `rpc_backend_options.init_method` is used whether or not there is a process group.

    In a group without a fixed size, workers join and leave at any time. Joining blocks until all
    workers that are already there know this one. It ends with `shutdown`, which then does not wait
    for the others.

    Args:
        name: This worker's name, unique among all workers, of 1 to 127 characters. The name of a
            lost worker may be used again.
        backend: A member of `BackendType`, as in PyTorch; all mean the same.
        rank: This worker's id; by default its rank in the process group, or `RANK`. In a group
            without a fixed size, a worker whose rank another one had before has a new id.
        world_size: The number of workers; by default the size of the process group, or
            `WORLD_SIZE`. 0 means that it is not fixed; so does the default if there is neither.
        rpc_backend_options: `RpcBackendOptions` or `TensorPipeRpcBackendOptions`.
        timeout: Seconds to wait for the other workers.

    Raises:
        UsageError: The name is invalid or taken, an argument has a wrong type, there is no way to
            rendezvous, this process is already a worker, or not all workers have the same key.
        PhalanxError: A worker did not arrive in time, or cannot be reached.
        PeerLost: A worker died, or left, before all had arrived.

    Example:
        >>> rpc.init_rpc(f"worker{os.environ['RANK']}")
        >>> rpc.rpc_sync("worker0", os.getcwd) == os.getcwd()
        True
        >>> rpc.shutdown()
    """
    if agent_or_none() is not None:
        raise UsageError("RPC is already initialized: call phalanx.rpc.shutdown() first")
    options = _check_options(backend, rpc_backend_options)
    _check_seconds("rpc_timeout", options.rpc_timeout)
    _check_seconds("timeout", timeout)
    shm_sender = ShmSender()
    try:
        own = workers.make_record(name, shm_sender)
        store, rank, size = _rendezvous(options.init_method, rank, world_size)
        group, shared = None, store
        if size:
            store = PrefixStore(f"{_STATIC}/{next(_init_numbers)}", shared)
        else:
            store = PrefixStore(_DYNAMIC, shared)
            group = DynamicGroup(store, own, rank)
            rank = group.id
        key = _key(shared, store, rank, size, own, timeout)
    except BaseException:
        shm_sender.close()
        raise
    hook = AutogradGraph(rank, PeerGraphs())
    new = Agent(WorkerInfo(name, rank), options.rpc_timeout, shm_sender, key, hook)
    new.store = store.clone()  # type: ignore[attr-defined] # a wait on the other one blocks it
    try:
        server = RpcServer(new, key, own.address)
        flight_recorder.publish_job(store)
        if group is None:
            peers = _meet_all(new, own, store, size, timeout)
            if rank == 0:
                new.on_close.append(partial(_mark_static, shared, is_running=False))
        else:
            peers = _enter(group, new, store)
        # Once started, the agent may execute a call, which may make calls itself.
        set_agent(new)
        end_at_first_failure()
        server.open()
        new.start(peers)
    except BaseException:
        set_agent(None)
        _close(new, graceful=True)
        raise
    try:
        if group is None:
            _join(new, timeout)
        else:
            group.greet(timeout)
    except BaseException:
        shutdown(graceful=False)
        raise


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Leave RPC; nobody can call this worker any more.

    In a group without a fixed size, `graceful` waits only for the calls of this worker.

    Args:
        graceful: If true, wait until all workers have called this and no call is pending.
            Otherwise leave at once: calls to this worker raise `PeerLost`.
        timeout: Seconds to wait for the other workers; 0 means no limit.

    Raises:
        UsageError: This process is not a worker.
        PeerLost: A worker died before all had arrived; this worker has left all the same.
        CallTimeout: The others did not arrive in time; this worker has left all the same.

    Example:
        >>> rpc.init_rpc("ps")
        >>> rpc.shutdown()
        >>> rpc.is_initialized()
        False
    """
    own = agent()
    _check_seconds("timeout", timeout)
    try:
        if graceful and own.peers.may_grow:
            wait_until_idle(own, timeout)
        elif graceful:
            _wait_all_workers(own, timeout)
    except BaseException:
        own.call_log.keep()
        raise
    finally:
        set_agent(None)
        _close(own, graceful)
        _stores.clear()


def _close(own: Agent, graceful: bool) -> None:
    if own.publish_leave is not None:
        own.publish_leave()
        graceful = False  # the others stay, and must learn that this worker has left
    own.close(graceful)


class WorkerBarrier:
    """Worker 0's barrier, at which it waits until all workers have arrived and are idle.

    Each worker reports how many calls it has made and executed. If no worker has made or executed a
    call since all reported before, no call is in progress: a function makes its calls before it is
    answered, and no worker arrives while one of its calls has no answer.
    """

    def __init__(self, own: Agent, size: int) -> None:
        self._own, self._size = own, size
        self._lock = threading.Lock()
        self._arrivals: dict[int, tuple[int, Callable[[Any], None], Callable[[Any], None]]] = {}
        self._last: dict[int, int] = {}
        own.loss_listeners.append(self._refuse)

    def arrive(
        self,
        worker: int,
        activity: int,
        send_result: Callable[[Any], None],
        send_exception: Callable[[BaseException], None],
    ) -> None:
        """Record an arrival; once all workers have arrived, answer each whether this is the end."""
        with self._lock:
            self._arrivals[worker] = activity, send_result, send_exception
            is_complete = len(self._arrivals) == self._size
        if lost := next((peer for peer in self._own.peers if peer.loss_reason), None):
            self._refuse(lost.id, lost.loss_reason)
        elif is_complete:
            arrivals = self._take_arrivals()
            now = {each: activity for each, (activity, _, _) in arrivals}
            is_end, self._last = now == self._last, now
            for _, (_, answer, _) in arrivals:
                answer(is_end)

    def _refuse(self, lost: int, reason: str) -> None:
        for _, (_, _, refuse) in self._take_arrivals():
            refuse(PeerLost(reason, ranks=[lost]))

    def _take_arrivals(self) -> list[tuple[int, Any]]:
        """Return the arrivals, this worker's last, since it leaves as soon as it has its answer."""
        with self._lock:
            arrivals, self._arrivals = self._arrivals, {}
        return sorted(arrivals.items(), reverse=True, key=lambda each: each[0])


def _key(
    shared: Store, store: Store, rank: int, size: int, own: WorkerRecord, timeout: float
) -> bytes:
    """Return the key of the job, once it is known that the kinds of groups are not mixed."""
    try:
        if not size:
            is_mixed = shared.check([_RUNNING])
        elif is_mixed := rank == 0 and has_members(PrefixStore(_DYNAMIC, shared)):
            pass
        elif rank == 0:
            _mark_static(shared, is_running=True)
        if is_mixed:
            raise UsageError(
                "RPC group mixes statically and dynamically initialized members which is not "
                "supported: pass the same world_size on all workers, or on none"
            )
        return workers.agree_on_key(store, rank, timeout, by_first=not size)
    except UsageError as error:
        if size:
            workers.publish_failure(store, rank, size, own, error)
        raise


def _mark_static(store: Store, is_running: bool) -> None:
    """Publish that a group of a fixed size begins or ends in this store."""
    with contextlib.suppress(RuntimeError):  # the store may be gone when a group ends
        store.set(_RUNNING, "1") if is_running else store.delete_key(_RUNNING)


def _check_seconds(name: str, seconds: object) -> None:
    if not isinstance(seconds, int | float) or not seconds >= 0:
        raise UsageError(f"{name}={seconds!r}: expected seconds, 0 or more")


def _rendezvous(method: str, rank: int, size: int | None) -> tuple[Store, int, int]:
    """Return the store, the rank and the number of workers; 0 if the number is not fixed."""
    if dist.is_initialized() and method == _DEFAULT_INIT_METHOD:
        rank = dist.get_rank() if rank < 0 else rank
        size = dist.get_world_size() if size is None else size
        if size <= dist.get_world_size():
            return default_store(), rank, size
    rank = int(os.environ.get("RANK", "-1")) if rank < 0 else rank
    size = int(os.environ.get("WORLD_SIZE", "0")) if size is None else size
    if size and not 0 <= rank < size:
        raise UsageError(
            f"rank={rank}, world_size={size}: expected a rank below the world size, as arguments, "
            "from the process group (call init_process_group or phalanx.init first), or as RANK "
            "and WORLD_SIZE in the environment, as `phalanx run` sets them"
        )
    # As PyTorch writes the arguments into the URL; its `rendezvous` omits a world size of -1.
    query = "&".join([f"rank={rank}"] * (rank >= 0) + [f"world_size={size or -1}"])
    try:
        made, rank, _ = next(iter(rendezvous(f"{method}?{query}")))
    except ValueError as error:
        raise UsageError(
            f"the workers have no rendezvous: {error} (start them with `phalanx run`, which sets "
            "RANK and WORLD_SIZE, call init_process_group or phalanx.init first, or pass rank and "
            "init_method)"
        ) from None
    except dist.DistError as error:
        raise PhalanxError(
            f"worker {rank} could not rendezvous with the others by {method!r}: {error} (if a "
            "process group of some of the workers uses the port, make its rank 0 worker 0, or "
            "choose another port by init_method of rpc_backend_options)"
        ) from error
    _stores.append(made)
    return made, rank, size or 0


def _enter(group: DynamicGroup, own: Agent, store: Store) -> list[Peer]:
    """Enter a group without a fixed size; return this worker and those before it."""
    flight_recorder.open_for_workers(store, own.id, _MANY)
    own.publish_leave = group.leave
    own.loss_listeners.append(group.on_loss)
    own.peers.learn = group.learn
    try:
        remote_address = _listen(own, store)
    except ImportError:
        remote_address = ""  # only workers on this host can reach it
    return group.enter(own, remote_address)


def _listen(own: Agent, store: Store) -> str:
    """Listen for workers on other hosts; return the address."""
    return own.listen(url_host(local_address(rendezvous_host(store)) or "127.0.0.1"))


def _meet_all(
    own: Agent, record: WorkerRecord, store: Store, size: int, timeout: float
) -> list[Peer]:
    """Wait for all workers; return them."""
    records = workers.exchange_records(store, own.id, size, record, timeout)
    flight_recorder.open_for_workers(store, own.id, size)
    if own.id == 0:
        own.on_arrival = WorkerBarrier(own, size).arrive
    return _peers(own, record, records, store, timeout)


def _peers(
    own: Agent, record: WorkerRecord, records: list[WorkerRecord], store: Store, timeout: float
) -> list[Peer]:
    """Return all workers; publish a port of this worker for those on other hosts."""
    local = [each == own.id or other.shares_host(record) for each, other in enumerate(records)]
    remote = [each for each, is_local in enumerate(local) if not is_local]
    addresses = [other.address for other in records]
    if remote:
        store.set(f"address/{own.id}", _listen(own, store))
        published = workers.wait_for_values(store, [f"address/{each}" for each in remote], timeout)
        for each, text in zip(remote, published, strict=True):
            addresses[each] = text.decode()
    return [
        Peer(
            WorkerInfo(other.name, each),
            other,
            local[each],
            other.main == record.main != "",
            addresses[each],
        )
        for each, other in enumerate(records)
    ]


def _join(own: Agent, timeout: float) -> None:
    """Check that every worker on another host is reachable, and wait until all have checked that.

    No user function is called before that: if a call kills a worker, all others have already
    reached it.
    """
    for peer in own.peers:
        if not peer.is_local:
            try:
                own.begin(peer, Kind.HELLO, None, "hello", timeout).wait()
            except PhalanxError as error:
                if peer.has_left:
                    raise
                raise PhalanxError(
                    f"{peer} cannot be reached at {peer.address} ({error}): set PHALANX_INTERFACE "
                    "to the interface that connects the hosts"
                ) from None
    # Worker 0 may still be waiting for the addresses of workers on other hosts.
    own.handshake_timeout = math.inf
    try:
        _arrive(own, "all workers to arrive", timeout)
    except PeerLost as error:
        if dead := _find_dead(own, error):
            raise PeerLost(f"{dead} died in init_rpc: see its output", ranks=[dead.id]) from None
        raise
    finally:
        own.handshake_timeout = HANDSHAKE_TIMEOUT


def _find_dead(own: Agent, error: PeerLost) -> Peer | None:
    """Return the worker whose death was the cause of `error`, or None.

    Others may have left because of that death and have exited since; the announcement that they
    leave may still be on its way.
    """
    dead = [each for each in own.peers if each.has_died]
    wait_until(lambda: sum(not each.has_left for each in dead) <= 1, _LEAVE_SECONDS)
    candidates = [each for each in dead if not each.has_left]
    return min(candidates, key=lambda each: each.id not in error.ranks, default=None)


def _wait_all_workers(own: Agent, timeout: float) -> None:
    end = time.monotonic() + (timeout or math.inf)
    is_end = False
    while not is_end:
        wait_until(lambda: not own.outstanding, end - time.monotonic())
        remaining = max(0.001, end - time.monotonic()) if timeout else 0.0
        try:
            is_end = _arrive(own, "all workers to leave", remaining)
        except PeerLost:
            _wait_for_exit(own)
            raise


def _arrive(own: Agent, description: str, timeout: float) -> bool:
    """Arrive at the barrier of worker 0; return whether all workers were idle meanwhile."""
    body = (own.activity,)
    is_end: bool = own.begin(own.peers[0], Kind.ARRIVE, body, description, timeout).wait()
    return is_end


def _wait_for_exit(own: Agent) -> None:
    """Wait until a lost peer has exited, so that its own error is reported as the cause."""
    processes = [peer.pidfd for peer in own.peers if peer.loss_reason and peer.pidfd >= 0]
    poll = select.poll()
    for process in processes:
        poll.register(process, select.POLLIN)
    if processes:
        poll.poll(_EXIT_MILLISECONDS)


def _leave_at_exit() -> None:
    if agent_or_none() is not None:
        shutdown(graceful=False)


def _keep_call_log() -> None:
    if (own := agent_or_none()) is not None:
        own.call_log.keep()


atexit.register(_leave_at_exit)
exception_hook.on_failure(_keep_call_log)
