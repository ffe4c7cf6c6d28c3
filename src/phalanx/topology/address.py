"""At which address of this machine the hosts of a group reach it."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from phalanx import env_hosts
from phalanx.address import address_towards, interface_address
from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store  # type: ignore[attr-defined]

    from phalanx.topology.place import Place

__all__ = ["address_towards", "interface_address", "own_address"]


def own_address(store: Store, places: Sequence[Place]) -> str:
    """The address to listen on, for other hosts.

    That of the interface that `PHALANX_INTERFACE` names; else the one from which this machine
    reaches the host of the store, which is where the other hosts are; where that can't be told (a
    store in a file), the loopback interface's.

    Args:
        store: The group's.
        places: Where all ranks are.

    Raises:
        UsageError: The variable names no interface or address of this machine; or the address would
            be that of the loopback interface, where ranks are on other machines.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    way = env_hosts.gate() or (store.host if isinstance(store, TCPStore) else "")
    address = address_towards(way) or "127.0.0.1"
    if ipaddress.ip_address(address).is_loopback and len({place.network for place in places}) > 1:
        raise UsageError(
            f"ranks on other machines can't reach this one at {address}, which is where its way to "
            f"the rendezvous at {way or 'a file'} begins: give the rendezvous an address that all "
            "machines reach, or set PHALANX_INTERFACE"
        )
    return address
