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

    from phalanx.topology.rank_record import Place

__all__ = ["interface_address", "local_address", "own_address"]


def own_address(store: Store, places: Sequence[Place]) -> str:
    """Return the address on which to listen for other hosts.

    `PHALANX_INTERFACE` takes precedence. Otherwise, this is the address from which this machine
    reaches the host of `PHALANX_TUNNEL_HOST`, or else of the store. If neither is known (a store
    in a file) or reachable, it is the address of the loopback interface.

    Args:
        store: The group's store.
        places: The places of all ranks.

    Raises:
        UsageError: The variable names no interface or address of this machine. Or the address is a
            loopback address, but some ranks are on other machines.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    way = env_hosts.tunnel_host() or (store.host if isinstance(store, TCPStore) else "")
    address = local_address(way) or "127.0.0.1"
    if ipaddress.ip_address(address).is_loopback and len({place.network for place in places}) > 1:
        raise UsageError(
            f"ranks on other machines can't reach this one at {address}, which is where its way to "
            f"the rendezvous at {way or 'a file'} begins: give the rendezvous an address that all "
            "machines reach, or set PHALANX_INTERFACE"
        )
    return address
