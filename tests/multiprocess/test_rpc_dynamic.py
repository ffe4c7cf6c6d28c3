"""RPC groups whose workers join, leave and die at any time."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest
import torch

from phalanx import rpc
from phalanx.errors import CallTimeout, PeerLost, PhalanxError, UsageError
from phalanx.rpc import dynamic_group
from phalanx.rpc.agent import agent
from tests.ranks import RankServer, marker_file, wait_for_file
from tests.waiting import stopped, wait_for

HOSTS = ["aaaa", "abab"]


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    ranks.preload("phalanx.rpc")


def own_rank() -> int:
    return int(os.environ["RANK"])


def options() -> rpc.RpcBackendOptions:
    return rpc.RpcBackendOptions(
        rpc_timeout=8.0, init_method=f"file://{os.environ['FOLDER']}/store"
    )


def join(name: str = "") -> rpc.WorkerInfo:
    rank = own_rank()
    rpc.init_rpc(name or f"worker{rank}", world_size=0, rpc_backend_options=options())
    return rpc.get_worker_info()


def check_call(to: object) -> None:
    """Call a worker with a tensor that is not sent in the message itself, and use a reference."""
    values = torch.rand(40_000)
    assert torch.equal(rpc.rpc_sync(to, torch.neg, (values,)), -values)
    assert torch.equal(rpc.remote(to, torch.add, (values, 1)).to_here(), values + 1)


def meet_in_turn() -> list[int]:
    """Join one after the other; each calls all, when it joins and when all are there."""
    rank, size = own_rank(), int(os.environ["WORLD_SIZE"])
    if rank:
        wait_for_file(f"joined{rank - 1}")
    assert join().id == rank
    for other in range(rank + 1):
        check_call(f"worker{other}")
    marker_file(f"joined{rank}").touch()
    wait_for_file(f"joined{size - 1}")
    for other in range(size):
        check_call(other)
    ids = [info.id for info in rpc.get_worker_infos()]
    marker_file(f"called{rank}").touch()
    for other in range(size):
        wait_for_file(f"called{other}")
    rpc.shutdown()
    return ids


@pytest.mark.parametrize("hosts", HOSTS)
def test_workers_join_in_turn(ranks: RankServer, hosts: str) -> None:
    assert ranks.run(4, meet_in_turn, timeout=None, hosts=hosts) == [[0, 1, 2, 3]] * 4


def meet_at_once(rounds: int) -> None:
    size = int(os.environ["WORLD_SIZE"])
    for number in range(rounds):
        join(f"worker{own_rank()}.{number}")
        marker_file(f"joined{number}.{own_rank()}").touch()
        for other in range(size):
            wait_for_file(f"joined{number}.{other}")
            check_call(f"worker{other}.{number}")
        marker_file(f"called{number}.{own_rank()}").touch()
        for other in range(size):
            wait_for_file(f"called{number}.{other}")
        rpc.shutdown()


@pytest.mark.parametrize("hosts", HOSTS)
def test_workers_join_and_leave_together(ranks: RankServer, hosts: str) -> None:
    """In later rounds, the store has entries of all that have left."""
    ranks.run(6, meet_at_once, 3, timeout=None, hosts=hosts)


def use_reference_of_unknown_worker() -> Any:
    """Worker 1 gets a reference to a value of worker 2, before that has introduced itself to it."""
    rank = own_rank()
    if rank == 2:
        wait_for_file("joined0")
        wait_for_file("joined1")
    join()
    marker_file(f"joined{rank}").touch()
    if rank == 0:
        wait_for_file("joined2")
        mine = rpc.remote("worker2", torch.full, ((30_000,), 4.0))
        assert rpc.rpc_sync("worker1", read, (mine,)) == 4.0
        marker_file("done").touch()
    wait_for_file("done")
    rpc.shutdown()


def read(reference: rpc.RRef[torch.Tensor]) -> float:
    known = agent().peers
    del known._by_id[2], known._by_name["worker2"]
    known.learn.__self__._read -= 1  # type: ignore[union-attr] # as if it had read nothing yet
    return float(reference.to_here().mean())


@pytest.mark.parametrize("hosts", ["aaa", "aab"])
def test_a_reference_to_a_value_of_an_unknown_worker(ranks: RankServer, hosts: str) -> None:
    ranks.run(3, use_reference_of_unknown_worker, timeout=None, hosts=hosts)


def replace_a_worker() -> Any:
    """Worker 1 is killed; another process takes its name and its rank."""
    rank = own_rank()
    if rank == 2:
        wait_for_file("killed")
        os.environ["RANK"] = "1"
        info = join("worker1")
        check_call("worker0")
        marker_file("replaced").touch()
        wait_for_file("done")
        rpc.shutdown()
        return info.id
    join()
    if rank == 1:
        marker_file("joined").touch()
        wait_for_file("never", 60)
    wait_for_file("joined")
    old = rpc.get_worker_info("worker1")
    reference = rpc.remote(old, torch.ones, (3,))
    reference.to_here()
    os.kill(rpc.rpc_sync(old, os.getpid), signal.SIGKILL)
    with pytest.raises(PeerLost, match="worker 'worker1'"):
        rpc.rpc_sync(old, torch.ones, (3,))
    marker_file("killed").touch()
    wait_for_file("replaced")
    check_call("worker1")
    new = rpc.get_worker_info("worker1")
    assert [info.id for info in rpc.get_worker_infos()] == [0, new.id]
    with pytest.raises(PeerLost, match="worker 'worker1'"):
        reference.to_here()
    marker_file("done").touch()
    rpc.shutdown()
    return new.id


@pytest.mark.parametrize("hosts", ["aaa", "aba", "abb", "abc"])
def test_another_process_takes_the_name_of_a_lost_worker(ranks: RankServer, hosts: str) -> None:
    ended = ranks.start(3, replace_a_worker, timeout=None, hosts=hosts).join()
    codes = [each.code for each in ended]
    assert codes == [0, -signal.SIGKILL, 0], [each.report() for each in ended]
    assert ended[0].value == ended[2].value >= 1024


def refuse_names() -> None:
    rank = own_rank()
    if rank == 1:
        wait_for_file("joined")
        dynamic_group._NAME_SECONDS = 0.5
        with pytest.raises(UsageError, match=r"the worker name 'ps' is not unique: worker 'ps' \("):
            join("ps")
        join("other")
        marker_file("refused").touch()
        wait_for_file("left")
        wait_for(lambda: len(rpc.get_worker_infos()) == 1)
        with pytest.raises(PeerLost, match=r"worker 'ps' \(id 0, .*\) left RPC"):
            rpc.rpc_sync("ps", torch.ones, (2,))
        with pytest.raises(UsageError, match="could not find destination 'nobody'"):
            rpc.rpc_sync("nobody", torch.ones, (2,))
        with pytest.raises(UsageError, match="could not find destination 99"):
            rpc.rpc_sync(99, torch.ones, (2,))
        rpc.shutdown()
        assert join("ps").id >= 1024  # of ids that were used, none is used again
        rpc.shutdown()
        return
    join("ps")
    marker_file("joined").touch()
    wait_for_file("refused")
    check_call("other")
    rpc.shutdown()
    marker_file("left").touch()


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_names_and_a_worker_that_leaves(ranks: RankServer, hosts: str) -> None:
    ranks.run(2, refuse_names, timeout=None, hosts=hosts)


def mix() -> None:
    rank = own_rank()
    if rank == 0:
        join()
        marker_file("joined").touch()
        wait_for_file("refused")
        rpc.shutdown()
        marker_file("left").touch()
        rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options())
        marker_file("fixed").touch()
        wait_for_file("refused again")
        rpc.shutdown()
        return
    wait_for_file("joined")
    with pytest.raises(UsageError, match="mixes statically and dynamically initialized members"):
        rpc.init_rpc("worker1", rank=0, world_size=1, rpc_backend_options=options())
    marker_file("refused").touch()
    wait_for_file("left")
    wait_for_file("fixed")
    with pytest.raises(UsageError, match="mixes statically and dynamically initialized members"):
        join()
    marker_file("refused again").touch()


def test_groups_with_and_without_a_fixed_size_are_not_mixed(ranks: RankServer) -> None:
    ranks.run(2, mix, timeout=None)


def sleep_until(name: str) -> str:
    wait_for_file(name)
    return name


def leave_with_calls() -> None:
    rank = own_rank()
    join()
    marker_file(f"joined{rank}").touch()
    wait_for_file(f"joined{1 - rank}")
    if rank == 0:
        future = rpc.rpc_async("worker1", sleep_until, ("calling",))
        marker_file("called").touch()
        rpc.shutdown()  # waits for the answer
        assert future.wait() == "calling"
        marker_file("end").touch()
        return
    wait_for_file("called")
    marker_file("calling").touch()
    wait_for_file("end")
    rpc.shutdown()


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_shutdown_waits_for_calls(ranks: RankServer, hosts: str) -> None:
    ranks.run(2, leave_with_calls, timeout=None, hosts=hosts)


def work(seed: int, rounds: int) -> int:
    """Join and leave again and again, and call whoever is there; some processes end in between."""
    rank, chosen = own_rank(), random.Random(f"{seed} {os.environ['RANK']}")
    calls, unreachable = 0, set[str]()
    for number in range(rounds):
        join(f"worker{rank}.{number}")
        for _ in range(chosen.randrange(20)):
            to = chosen.choice(rpc.get_worker_infos())
            if to.name in unreachable:  # each further call would wait for the timeout too
                continue
            try:
                check_call(to.id)
                calls += 1
            except PeerLost:
                continue
            except CallTimeout:  # it died on another host before it was connected: see docs/rpc.md
                assert not agent().peers[to.id].is_local
                unreachable.add(to.name)
        if rank >= 4 and chosen.random() < 0.5:
            os.kill(os.getpid(), signal.SIGKILL)
        rpc.shutdown(graceful=chosen.random() < 0.5)
    return calls


@pytest.mark.parametrize("hosts", ["aaaaaa", "ababab"])
def test_churn(ranks: RankServer, hosts: str) -> None:
    ended = ranks.start(6, work, random.randrange(2**30), 4, timeout=None, hosts=hosts).join()
    for each in ended[:4]:
        assert each.code == 0, each.report()
    for each in ended[4:]:
        assert each.code in (0, -signal.SIGKILL), each.report()
    assert sum(each.value for each in ended[:4]) > 0


def other_key() -> str:
    if own_rank() == 0:
        join()
        marker_file("joined").touch()
        wait_for_file("refused")
        rpc.shutdown()
        return ""
    wait_for_file("joined")
    key_file = marker_file("key")
    key_file.write_text("0" * 64)
    key_file.chmod(0o600)
    os.environ["PHALANX_KEY_FILE"] = str(key_file)
    with pytest.raises(UsageError) as error:
        join()
    marker_file("refused").touch()
    return str(error.value)


def test_a_worker_with_another_key(ranks: RankServer) -> None:
    assert "the same PHALANX_KEY_FILE for all" in ranks.run(2, other_key, timeout=None)[1]


def meet_a_stopped_worker() -> None:
    if own_rank() == 0:
        join()
        marker_file("pid").write_text(str(os.getpid()))
        marker_file("joined").touch()
        wait_for_file("refused")
        rpc.shutdown(graceful=False)
        return
    wait_for_file("joined")
    pid = int(marker_file("pid").read_text())
    with stopped(pid), pytest.raises(PhalanxError, match="cannot be reached"):
        rpc.init_rpc("late", world_size=0, rpc_backend_options=options(), timeout=1.0)
    marker_file("refused").touch()


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_stopped_worker(ranks: RankServer, hosts: str) -> None:
    """A worker that joins waits for it no longer than its own timeout."""
    ranks.run(2, meet_a_stopped_worker, timeout=None, hosts=hosts)
