"""The handshake that authenticates connections, without any connection."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.system.authentication import AuthenticationError, Handshake, ProtocolMismatch, WrongKey

PROTOCOL = b"test 1\n"


def sides(
    key: bytes, other: bytes | None = None, protocol: bytes = PROTOCOL
) -> tuple[Handshake, Handshake]:
    other = key if other is None else other
    return (
        Handshake(key, PROTOCOL, is_initiator=True),
        Handshake(other, protocol, is_initiator=False),
    )


def exchange(initiator: Handshake, acceptor: Handshake, part: int = 1 << 20) -> list[bytes]:
    """Pass all messages, at most `part` bytes at a time; returns them."""
    messages = [initiator.begin()]
    receiver, sender = acceptor, initiator
    while messages[-1]:
        data, answer = messages[-1], b""
        while data and receiver.missing:
            size = min(part, receiver.missing)
            answer += receiver.receive(data[:size])
            data = data[size:]
        assert not data
        messages.append(answer)
        receiver, sender = sender, receiver
    return messages


@given(key=st.binary(min_size=1, max_size=64), part=st.integers(1, 200))
def test_equal_keys(key: bytes, part: int) -> None:
    initiator, acceptor = sides(key)
    exchange(initiator, acceptor, part)
    assert initiator.missing == acceptor.missing == 0


def test_the_key_is_never_sent() -> None:
    key = os.urandom(32)
    messages = exchange(*sides(key))
    assert all(key not in message for message in messages)
    assert exchange(*sides(key)) != messages


def test_different_keys() -> None:
    with pytest.raises(WrongKey):
        exchange(*sides(b"a" * 32, b"b" * 32))


def test_another_protocol_is_rejected_at_the_first_different_byte() -> None:
    _, acceptor = sides(b"key")
    assert acceptor.receive(b"test ") == b""
    with pytest.raises(ProtocolMismatch):
        acceptor.receive(b"2")
    with pytest.raises(ProtocolMismatch):
        exchange(*sides(b"key", protocol=b"other\n"))


@given(position=st.integers(0, 1 << 16), bit=st.integers(0, 7), message=st.integers(0, 2))
def test_any_changed_bit_is_detected(position: int, bit: int, message: int) -> None:
    initiator, acceptor = sides(b"key")

    def change(data: bytes, number: int) -> bytes:
        if number != message:
            return data
        changed = bytearray(data)
        changed[position % len(data)] ^= 1 << bit
        return bytes(changed)

    def go_through() -> None:
        answer = acceptor.receive(change(initiator.begin(), 0))
        proof = initiator.receive(change(answer, 1))
        acceptor.receive(change(proof, 2))

    with pytest.raises(AuthenticationError):
        go_through()


def test_a_proof_cannot_be_reflected_or_replayed() -> None:
    key = os.urandom(32)
    initiator, acceptor = sides(key)
    first, second, third, _ = exchange(initiator, acceptor)
    fresh = Handshake(key, PROTOCOL, is_initiator=False)
    answer = fresh.receive(first)
    with pytest.raises(WrongKey):  # the proof of an earlier connection
        fresh.receive(third)
    fresh = Handshake(key, PROTOCOL, is_initiator=False)
    answer = fresh.receive(first)
    with pytest.raises(WrongKey):  # the acceptor's own proof
        fresh.receive(answer[-len(third) :])
    with pytest.raises(WrongKey):
        Handshake(key, PROTOCOL, is_initiator=True).receive(second)


def test_an_initiator_can_refuse() -> None:
    """The acceptor then notices the different key as well."""
    initiator, acceptor = sides(b"a" * 32, b"b" * 32)
    answer = acceptor.receive(initiator.begin())
    with pytest.raises(WrongKey):
        initiator.receive(answer)
    with pytest.raises(WrongKey):
        acceptor.receive(initiator.refuse())
