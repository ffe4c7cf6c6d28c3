"""A worker among strangers: nothing of theirs is executed, and it serves on."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from phalanx import rpc
from phalanx.errors import PhalanxError
from phalanx.rpc import workers
from phalanx.rpc.codec.message import Kind, encode_frame
from phalanx.rpc.current_agent import agent
from phalanx.rpc.transport import auth, local
from tests.fuzz.attack import under_attack
from tests.ranks import RankServer
from tests.waiting import wait_for


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    ranks.preload("phalanx.rpc")


def echo(value: Any) -> Any:
    return value


@pytest.mark.parametrize("hosts", ["", "aba"])
def test_garbage(ranks: RankServer, hosts: str) -> None:
    """A short form of `make fuzz`."""
    seed = random.randrange(2**32)
    said, _, _ = ranks.run(3, under_attack, 1500, seed, hosts=hosts)[0]
    # Each once, of many.
    assert sum("refused a connection" in line for line in said) == 1, (seed, said)
    assert sum("dropped a malformed message" in line for line in said) == 1, (seed, said)
    assert len(said) == 2, (seed, said)


# ---- on a host ----

KEY = bytes(range(32))


class Guarded:
    """An acceptor with a thread that lets in who may come, as the worker's reactor does."""

    def __init__(self, name: str = "") -> None:
        self.address = name or f"phalanx-test-{os.urandom(16).hex()}"
        self.refused = 0
        self.acceptor = auth.Acceptor(KEY, self.address, self._refuse)
        self.admitted: list[local.LocalConnection] = []
        self._over = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _refuse(self) -> None:
        self.refused += 1

    def _serve(self) -> None:
        waiting: list[int] = []
        while not self._over:
            waiting += self.acceptor.accept()
            for descriptor in self.acceptor.find_excess():
                waiting.remove(descriptor)
                self.acceptor.reject(descriptor)
            for descriptor in list(waiting):
                if not local.is_readable(descriptor):
                    continue
                stream = self.acceptor.authenticate(descriptor)
                if stream is True:
                    continue
                waiting.remove(descriptor)
                if isinstance(stream, local.LocalConnection):
                    self.admitted.append(stream)
                else:
                    self.acceptor.reject(descriptor)
            time.sleep(0.001)

    def close(self) -> None:
        self._over = True
        self._thread.join()
        self.acceptor.close()
        for stream in self.admitted:
            stream.close()


@pytest.fixture
def guarded() -> Any:
    made = Guarded()
    yield made
    made.close()


def knock(address: str) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.settimeout(20)
    stranger.connect("\0" + address)
    return stranger


def hear(stranger: socket.socket, size: int) -> bytes:
    said = b""
    while len(said) < size and (part := stranger.recv(size - len(said))):
        said += part
    return said


def is_turned_away(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_proof_is_good_for_one_connection(guarded: Guarded) -> None:
    """Neither the listener's proof, nor that of another connection, is one who connects needs."""
    hello = auth._MAGIC + bytes(32)
    with knock(guarded.address) as first, knock(guarded.address) as second:
        first.sendall(hello)
        said = hear(first, 64)
        nonce, proof = said[:32], said[32:]
        # Its own challenge, as that of a second connection: what comes back proves nothing here.
        second.sendall(auth._MAGIC + nonce)
        reflected = hear(second, 64)[32:]
        first.sendall(reflected)
        second.sendall(proof)
        assert is_turned_away(first)
        assert is_turned_away(second)
    # What was recorded of one that was let in.
    own = auth._derive_key(KEY, guarded.address)
    with knock(guarded.address) as good, knock(guarded.address) as replay:
        good.sendall(hello)
        right = auth._make_proof(own, b"connects", hear(good, 64)[:32], bytes(32))
        good.sendall(right)
        wait_for(lambda: len(guarded.admitted) == 1)
        replay.sendall(hello)
        hear(replay, 64)
        replay.sendall(right)
        assert is_turned_away(replay)
    wait_for(lambda: (len(guarded.admitted), guarded.refused) == (1, 3))


def test_a_proof_is_good_at_one_address(guarded: Guarded) -> None:
    """One in the middle, who listens where a dead worker did, and hands on what it hears."""
    fake = f"phalanx-test-{os.urandom(16).hex()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listens:
        listens.bind("\0" + fake)
        listens.listen()

        def relay() -> None:
            caller, _ = listens.accept()
            with caller, knock(guarded.address) as real:
                real.sendall(hear(caller, 40))
                caller.sendall(hear(real, 64))
                hear(caller, 1)

        thread = threading.Thread(target=relay)
        thread.start()
        with pytest.raises(PhalanxError, match="does not know the job's key"):
            auth.connect(KEY, fake)
        thread.join(20)
    assert not guarded.admitted


def test_who_listens_is_not_trusted_either(guarded: Guarded) -> None:
    with pytest.raises(PhalanxError, match="does not know the job's key"):
        auth.connect(bytes(32), guarded.address)
    with pytest.raises(OSError, match="refused"):
        auth.connect(KEY, "phalanx-test-nobody")


def test_another_user(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whichever direction: nothing is said to one who runs as somebody else."""
    users = iter((4242, os.geteuid(), 4242))
    monkeypatch.setattr(auth, "_peer_user", lambda _: next(users))
    with pytest.raises(PhalanxError, match="another user"):
        auth.connect(KEY, guarded.address)
    # Seen from there it was this one; the next one isn't.
    wait_for(lambda: guarded.refused == 1)
    with knock(guarded.address) as stranger:
        assert is_turned_away(stranger)


def test_many_who_say_nothing(guarded: Guarded) -> None:
    """They are turned away to make room; who has the key comes in among them."""
    silent: list[socket.socket] = []
    try:
        for number in range(300):
            silent.append(knock(guarded.address))
            silent[-1].send(auth._MAGIC[:1])
            if number % 50 == 0:
                auth.connect(KEY, guarded.address).close()
        wait_for(lambda: guarded.refused >= 300 - auth._MAX_HANDSHAKES)
        assert len(guarded.acceptor._handshakes) <= auth._MAX_HANDSHAKES
    finally:
        for stranger in silent:
            stranger.close()


def test_announcements_are_not_believed() -> None:
    """What is announced isn't allocated; more than a frame ends the connection."""
    for length in (2**28 + 1, 10**12, 2**64 - 1):
        one, other = socket.socketpair()
        stream = local.LocalConnection(one)
        with other:
            other.sendall(local._LENGTH.pack(length) + b"and little more")
            assert stream.read() is None
        stream.close()
    one, other = socket.socketpair()
    stream = local.LocalConnection(one)
    with other:
        other.sendall(local._LENGTH.pack(2**28) + bytes(1000))
        assert stream.read() == []
        assert stream._buffer.__sizeof__() < 10_000
    stream.close()


def test_who_does_not_read_holds_up_one_thread() -> None:
    one, other = socket.socketpair()
    stream = local.LocalConnection(one)
    answers = [os.urandom(50_000) for _ in range(40)]
    threads = [threading.Thread(target=stream.send_answer, args=(each,)) for each in answers]
    for thread in threads:
        thread.start()
    wait_for(lambda: sum(thread.is_alive() for thread in threads) == 1)
    reader, come = local.LocalConnection(other), []
    while len(come) < len(answers):
        message = reader.receive(time.monotonic() + 20)
        assert message is not None
        come.append(message[0])
    assert sorted(come) == sorted(answers)
    for thread in threads:
        thread.join(20)
    stream.close()
    reader.close()


# ---- what is logged, and the key that workers make ----


def watched() -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("phalanx.rpc").addHandler(handler)
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker-{rank}")
    if rank == 0:
        victim = agent().peers[1]
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        canary = f"{os.environ['FOLDER']}/canary"
        bomb = encode_frame(
            Kind.CALL, 0, 0, 1, payload=pickle.dumps((Path.touch, (Path(canary),), {}, 1))
        )
        for _ in range(5):
            stranger = context.socket(zmq.DEALER)
            stranger.connect(victim.address)
            with contextlib.suppress(zmq.Again):  # turned away before it could speak
                stranger.send(bomb, zmq.NOBLOCK)
            assert rpc.rpc_sync(1, echo, (3,)) == 3
            assert torch.equal(rpc.rpc_sync(1, echo, (torch.ones(9000),)), torch.ones(9000))
            stranger.poll(100)
            stranger.close(0)
        context.destroy(0)
        assert not os.path.exists(canary)
    rpc.shutdown(timeout=30)
    return said


def test_strangers_are_logged_once(ranks: RankServer) -> None:
    said = ranks.run(2, watched, hosts="ab")
    assert [len(each) for each in said] == [0, 1]
    assert (
        "'worker-1' refused a connection from one who hasn't shown that it has the job's key"
        in said[1][0]
    )


def test_a_key_that_is_made_differs_each_time(tmp_path: Path) -> None:
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    keys = {workers.agree_on_key(HashStore(), 0, 5.0) for _ in range(5)}
    assert [len(each) for each in keys] == [32] * 5
