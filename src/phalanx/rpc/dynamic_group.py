"""Groups whose workers join and leave at any time.

The store holds the list of all members, in the order in which they joined. A worker that joins
writes its record to the first free entry, by an atomic compare-and-set. So of any two workers, the
one with the later entry has read the other's, and it is the one to introduce itself: it sends a
message to all members before it, which then read the new entries. No worker waits for a later one.

An entry stays when its worker has left or died; the store then says why (`gone`). Ids are never
used again, because references to values name their owner by its id.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import threading
import time
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

from phalanx.errors import CallTimeout, PeerLost, PhalanxError, UsageError
from phalanx.rpc.agent import Agent
from phalanx.rpc.local_connection import HANDSHAKE_TIMEOUT
from phalanx.rpc.message import MAX_WORKERS, Kind
from phalanx.rpc.peer import Peer
from phalanx.rpc.workers import WorkerInfo, WorkerRecord
from phalanx.system.polling import wait_until

_log = logging.getLogger("phalanx.rpc")
_FIRST_NEW_ID = 1024
"""The id of the first worker whose rank another one had before."""
_NAME_SECONDS = 5.0
"""Seconds that the loss of a worker may take to become known, before its name is given again."""
_HELLO_SECONDS = 2.0
"""Seconds to wait for another worker before the store is asked whether it is gone."""


class DynamicGroup:
    """The members of a group, seen from one of them.

    Args:
        store: The store of the members.
        record: The record of this worker.
        rank: The rank of this worker, which becomes its id unless another one had it before.

    Attributes:
        id: The id of this worker.
    """

    def __init__(self, store: Store, record: WorkerRecord, rank: int) -> None:
        # A clone, since a wait of another thread would block the threads of RPC.
        self._store: Any = store.clone()  # type: ignore[attr-defined] # missing in the stub
        self._record = record
        self._lock = threading.Lock()
        """Guards the number of entries that have been read."""
        self._read = 0
        self._own: Agent | None = None
        self._entries: dict[int, int] = {}
        """The number of each worker's entry, by the worker's id."""
        self.id = self._claim_id(rank)

    def _claim_id(self, rank: int) -> int:
        number = rank
        while self._store.compare_set(f"id/{number}", "", self._record.nonce).decode() != (
            self._record.nonce
        ):
            number = _FIRST_NEW_ID + self._store.add("new_ids", 1)
        if number >= MAX_WORKERS:
            raise UsageError(
                f"the worker's id would be {number}: expected a rank below {_FIRST_NEW_ID}, and "
                f"at most {MAX_WORKERS - _FIRST_NEW_ID} workers that replace others"
            )
        return number

    def enter(self, own: Agent, remote_address: str) -> list[Peer]:
        """Add this worker to the list; return the workers before it, and this one.

        Args:
            own: The agent of this worker, which others may call from now on.
            remote_address: The address at which workers on other hosts reach it.

        Raises:
            UsageError: A worker that has not left has this worker's name.
        """
        self._own = own
        entry = {"id": self.id, "remote": remote_address, **dataclasses.asdict(self._record)}
        text = json.dumps(entry)
        members: dict[str, int] = {}
        peers: list[Peer] = []
        while True:
            if (other := members.get(self._record.name)) is not None:
                self._check_is_gone(other, peers[other])
            found = self._store.compare_set(f"member/{self._read}", "", text).decode()
            peers.append(self._make_peer(self._read, found))
            self._read += 1
            if found == text:
                return peers
            members[peers[-1].info.name] = len(peers) - 1

    def _check_is_gone(self, number: int, peer: Peer) -> None:
        def is_gone() -> bool:
            return peer.has_died or bool(self._gone(number))

        if not peer.loss_reason and not wait_until(is_gone, _NAME_SECONDS):
            raise UsageError(
                f"the worker name {peer.info.name!r} is not unique: {peer} has it, and has not "
                "left; names must be unique"
            )

    def learn(self) -> None:
        """Add the workers that have joined since the last look into the store."""
        own = self._own
        with self._lock:
            while own is not None and self._store.check([key := f"member/{self._read}"]):
                peer = self._make_peer(self._read, self._store.get(key).decode())
                self._read += 1
                own.add_peer(peer)

    def _make_peer(self, number: int, text: str) -> Peer:
        entry: dict[str, Any] = json.loads(text)
        worker, remote_address = entry.pop("id"), entry.pop("remote")
        record = WorkerRecord(**entry)
        self._entries[worker] = number
        reason = self._gone(number) if worker != self.id else ""
        is_local = not reason and (worker == self.id or record.shares_host(self._record))
        same_main = record.main == self._record.main != ""
        address = record.address if is_local else remote_address
        peer = Peer(WorkerInfo(record.name, worker), record, is_local, same_main, address)
        peer.loss_reason = reason
        return peer

    def _gone(self, number: int) -> str:
        """Return why a member is no longer there; empty if it is."""
        key = f"gone/{number}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def greet(self, timeout: float) -> None:
        """Introduce this worker to all that joined before; block until they have answered.

        Raises:
            PhalanxError: A worker that has not left cannot be reached.
        """
        end = time.monotonic() + timeout
        own = self._require_agent()
        own.handshake_timeout = math.inf  # those before this worker may not have started yet
        try:
            for peer in own.peers:
                if not peer.loss_reason and self._entries[peer.id] < self._entries[self.id]:
                    self._greet(peer, end)
        finally:
            own.handshake_timeout = HANDSHAKE_TIMEOUT

    def _greet(self, peer: Peer, end: float) -> None:
        own = self._require_agent()
        while True:
            seconds = max(end - time.monotonic(), 0.001)
            if not peer.is_local:  # the end of a worker on this host is noticed
                seconds = min(_HELLO_SECONDS, seconds)
            try:
                own.begin(peer, Kind.HELLO, None, "hello", seconds).wait()
                return
            except PeerLost:
                return
            except PhalanxError as error:
                if reason := self._gone(self._entries[peer.id]):
                    own.mark_lost(peer, reason)
                    return
                if not isinstance(error, CallTimeout) or time.monotonic() >= end:
                    hint = (
                        "is it stopped?"
                        if peer.is_local
                        else "set PHALANX_INTERFACE to the interface that connects the hosts"
                    )
                    raise PhalanxError(
                        f"{peer} cannot be reached at {peer.address} ({error}): {hint}"
                    ) from None

    def on_loss(self, worker: int, reason: str) -> None:
        """Publish that a worker is lost, for those that join later; a loss listener."""
        own = self._require_agent()
        if not own.is_closed:
            self._publish_end(worker, reason)

    def leave(self) -> None:
        """Publish that this worker has left."""
        if self._own is not None:
            self._publish_end(self.id, f"worker {self._record.name!r} (id {self.id}) has left RPC")

    def _publish_end(self, worker: int, reason: str) -> None:
        try:
            if (number := self._entries.get(worker)) is not None:
                self._store.set(f"gone/{number}", reason)
        except RuntimeError as error:  # the type depends on the store
            _log.warning(
                "workers that join from now on may not learn that worker %d is lost, since the "
                "store cannot be reached: %s",
                worker,
                error,
            )

    def _require_agent(self) -> Agent:
        if self._own is None:
            raise RuntimeError("the worker has not entered the group yet")
        return self._own


def has_members(store: Store) -> bool:
    """Return whether workers have joined a group in this store that have neither left nor died."""
    number = 0
    while store.check([f"member/{number}"]):
        if not store.check([f"gone/{number}"]):
            return True
        number += 1
    return False


def wait_until_idle(own: Agent, timeout: float) -> None:
    """Wait until no call of this worker is pending and it executes none.

    Args:
        own: The agent of this worker.
        timeout: Seconds to wait; 0 means no limit.

    Raises:
        CallTimeout: Calls are still in progress after that time.
    """
    if not wait_until(lambda: not own.outstanding, timeout or math.inf):
        raise CallTimeout(
            f"{own.outstanding} calls were still in progress after {timeout:g} s",
            operation="shutdown",
            seconds=timeout,
        )
