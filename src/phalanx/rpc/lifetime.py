"""Becoming a worker, and leaving."""

from __future__ import annotations

import atexit
import math
import os
import select
import threading
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # exported at run time
from torch.distributed.rendezvous import rendezvous

from phalanx.errors import PeerLost, PhalanxError, UsageError
from phalanx.rpc import workers
from phalanx.rpc.agent import Agent
from phalanx.rpc.arena import Arena
from phalanx.rpc.autograd import transport
from phalanx.rpc.door import PATIENCE
from phalanx.rpc.options import DEFAULT_INIT_METHOD, RpcBackendOptions
from phalanx.rpc.peer import Peer
from phalanx.rpc.state import agent, agent_or_none, set_agent
from phalanx.rpc.wire import Kind
from phalanx.rpc.workers import Card, WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["init_rpc", "shutdown"]

_INIT_SECONDS = 300.0
_STEP_SECONDS = 0.05
_END_MILLISECONDS = 5000
_times = [0]
# A store that this module made: rank 0's serves the others until all have left.
_stores: list[Any] = []


def init_rpc(
    name: str,
    backend: object = None,  # noqa: ARG001 - PyTorch's
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
    *,
    timeout: float = _INIT_SECONDS,
) -> None:
    """Become a worker that others can call; blocks until all workers are there.

    The workers meet through the store of the process group. Where there is none, or it hasn't as
    many ranks as there are workers, through `env://`: `MASTER_ADDR`, `MASTER_PORT`, `RANK` and
    `WORLD_SIZE`, as `phalanx run` and torchrun set them; or by another
    `rpc_backend_options.init_method`, with or without a group.

    Args:
        name: This worker's name, unique among all, of 1 to 128 characters.
        backend: As in PyTorch; there is one.
        rank: This worker's id; by default its rank in the process group, or `RANK`.
        world_size: How many workers there are; by default the group's ranks, or `WORLD_SIZE`.
        rpc_backend_options: `rpc_timeout`, in seconds, and `init_method`.
        timeout: Seconds to wait for the others.

    Raises:
        UsageError: The name is none or is taken, there is nothing to meet by, this process is a
            worker already, or not all workers have the same key.
        PhalanxError: Some worker didn't come in time, or can't be reached.
        PeerLost: Some worker has died, or left, before all were there.
    """
    if agent_or_none() is not None:
        raise UsageError("this process is a worker already: call phalanx.rpc.shutdown() first")
    options = rpc_backend_options or RpcBackendOptions()
    _check_seconds("rpc_timeout", options.rpc_timeout)
    _check_seconds("timeout", timeout)
    arena = Arena()
    try:
        own = workers.own_card(name, arena)
        store, rank, world_size = _rendezvous(options.init_method, rank, world_size)
        _times[0] += 1
        store = PrefixStore(f"phalanx-rpc/{_times[0]}", store)
        key = _key(store, rank, world_size, own, timeout)
    except BaseException:
        arena.close()
        raise
    new = Agent(WorkerInfo(name, rank), options.rpc_timeout, arena, key, own.address)
    try:
        cards = workers.meet(store, rank, world_size, own, timeout)
        peers = _peers(new, own, cards, store, timeout)
        if rank == 0:
            new.arrivals = Gathering(new, world_size).arrived
        # As soon as it is started it may execute a call, which may call others.
        set_agent(new)
        transport.begin(rank)
        new.start(peers)
    except BaseException:
        set_agent(None)
        new.close(graceful=True)
        transport.end()
        raise
    try:
        _join(new, timeout)
    except BaseException:
        shutdown(graceful=False)
        raise


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Leave; nobody can call this worker any more.

    Args:
        graceful: Wait until all workers have called this and nobody has a call under way;
            otherwise leave at once: calls to this worker raise `PeerLost`.
        timeout: Seconds to wait for the others; 0: any time.

    Raises:
        UsageError: This process is no worker.
        PeerLost: A worker died before all had come; this one has left all the same.
        CallTimeout: The others didn't come in time; this one has left all the same.
    """
    own = agent()
    _check_seconds("timeout", timeout)
    try:
        if graceful:
            _gather(own, timeout)
    finally:
        set_agent(None)
        own.close(graceful)
        transport.end()
        _stores.clear()


class Gathering:
    """On worker 0: waits until all workers have arrived and none has anything left to do.

    Each tells how many calls it has made and executed. When none has made or executed any since all
    told so before, nothing is under way: what is executed makes its calls before it answers, and
    nobody arrives with a call that has no answer.
    """

    def __init__(self, own: Agent, size: int) -> None:
        self._own, self._size = own, size
        self._lock = threading.Lock()
        self._here: dict[int, tuple[int, Callable[[Any], None], Callable[[Any], None]]] = {}
        self._last: dict[int, int] = {}
        own.on_lost = self._lost

    def arrived(
        self,
        who: int,
        activity: int,
        give: Callable[[Any], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """A worker is here; it is answered, with whether this is the end, when all are."""
        lost = ""
        with self._lock:
            self._here[who] = activity, give, fail
            lost = next((peer.lost for peer in self._own.peers if peer.lost), "")
            if not lost and len(self._here) < self._size:
                return
            here, self._here = self._here, {}
        now = {each: entry[0] for each, entry in here.items()}
        is_end, self._last = now == self._last, now
        # This worker last: it leaves as soon as it knows.
        for each in sorted(here, reverse=True):
            _, answer, refuse = here[each]
            if lost:
                refuse(PeerLost(lost))
            else:
                answer(is_end)

    def _lost(self, words: str) -> None:
        with self._lock:
            here, self._here = self._here, {}
        for who in sorted(here, reverse=True):
            here[who][2](PeerLost(words))


def _key(store: Store, rank: int, size: int, own: Card, timeout: float) -> bytes:
    try:
        return workers.agree_on_key(store, rank, timeout)
    except UsageError as error:
        workers.refuse(store, rank, size, own, error)
        raise


def _check_seconds(what: str, seconds: object) -> None:
    if not isinstance(seconds, int | float) or not seconds >= 0:
        raise UsageError(f"{what}={seconds!r}: expected seconds, 0 or more")


def _rendezvous(method: str, rank: int, size: int | None) -> tuple[Store, int, int]:
    if dist.is_initialized() and method == DEFAULT_INIT_METHOD:
        rank = dist.get_rank() if rank < 0 else rank
        size = dist.get_world_size() if size is None else size
        if size <= dist.get_world_size():
            store: Any = dist.distributed_c10d._get_default_store()
            return store, rank, size
    rank = int(os.environ.get("RANK", "-1")) if rank < 0 else rank
    size = int(os.environ.get("WORLD_SIZE", "-1")) if size is None else size
    if not 0 <= rank < size:
        raise UsageError(
            f"rank={rank}, world_size={size}: expected a rank below the world size, as arguments, "
            "from the process group (call init_process_group or phalanx.init first), or as RANK "
            "and WORLD_SIZE in the environment, as `phalanx run` sets them"
        )
    try:
        made, rank, size = next(iter(rendezvous(method, rank, size)))
    except ValueError as error:
        raise UsageError(f"the workers have nothing to meet by: {error}") from None
    except dist.DistError as error:
        raise PhalanxError(
            f"worker {rank} couldn't meet the others by {method!r}: {error} (where the port is "
            "taken by a process group of some of the workers, have its rank 0 be worker 0, or give "
            "another port, as init_method of rpc_backend_options)"
        ) from error
    _stores.append(made)
    return made, rank, size


def _peers(own: Agent, card: Card, cards: list[Card], store: Store, timeout: float) -> list[Peer]:
    """All workers; those of other hosts are told a port of this one."""
    near = [each == own.id or other.shares_host(card) for each, other in enumerate(cards)]
    far = [f"{each}" for each, is_near in enumerate(near) if not is_near]
    addresses = dict.fromkeys(range(len(cards)), "")
    if far:
        host = workers.in_url(workers.interface_towards(store))
        store.set(f"address/{own.id}", own.listen(host))
        told = workers.told(store, [f"address/{each}" for each in far], timeout)
        addresses.update({int(each): text.decode() for each, text in zip(far, told, strict=True)})
    return [
        Peer(
            WorkerInfo(other.name, each),
            other,
            near[each],
            other.main == card.main != "",
            other.address if near[each] else addresses[each],
        )
        for each, other in enumerate(cards)
    ]


def _join(own: Agent, timeout: float) -> None:
    """See that there is a way to every worker of another host, and wait until all have seen it.

    Nobody is called before that: one who dies of a call has been seen by all others then.
    """
    for peer in own.peers:
        if not peer.is_near:
            try:
                own.ask(peer, Kind.HELLO, None, "hello", timeout)
            except PhalanxError as error:
                if peer.has_left:
                    raise
                raise PhalanxError(
                    f"{peer} can't be reached at {peer.address} ({error}): set PHALANX_INTERFACE "
                    "to the interface by which the hosts reach one another"
                ) from None
    # It may still be waiting for what another host tells of itself.
    own.patience = math.inf
    try:
        own.ask(own.peers[0], Kind.ARRIVE, (own.activity,), "all workers to come", timeout)
    except PeerLost:
        # For which worker 0 may have left already, and have ended too.
        if died := next((each for each in own.peers if each.has_died and not each.has_left), None):
            raise PeerLost(f"{died} has died in init_rpc: look at what it said") from None
        raise
    finally:
        own.patience = PATIENCE


def _gather(own: Agent, timeout: float) -> None:
    end = time.monotonic() + timeout if timeout else None
    is_end = False
    while not is_end:
        while own.outstanding and (end is None or time.monotonic() < end):
            time.sleep(_STEP_SECONDS)
        left = 0.0 if end is None else max(0.001, end - time.monotonic())
        activity = own.activity
        try:
            is_end = own.ask(own.peers[0], Kind.ARRIVE, (activity,), "the end of all workers", left)
        except PeerLost:
            _let_end(own)
            raise


def _let_end(own: Agent) -> None:
    """Have those that left go first: what they died of is the story, not that they are missed."""
    processes = [peer.process for peer in own.peers if peer.lost and peer.process >= 0]
    poll = select.poll()
    for process in processes:
        poll.register(process, select.POLLIN)
    if processes:
        poll.poll(_END_MILLISECONDS)


def _leave_at_exit() -> None:
    if agent_or_none() is not None:
        shutdown(graceful=False)


atexit.register(_leave_at_exit)
