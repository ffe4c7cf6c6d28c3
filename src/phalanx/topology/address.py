"""The address at which the other hosts of a group reach this machine."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from phalanx import env_hosts
from phalanx.address import interface_address, local_address
from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store  # type: ignore[attr-defined]

    from phalanx.topology.rank_record import RankRecord

__all__ = ["interface_address", "local_address", "own_address"]


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
    destination = env_hosts.tunnel_host() or (store.host if isinstance(store, TCPStore) else "")
    address = local_address(destination) or "127.0.0.1"
    if ipaddress.ip_address(address).is_loopback and len({r.network for r in records}) > 1:
        raise UsageError(
            f"ranks on other machines cannot reach this machine at {address}, the local address of "
            f"its route to the rendezvous at {destination or 'a file'}: give the rendezvous an "
            "address that all machines can reach, or set PHALANX_INTERFACE"
        )
    return address
