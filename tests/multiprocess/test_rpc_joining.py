"""Workers with inconsistent or invalid arguments: `init_rpc` raises at once."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx import key, rpc
from phalanx.errors import PeerLost, UsageError
from phalanx.rpc import init, server, workers
from phalanx.rpc.agent import Agent, agent
from phalanx.rpc.message import Kind
from phalanx.rpc.peer import Peer
from phalanx.system.polling import wait_until
from tests.ports import find_free_port
from tests.ranks import RankServer
from tests.waiting import wait_for

ERRORS = {
    "key": "worker 2 has another",
    "no key": "worker 1 has one",
    "size": r"worker \d expects \d workers, worker \d .* \d: use the same world_size",
    "rank": "two workers have rank 1",
    "name": "name 'twin' is not unique",
}


def init_inconsistently(kind: str) -> str:
    """Return the error of this worker, which must be raised before the timeout."""
    rank, folder = int(os.environ["RANK"]), os.environ["FOLDER"]
    options = rpc.RpcBackendOptions(init_method=f"file://{folder}/{kind}")
    name, size = f"worker-{rank}", 3
    if kind == "key":
        key_file = f"{folder}/key-{rank == 2}"
        if rank in (0, 2):
            key.create_file(key_file)
        wait_for(lambda: os.path.exists(key_file) and os.stat(key_file).st_size)
        os.environ["PHALANX_KEY_FILE"] = key_file
    elif kind == "no key" and rank == 1:
        key.create_file(f"{folder}/one")
        os.environ["PHALANX_KEY_FILE"] = f"{folder}/one"
    elif kind == "size":
        size = 4 if rank == 1 else 3
    elif kind == "rank":
        rank = 1 if rank == 2 else rank
    elif kind == "name":
        name = "twin" if rank else "other"
    with pytest.raises(UsageError) as raised:
        rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options, timeout=60)
    os.environ.pop("PHALANX_KEY_FILE", None)
    with pytest.raises(UsageError, match="RPC has not been initialized"):
        rpc.rpc_sync(0, abs, (1,))
    return str(raised.value)


def test_inconsistent_workers(ranks: RankServer) -> None:
    """Each worker gets the error at once, not after its timeout."""
    by_rank = ranks.run(3, lambda: [init_inconsistently(kind) for kind in ERRORS], timeout=None)
    for pattern, *messages in zip(ERRORS.values(), *by_rank, strict=True):
        assert all(re.search(pattern, each) for each in messages), messages


def end_with_the_store(port: int) -> None:
    """Worker 0, which hosts the store, ends as soon as it has its error; the others read late."""
    rank, ended = int(os.environ["RANK"]), Path(os.environ["FOLDER"], "ended")
    options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    read_records = workers._read_records

    def read_late(store: Any, count: int, timeout: float) -> list[workers.WorkerRecord]:
        if rank and count > 1:
            store.wait([f"worker/{each}" for each in range(count)])
            wait_until(ended.exists, 0.5)
        return read_records(store, count, timeout)

    workers._read_records = read_late
    name = "twin" if rank > 1 else f"worker-{rank}"
    with pytest.raises(UsageError, match="name 'twin' is not unique"):
        rpc.init_rpc(name, rank=rank, world_size=4, rpc_backend_options=options)
    if rank == 0:
        ended.touch()
        os._exit(0)


def test_worker_0_ends_after_all_know_why(ranks: RankServer) -> None:
    for rank in ranks.start(4, end_with_the_store, find_free_port(), timeout=None).join():
        assert rank.code == 0, rank.report()


def die_in_init(when: str) -> str:
    """Worker 2 dies after the rendezvous: before the others look for it, or after.

    If this is "noticed late", worker 1 exits because of that before worker 0 looks for the cause,
    and its announcement arrives only then.
    """
    rank, exchange, real_join = int(os.environ["RANK"]), workers.exchange_records, init._join
    pid_file = Path(os.environ["FOLDER"], "doomed")

    def die() -> None:
        if rank == 2:
            pid_file.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)

    def exchange_and_maybe_die(*arguments: Any) -> Any:
        records = exchange(*arguments)
        if when == "before":
            die()
            wait_for(pid_file.exists)
            wait_for(lambda: workers._has_ended(records[2].pid))
        return records

    def slow_join(*arguments: Any) -> None:
        die()
        real_join(*arguments)

    def find_dead(own: Agent, error: PeerLost) -> Peer | None:
        if when == "noticed late" and rank == 0:
            wait_for(lambda: own.peers[1].has_died)
            looks.set()
        return real_find(own, error)

    def leave_late(reply: Any) -> None:
        if when == "noticed late" and rank == 0:
            looks.wait(5)
        real_leave(reply)

    looks, real_find, real_leave = threading.Event(), init._find_dead, server._leave
    server._HANDLERS[Kind.LEAVE], init._find_dead = leave_late, find_dead
    workers.exchange_records, init._join = exchange_and_maybe_die, slow_join
    with pytest.raises(PeerLost) as raised:
        rpc.init_rpc(f"worker-{rank}", timeout=50)
    with pytest.raises(UsageError, match="RPC has not been initialized"):
        rpc.rpc_sync(0, abs, (1,))
    return str(raised.value)


@pytest.mark.parametrize("when", ["before", "after", "noticed late"])
def test_death_in_init_rpc(ranks: RankServer, when: str) -> None:
    """The others raise at once; they neither wait nor take it for a worker on another host."""
    exits = ranks.start(3, die_in_init, when).join()
    assert exits[2].code == -signal.SIGKILL
    for each in exits[:2]:
        message = each.value
        assert re.search(r"^worker 'worker-2' .*died in init_rpc", message), message


def init_slowly() -> None:
    """Worker 0 is slow after the rendezvous, for longer than the timeout of a handshake."""
    rank, real_peers = int(os.environ["RANK"]), init._peers
    init.HANDSHAKE_TIMEOUT = 0.2
    waiting = [Path(os.environ["FOLDER"], f"waits-{each}") for each in (1, 2)]

    def slow_peers(*arguments: Any) -> Any:
        if rank == 0:
            wait_for(lambda: all(each.exists() for each in waiting))
            time.sleep(1)  # their handshakes take longer than 0.2 s
        return real_peers(*arguments)

    def slow_join(*arguments: Any) -> None:
        if rank:
            waiting[rank - 1].touch()
        real_join(*arguments)

    real_join = init._join
    init._peers, init._join = slow_peers, slow_join
    rpc.init_rpc(f"worker-{rank}", timeout=30)
    assert agent().handshake_timeout == 0.2
    assert rpc.rpc_sync(0, abs, (-rank,)) == rank
    rpc.shutdown()


def test_slow_worker_in_init_rpc(ranks: RankServer) -> None:
    """The other workers wait for it until their own timeout."""
    ranks.run(3, init_slowly)


def test_invalid_arguments() -> None:
    for arguments, pattern in (
        ({"name": ""}, "must be non-empty"),
        ({"name": 5}, "the worker name 5: expected a string"),
        ({"name": "x" * 128}, "shorter than 128"),
        ({"name": "a b"}, "Worker name must match"),
        ({"name": "x", "backend": "TENSORPIPE"}, "member of BackendType"),
        ({"name": "x", "rpc_backend_options": {}}, "instance of RpcBackendOptions"),
        ({"name": "x", "rank": 5, "world_size": 3}, "rank=5, world_size=3: expected"),
        ({"name": "x", "rank": 0, "world_size": -1}, "rank=0, world_size=-1: expected"),
        ({"name": "x", "timeout": -1}, "timeout=-1: expected seconds"),
        ({"name": "x", "rpc_backend_options": rpc.RpcBackendOptions(-3.0)}, "rpc_timeout=-3"),
    ):
        with pytest.raises(UsageError, match=pattern):
            rpc.init_rpc(**arguments)  # type: ignore[arg-type]
