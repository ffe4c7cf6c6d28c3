"""The ranks of a group by host, and the record that each rank publishes of itself.

The published machine and pid only decide if an attempt is worthwhile. The proof that two ranks
share a host is that each opens the other's memory probe. Ranks of other hosts reach this rank at
`own_address`.
"""

from __future__ import annotations

import functools
import json
import os
import socket
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from phalanx import _native, env
from phalanx.address import is_loopback, local_address, rendezvous_host
from phalanx.errors import UsageError
from phalanx.system.host_identity import MemoryProbe, host_identity
from phalanx.topology.places import own_place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set

    from torch.distributed import Store  # type: ignore[attr-defined]


AUTO = "auto"
"""The encoding that a group chooses by the bandwidth of its links."""


class HostLink(NamedTuple):
    """The way in which the hosts of a group exchange data.

    Attributes:
        transport: The name of the transport.
        compress: The encoding of large float32 reductions; empty if there is none.
        connections: The number of connections between two ranks.
    """

    transport: str = ""
    compress: str = ""
    connections: int = 1

    def __str__(self) -> str:
        return (
            f"the transport {self.transport!r}"
            + (f" with compress={self.compress!r}" if self.compress else "")
            + (f" with connections={self.connections}" if self.connections > 1 else "")
        )


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
    link: Sequence[Any]
    """The fields of the `HostLink` that the rank was given."""
    place: Sequence[int] = ()
    """The rank's place in its machine (`places.own_place`)."""

    @classmethod
    def for_current_process(cls, size: int, link: HostLink, probe: MemoryProbe) -> RankRecord:
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
            list(link),  # as JSON gives it back
            list(own_place()),
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
    destination = rendezvous_host(store)
    address = local_address(destination) or "127.0.0.1"
    if is_loopback(address) and len({r.network for r in records}) > 1:
        raise UsageError(
            f"ranks on other machines cannot reach this machine at {address}, the local address of "
            f"its route to the rendezvous at {destination or 'a file'}: give the rendezvous an "
            "address that all machines can reach, or set PHALANX_INTERFACE"
        )
    return address


@dataclass(frozen=True)
class Layout:
    """The ranks of a group by host, as one of them sees it.

    Attributes:
        rank: This rank, in the group.
        hosts: The ranks of each host in ascending order; the hosts in order of their lowest rank.
    """

    rank: int
    hosts: tuple[tuple[int, ...], ...]

    @cached_property
    def host(self) -> int:
        """The index of this rank's host."""
        return self.host_of(self.rank)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's host, by local rank."""
        return self.hosts[self.host]

    @cached_property
    def local_rank(self) -> int:
        """The index of this rank among those of its host."""
        return self.ranks.index(self.rank)

    @property
    def size(self) -> int:
        """World size of the group."""
        return sum(map(len, self.hosts))

    @cached_property
    def is_even(self) -> bool:
        """True if all hosts have equally many ranks, so that each local rank has a rail."""
        return len({len(ranks) for ranks in self.hosts}) == 1

    @property
    def rail(self) -> tuple[int, ...]:
        """The ranks with this local rank on all hosts, by host; valid only if hosts are even."""
        return tuple(ranks[self.local_rank] for ranks in self.hosts)

    @property
    def leaders(self) -> tuple[int, ...]:
        """The lowest rank of each host."""
        return tuple(ranks[0] for ranks in self.hosts)

    def host_of(self, rank: int) -> int:
        """Return the index of a rank's host."""
        return next(number for number, ranks in enumerate(self.hosts) if rank in ranks)


def group_by_host(rank: int, opened: Mapping[int, Set[int]]) -> Layout:
    """Return the layout of a group, given the ranks whose memory each rank can open.

    Two ranks share a host if each can open the other's memory. A rank belongs to the first host
    whose lowest rank shares a host with it. All ranks derive the same layout.

    Args:
        rank: The rank whose view the layout is.
        opened: By rank, the ranks whose memory it can open.
    """
    hosts: list[list[int]] = []
    for member in sorted(opened):
        host = next((ranks for ranks in hosts if _is_mutual(member, ranks[0], opened)), None)
        if host is None:
            hosts.append([member])
        else:
            host.append(member)
    return Layout(rank, tuple(map(tuple, hosts)))


def _is_mutual(one: int, other: int, opened: Mapping[int, Set[int]]) -> bool:
    return one in opened[other] and other in opened[one]


def format_rank_ranges(numbers: Sequence[int]) -> str:
    """Format ranks in the given order, with consecutive ranks as ranges: "0-3,6"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
