"""Workers that don't fit to the others, or were called wrongly: `init_rpc` says so at once."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx import key, rpc
from phalanx.errors import PeerLost, UsageError
from phalanx.rpc import init, workers
from phalanx.rpc.current_agent import agent
from tests.ranks import RankServer
from tests.waiting import wait_for

KINDS = {
    "key": "worker 2 has another",
    "no key": "worker 1 has one",
    "size": r"worker \d expects \d workers, worker \d .* \d: give all the same world_size",
    "rank": "rank 1 was given to two workers",
    "name": "name 'twin' is not unique",
}


def not_fit(how: str) -> str:
    """The error of this worker; it must not take its patience."""
    rank, folder = int(os.environ["RANK"]), os.environ["FOLDER"]
    options = rpc.RpcBackendOptions(init_method=f"file://{folder}/{how}")
    name, size = f"worker-{rank}", 3
    if how == "key":
        key_file = f"{folder}/key-{rank == 2}"
        if rank in (0, 2):
            key.create_file(key_file)
        wait_for(lambda: os.path.exists(key_file) and os.stat(key_file).st_size)
        os.environ["PHALANX_KEY_FILE"] = key_file
    elif how == "no key" and rank == 1:
        key.create_file(f"{folder}/one")
        os.environ["PHALANX_KEY_FILE"] = f"{folder}/one"
    elif how == "size":
        size = 4 if rank == 1 else 3
    elif how == "rank":
        rank = 1 if rank == 2 else rank
    elif how == "name":
        name = "twin" if rank else "other"
    begun = time.monotonic()
    with pytest.raises(UsageError) as raised:
        rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options, timeout=15)
    assert time.monotonic() - begun < 10, how
    os.environ.pop("PHALANX_KEY_FILE", None)
    with pytest.raises(UsageError, match="RPC has not been initialized"):
        rpc.rpc_sync(0, abs, (1,))
    return str(raised.value)


def test_who_does_not_fit(ranks: RankServer) -> None:
    """Each worker hears of it at once, not when its patience ends."""
    by_rank = ranks.run(3, lambda: [not_fit(how) for how in KINDS], timeout=None)
    for words, *said in zip(KINDS.values(), *by_rank, strict=True):
        assert all(re.search(words, each) for each in said), said


def die_in_init(when: str) -> tuple[str, float]:
    """Worker 2 dies once all have met: before the others look for it, or after."""
    rank, meet, join = int(os.environ["RANK"]), workers.exchange_records, init._join
    doomed = Path(os.environ["FOLDER"], "doomed")
    begun = time.monotonic()

    def die() -> None:
        if rank == 2:
            doomed.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)

    def met(*arguments: Any) -> Any:
        cards = meet(*arguments)
        if when == "before":
            die()
            wait_for(doomed.exists)
            wait_for(lambda: workers._has_ended(cards[2].pid))
        return cards

    def joined(*arguments: Any) -> None:
        die()
        join(*arguments)

    workers.exchange_records, init._join = met, joined
    with pytest.raises(PeerLost) as raised:
        rpc.init_rpc(f"worker-{rank}", timeout=50)
    with pytest.raises(UsageError, match="RPC has not been initialized"):
        rpc.rpc_sync(0, abs, (1,))
    return str(raised.value), time.monotonic() - begun


@pytest.mark.parametrize("when", ["before", "after"])
def test_one_who_dies_in_init_rpc(ranks: RankServer, when: str) -> None:
    """The others say so at once: neither do they take it for one of another host, nor wait."""
    ended = ranks.start(3, die_in_init, when).join()
    assert ended[2].code == -signal.SIGKILL
    for each in ended[:2]:
        words, seconds = each.value
        assert re.search(r"^worker 'worker-2' .*has died in init_rpc", words), words
        assert seconds < 10


def begin_late() -> None:
    """Worker 0 has met the others, and lets them wait for longer than any later call would."""
    rank, peers = int(os.environ["RANK"]), init._peers
    init.HANDSHAKE_TIMEOUT = 0.2
    others = [Path(os.environ["FOLDER"], f"waits-{each}") for each in (1, 2)]

    def late(*arguments: Any) -> Any:
        if rank == 0:
            wait_for(lambda: all(each.exists() for each in others))
            time.sleep(1)  # what they have begun takes longer than 0.2 s
        return peers(*arguments)

    def joined(*arguments: Any) -> None:
        if rank:
            others[rank - 1].touch()
        join(*arguments)

    join = init._join
    init._peers, init._join = late, joined
    rpc.init_rpc(f"worker-{rank}", timeout=30)
    assert agent().handshake_timeout == 0.2
    assert rpc.rpc_sync(0, abs, (-rank,)) == rank
    rpc.shutdown()


def test_a_worker_that_begins_late(ranks: RankServer) -> None:
    """Others wait for it as long as their own patience says."""
    ranks.run(3, begin_late)


def test_wrong_arguments() -> None:
    for arguments, words in (
        ({"name": ""}, "must be non-empty"),
        ({"name": 5}, "the worker name 5: expected a string"),
        ({"name": "x" * 128}, "shorter than 128"),
        ({"name": "a b"}, "Worker name must match"),
        ({"name": "x", "backend": "TENSORPIPE"}, "member of BackendType"),
        ({"name": "x", "rpc_backend_options": {}}, "instance of RpcBackendOptions"),
        ({"name": "x", "rank": 5, "world_size": 3}, "rank=5, world_size=3: expected"),
        ({"name": "x", "rank": 0, "world_size": 0}, "rank=0, world_size=0: expected"),
        ({"name": "x", "timeout": -1}, "timeout=-1: expected seconds"),
        ({"name": "x", "rpc_backend_options": rpc.RpcBackendOptions(-3.0)}, "rpc_timeout=-3"),
    ):
        with pytest.raises(UsageError, match=words):
            rpc.init_rpc(**arguments)  # type: ignore[arg-type]
