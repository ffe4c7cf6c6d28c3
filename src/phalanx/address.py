"""The address at which other hosts reach this machine."""

from __future__ import annotations

import ipaddress
import socket

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from phalanx import env
from phalanx.errors import UsageError

_DISCARD = 9


def local_address(host: str) -> str:
    """Return the local address from which this machine reaches a host; empty if it cannot.

    `PHALANX_INTERFACE` takes precedence if it is set.

    Args:
        host: A name or an address; empty for none.

    Raises:
        UsageError: `PHALANX_INTERFACE` names no interface or address of this machine.
    """
    configured = env.interface()
    if configured:
        return interface_address(configured)
    return _source_address(host) if host else ""


def interface_address(value: str) -> str:
    """Return the address for a value of `PHALANX_INTERFACE`, an interface's name or an address.

    Raises:
        UsageError: This machine has no such interface or address.
    """
    import psutil  # forming a group imports this module and rarely needs psutil

    interfaces = psutil.net_if_addrs()
    kinds = (socket.AF_INET, socket.AF_INET6)
    addresses = {
        name: [each.address.partition("%")[0] for each in entries if each.family in kinds]
        for name, entries in interfaces.items()
    }
    if addresses.get(value):
        return addresses[value][0]
    if any(value in entries for entries in addresses.values()):
        return value
    available = ", ".join(
        f"{name} ({', '.join(entries)})" for name, entries in addresses.items() if entries
    )
    raise UsageError(
        f"PHALANX_INTERFACE={value!r} in the environment: this machine has no such interface or "
        f"address; it has {available}"
    )


def rendezvous_host(store: Store) -> str:
    """Return `PHALANX_TUNNEL_HOST`, or else the host of a store; empty if it is in a file."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return env.tunnel_host() or (store.host if isinstance(store, TCPStore) else "")


def resolve(name: str) -> list[str]:
    """Return the addresses of a host, those of the loopback interface last; none if unknown."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return sorted((str(each[4][0]) for each in found), key=is_loopback)


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def url_host(host: str) -> str:
    """Return a host name or an address as it is written before a port."""
    return f"[{host}]" if ":" in host else host


def _source_address(host: str) -> str:
    """Return the source address of packets to a host; empty if there is no route to it."""
    try:
        candidates = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM)
        kind, _, _, _, endpoint = min(candidates, key=lambda each: _is_local(str(each[4][0])))
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(endpoint)  # sends nothing
            address: str = probe.getsockname()[0]
            return address
    except (OSError, UnicodeError):  # the latter for a name like "a..b"
        return ""


def _is_local(address: str) -> bool:
    """Return whether an address is a loopback or link-local one."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return parsed.is_loopback or parsed.is_link_local
