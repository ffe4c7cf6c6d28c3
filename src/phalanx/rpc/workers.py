"""Rendezvous of the workers, through the store of the process group or one of their own.

A worker listens at a socket of its host, and, if others are on another host, at a port of the
interface that faces the store. Nothing else listens: there is no second rendezvous.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import secrets
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

from phalanx import env, key
from phalanx.errors import ArgumentTypeError, PhalanxError, UsageError
from phalanx.rpc.local_connection import is_readable
from phalanx.rpc.shared_memory import ShmSender, can_map
from phalanx.system.host_identity import host_identity
from phalanx.system.polling import wait_until

_NAME = re.compile(r"[A-Za-z0-9\-_:.]+")
_NAME_LIMIT = 128
_EXIT_MILLISECONDS = 1000
_READ_SECONDS = 10.0
"""The time that workers have to read why they cannot join, before worker 0 may end, in seconds."""


def check_name(name: object) -> str:
    """Return the name of a worker if it is valid.

    Raises:
        UsageError: The name is invalid.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(f"the worker name {name!r}: expected a string")
    if not name:
        raise UsageError("the worker name must be non-empty")
    if len(name) >= _NAME_LIMIT:
        raise UsageError(
            f"the worker name {name!r} has {len(name)} characters: it must be shorter than "
            f"{_NAME_LIMIT}"
        )
    if not _NAME.fullmatch(name):
        raise UsageError(f"Worker name must match ^[A-Za-z0-9-_:.]*$, but got {name!r}")
    return name


@dataclass(frozen=True)
class WorkerInfo:
    """A worker: its name, unique among all workers, and its id, which is its rank.

    Raises:
        UsageError: The name is invalid: it has 1 to 127 characters of `A-Z a-z 0-9 - _ : .`.

    Example:
        >>> worker = rpc.get_worker_info("ps")
        >>> rpc.rpc_sync(worker, torch.add, args=(torch.ones(2), worker.id))
        tensor([1., 1.])
    """

    name: str
    id: int

    def __post_init__(self) -> None:
        check_name(self.name)

    def __str__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


@dataclass(frozen=True)
class WorkerRecord:
    """The record that a worker publishes about itself."""

    size: int
    """The number of workers that it expects."""
    name: str
    pid: int
    host: str
    """The host name, for display."""
    machine: str
    """The identity of the machine; workers with different ones cannot share memory."""
    address: str
    """The address of its socket for workers on its host."""
    fd: int
    """A descriptor of shared memory; a process that can open it is on the same host."""
    nonce: str
    """The nonce in that memory, in hexadecimal digits."""
    main: str
    """A digest of its main program, so that functions of the same program need not be sent."""

    @property
    def process(self) -> str:
        """The process, as in "pid 812 on node-a"."""
        return f"pid {self.pid} on {self.host}"

    def shares_host(self, own: WorkerRecord) -> bool:
        """Return whether this process and the worker can share memory, or could while it lived."""
        if self.machine != own.machine:
            return False
        return can_map(self.pid, self.fd, int(self.nonce, 16)) or _has_ended(self.pid)


def make_record(name: object, shm_sender: ShmSender) -> WorkerRecord:
    """Return the record of this process.

    Raises:
        UsageError: The name is invalid.
    """
    return WorkerRecord(
        0,
        check_name(name),
        os.getpid(),
        socket.gethostname(),
        f"{host_identity('pid', 'net')} {env.host_id()}",
        f"phalanx-rpc-{secrets.token_hex(16)}",
        shm_sender.probe,
        f"{shm_sender.nonce:x}",
        _main_digest(),
    )


def exchange_records(
    store: Store, rank: int, size: int, record: WorkerRecord, timeout: float
) -> list[WorkerRecord]:
    """Exchange the records of the workers; block until all workers have joined.

    If they cannot join, worker 0 raises after the others: its process may host the store, in which
    they read why, and may end at once.

    Args:
        store: The store to exchange them through.
        rank: The id of this worker.
        size: The number of workers.
        record: The record of this worker.
        timeout: Seconds to wait for the other workers.

    Raises:
        UsageError: Two workers have the same name or rank, not all expect the same number of
            workers, or a worker cannot join and has reported why.
        PhalanxError: Some workers did not join in time.
    """
    try:
        return _exchange_records(store, rank, size, record, timeout)
    except UsageError:
        store.add("told", 1)
        if rank == 0:
            wait_until(lambda: store.add("told", 0) >= size, _READ_SECONDS)
        raise


def _exchange_records(
    store: Store, rank: int, size: int, record: WorkerRecord, timeout: float
) -> list[WorkerRecord]:
    if store.add(f"here/{rank}", 1) > 1:
        error = UsageError(f"two workers have rank {rank}: ranks must be unique, starting at 0")
        publish_failure(store, rank, size, record, error)
        raise error
    store.set(f"worker/{rank}", json.dumps(dataclasses.asdict(record) | {"size": size}))
    # Only worker 0's record at first: a worker that expects too many workers then gets an error.
    (first,) = _read_records(store, 1, timeout)
    _check_size(0, first, rank, size)
    records = _read_records(store, size, timeout)
    named: dict[str, int] = {}
    for each, other in enumerate(records):
        _check_size(each, other, rank, size)
        if named.setdefault(other.name, each) != each:
            raise UsageError(
                f"the worker name {other.name!r} is not unique: workers {named[other.name]} "
                f"({records[named[other.name]].process}) and {each} ({other.process}) have it; "
                "names must be unique"
            )
    return records


def publish_failure(
    store: Store, rank: int, size: int, record: WorkerRecord, error: Exception
) -> None:
    """Tell all waiting workers, whichever they wait for, that this one cannot join, and why."""
    text = f"worker {record.name!r} (rank {rank}, {record.process}) cannot join: {error}"
    for each in range(size):
        store.set(f"worker/{each}", json.dumps({"failure": text}))


def _read_records(store: Store, count: int, timeout: float) -> list[WorkerRecord]:
    """Return the records of the first `count` workers; block until they have published them."""
    names = [f"worker/{each}" for each in range(count)]
    found = [json.loads(encoded) for encoded in wait_for_values(store, names, timeout)]
    for each in found:
        if "failure" in each:
            raise UsageError(each["failure"])
    return [WorkerRecord(**each) for each in found]


def _check_size(other: int, record: WorkerRecord, rank: int, size: int) -> None:
    if record.size != size:
        raise UsageError(
            f"worker {rank} expects {size} workers, worker {other} ({record.process}) "
            f"{record.size}: use the same world_size on all workers"
        )


def wait_for_values(store: Store, names: list[str], timeout: float) -> list[bytes]:
    """Return values that workers have put into the store; block until they have.

    Raises:
        PhalanxError: Some are missing after `timeout` seconds, or the store is gone.
    """
    try:
        store.wait(names, timedelta(seconds=timeout))
        return [store.get(name) for name in names]
    except RuntimeError:  # the type depends on the store
        try:
            missing = [name.rpartition("/")[2] for name in names if not store.check([name])]
        except RuntimeError as lost:
            raise PhalanxError(
                "the process that hosts the store of init_rpc (worker 0, unless a launcher does) "
                f"ended before all workers had joined ({lost}): its output says why"
            ) from None
        if not missing:
            raise
        raise PhalanxError(
            f"of {len(names)} workers, {', '.join(missing)} did not join init_rpc "
            f"within {timeout:g} s: were they started, with the same world size and rendezvous?"
        ) from None


def agree_on_key(store: Store, rank: int, timeout: float, by_first: bool = False) -> bytes:
    """Return the key of the job; if it has none, a worker makes one and the store carries it.

    Args:
        store: The store of the workers.
        rank: The id of this worker.
        timeout: Seconds to wait for the key.
        by_first: Whether the first worker to arrive makes the key, and not worker 0.

    Raises:
        UsageError: Some workers have the job's key, others have none or another one.
    """
    own = key.from_environment()
    if by_first or rank == 0:
        made = secrets.token_bytes(key.SIZE)
        text = f"inherited {_key_digest(own)}" if own else f"made {made.hex()}"
        store.compare_set("key/0", "", text)
    (encoded,) = wait_for_values(store, ["key/0"], timeout)
    origin, _, value = encoded.decode().partition(" ")
    if origin == "made" and own is None:
        return bytes.fromhex(value)
    if origin == "inherited" and own is not None and value == _key_digest(own):
        return own
    given = "has none" if own is None else "has another" if origin == "inherited" else "has one"
    raise UsageError(
        f"{'the first worker' if by_first else 'worker 0'} "
        f"{'has' if origin == 'inherited' else 'has no'} key of the job, worker {rank} {given}: "
        "start all with `phalanx run`, or set the same PHALANX_KEY_FILE for all"
    )


def _key_digest(own: bytes) -> str:
    return key.derive(own, "rpc same key").hex()


def _has_ended(pid: int) -> bool:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        # The files of a process are closed a moment before it has ended.
        return is_readable(process, _EXIT_MILLISECONDS)
    finally:
        os.close(process)


def _main_digest() -> str:
    """Return a digest of the text of the main program; empty if that is not a file."""
    main = sys.modules.get("__mp_main__") or sys.modules.get("__main__")
    try:
        with open(getattr(main, "__file__", None) or "", "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""
