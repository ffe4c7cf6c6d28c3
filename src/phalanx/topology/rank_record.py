"""The record that a rank publishes of itself, and the proof that two ranks share a host.

The published machine and pid only decide if an attempt is worthwhile. The proof is that one rank
opens the other's memory probe. Ranks of other hosts reach this rank at `own_address`.
"""

from __future__ import annotations

import functools
import json
import os
import socket
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from phalanx import _native, env
from phalanx.address import is_loopback, local_address
from phalanx.errors import UsageError
from phalanx.system.host_identity import MemoryProbe, host_identity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store  # type: ignore[attr-defined]


__all__ = ["RankRecord", "own_address"]


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
            f"{host_identity('pid')} {env.host_id()}",
            host_identity("net"),
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
        return MemoryProbe.is_accessible(self.pid, self.descriptor, self.nonce)


@functools.cache
def _phalanx_version() -> str:
    return metadata.version("phalanx")


def own_address(store: Store, records: Sequence[RankRecord]) -> str:
    """Return the address on which to listen for other hosts.

    `PHALANX_INTERFACE` takes precedence. Otherwise, this is the address from which this machine
    reaches the host of `PHALANX_TUNNEL_HOST`, or else of the store. If neither is known (a store
    in a file) or reachable, it is the address of the loopback interface.

    Args:
        store: The group's store.
        records: The records of all ranks.

    Raises:
        UsageError: `PHALANX_INTERFACE` names no interface or address of this machine, or the
            address is a loopback address although some ranks are on other machines.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    destination = env.tunnel_host() or (store.host if isinstance(store, TCPStore) else "")
    address = local_address(destination) or "127.0.0.1"
    if is_loopback(address) and len({r.network for r in records}) > 1:
        raise UsageError(
            f"ranks on other machines cannot reach this machine at {address}, the local address of "
            f"its route to the rendezvous at {destination or 'a file'}: give the rendezvous an "
            "address that all machines can reach, or set PHALANX_INTERFACE"
        )
    return address
