"""At which address of this machine other hosts reach it."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

import psutil
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from phalanx import env_hosts
from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store  # type: ignore[attr-defined]

    from phalanx.topology.place import Place

__all__ = ["address_towards", "interface_address", "own_address"]

_DISCARD = 9


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


def address_towards(host: str) -> str:
    """The address of this machine that faces a host; empty if there is no way to it.

    Args:
        host: A name or an address; empty for none.

    Raises:
        UsageError: `PHALANX_INTERFACE`, which decides if it is set, names nothing of this machine.
    """
    given = env_hosts.interface()
    if given:
        return interface_address(given)
    return _towards(host) if host else ""


def interface_address(given: str) -> str:
    """The address that `PHALANX_INTERFACE` means.

    Raises:
        UsageError: This machine has no such interface or address.
    """
    interfaces = psutil.net_if_addrs()
    kinds = (socket.AF_INET, socket.AF_INET6)
    addresses = {
        name: [each.address.partition("%")[0] for each in found if each.family in kinds]
        for name, found in interfaces.items()
    }
    if addresses.get(given):
        return addresses[given][0]
    if any(given in found for found in addresses.values()):
        return given
    known = ", ".join(f"{name} ({', '.join(found)})" for name, found in addresses.items() if found)
    raise UsageError(
        f"PHALANX_INTERFACE={given!r} in the environment: this machine has no such interface or "
        f"address; it has {known}"
    )


def _towards(host: str) -> str:
    """The address that packets to a host come from; empty if there is no way to it."""
    try:
        found = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM)
        kind, _, _, _, where = min(found, key=lambda each: _is_near(str(each[4][0])))
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing
            address: str = probe.getsockname()[0]
            return address
    except (OSError, UnicodeError):  # the latter for a name like "a..b"
        return ""


def _is_near(address: str) -> bool:
    """Whether an address leads to this machine or the next cable only."""
    known = ipaddress.ip_address(address.partition("%")[0])
    return known.is_loopback or known.is_link_local
