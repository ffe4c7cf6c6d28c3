"""The record that a rank publishes of itself, and the proof that two ranks share a host.

The published machine and pid only decide if an attempt is worthwhile: host names, boot ids and
namespaces can mislead in containers. The proof is that one rank opens a piece of the other's memory
and finds the nonce that the other has published.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import socket
import struct
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

import torch

from phalanx import _native, env_hosts
from phalanx.system.host_identity import boot_id, namespace_id

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["MemoryProbe", "RankRecord"]

_NONCE = struct.Struct("<QQ")


class RankRecord(NamedTuple):
    """The record that a rank publishes of itself."""

    world_size: int
    """The world size given to the rank."""
    pid: int
    host: str
    """The host's name, for messages."""
    machine: str
    """An identifier of the machine; only ranks with the same one can share memory."""
    network: str
    """An identifier of the network namespace, inside which the loopback interface connects."""
    descriptor: int
    """The file descriptor of the rank's probe."""
    nonce: int
    layout_version: int
    """The version of the segment's layout."""
    phalanx_version: str
    torch_version: str
    transport: str
    """The transport between hosts that the rank was given."""

    @classmethod
    def for_current_process(cls, size: int, transport: str, probe: MemoryProbe) -> RankRecord:
        """Return the record of this process, which holds `probe`."""
        return cls(
            size,
            os.getpid(),
            socket.gethostname(),
            _machine_id(),
            f"{boot_id()} {namespace_id('net')}",
            probe.descriptor,
            probe.nonce,
            _native.LAYOUT_VERSION,
            _phalanx_version(),
            torch.__version__,
            transport,
        )

    @classmethod
    def parse(cls, text: str) -> RankRecord:
        """Parse the JSON that `text` returned."""
        return cls(**json.loads(text))

    @property
    def text(self) -> str:
        """The record as JSON."""
        return json.dumps(self._asdict())

    @property
    def process(self) -> str:
        """The process, as in "pid 812 on node-a"."""
        return f"pid {self.pid} on {self.host}"

    def probe_is_accessible(self) -> bool:
        """Return whether this process can open the rank's probe and finds its nonce and pid."""
        try:
            descriptor = os.open(f"/proc/{self.pid}/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            content = os.pread(descriptor, _NONCE.size, 0)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return content == _NONCE.pack(self.nonce, self.pid)


class MemoryProbe:
    """A context manager for a piece of memory that only processes of the same host can open."""

    def __init__(self) -> None:
        self.nonce = secrets.randbits(64)
        self.descriptor = os.memfd_create("phalanx-probe", os.MFD_CLOEXEC)
        os.fchmod(self.descriptor, 0o600)
        os.write(self.descriptor, _NONCE.pack(self.nonce, os.getpid()))

    def __enter__(self) -> MemoryProbe:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self.descriptor)


@functools.cache
def _phalanx_version() -> str:
    return metadata.version("phalanx")


def _machine_id() -> str:
    return f"{boot_id()} {namespace_id('pid')} {env_hosts.host_id()}"
