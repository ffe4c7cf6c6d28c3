"""Checks of the network interfaces and of the address at which other hosts reach this one."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from phalanx import env_hosts
from phalanx.doctor.finding import Finding, Says
from phalanx.errors import UsageError
from phalanx.topology import local_address

__all__ = ["check", "listening_address"]

_says = Says("network")
_ELSEWHERE = "198.51.100.1"
"""An address that no host has, used to look up the kernel's route. Nothing is sent to it."""


def check() -> list[Finding]:
    """Check each interface with a link or an address, the chosen address, and the host name."""
    return [*_interfaces(), _chosen(), _name()]


def listening_address(towards: str = "") -> str:
    """Return the address at which this machine listens for other hosts; empty if there is none.

    Args:
        towards: Host that must be reachable; if empty, any host outside of this machine.

    Raises:
        UsageError: `PHALANX_INTERFACE` names no interface or address of this machine.
    """
    return local_address(towards or _ELSEWHERE)


def _interfaces() -> list[Finding]:
    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    found = []
    for name, state in states.items():
        kinds = (socket.AF_INET, socket.AF_INET6)
        own = [each.address for each in addresses.get(name, ()) if each.family in kinds]
        if "loopback" in state.flags or not (own or state.isup):
            continue
        # The kernel reports 0 if the speed is unknown, for example for a virtual interface.
        speed = f", {state.speed} Mbit/s" if state.speed else ""
        words = f"{name}: {', '.join(own) or 'no address'}, MTU {state.mtu}{speed}"
        values = {
            "interface": name,
            "addresses": own,
            "up": state.isup,
            "mtu": state.mtu,
            "mbit_per_second": state.speed or None,
        }
        if state.isup:
            found.append(_says.ok("interface", words, **values))
        else:
            advice = (
                f"If ranks of other hosts are behind it: `ip link set {name} up`, and its cable."
            )
            found.append(_says.note("interface", f"{words}, no link", advice, **values))
    return found


def _chosen() -> Finding:
    way = os.environ.get("MASTER_ADDR", "")
    try:
        address = listening_address(way)
    except UsageError as error:
        words, _, advice = str(error).partition(": ")
        return _says.problem("address", words, f"{advice[:1].upper()}{advice[1:]}.")
    if not address:
        return _says.note(
            "address",
            f"there is no way to {way or 'other hosts'}",
            "Ranks of one machine need none. For several, give this one an address and a route "
            "(`ip address`, `ip route`).",
            address=None,
        )
    because = "PHALANX_INTERFACE" if env_hosts.interface() else f"the way to {way or 'other hosts'}"
    words = f"other hosts would be listened for at {address} ({because})"
    if ipaddress.ip_address(address).is_loopback and way:
        words = f"ranks of this machine only: the rendezvous, {way}, is at {address}"
    return _says.ok("address", words, address=address)


def _name() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return _says.note(
            "host_name",
            f"this machine's name, {name}, leads to no address",
            "Where it is host 0 of a job, give --master-addr as an address.",
            name=name,
            address=None,
        )
    words = f"this machine's name, {name}, leads to {address}"
    if ipaddress.ip_address(address).is_loopback:
        return _says.note(
            "host_name",
            words,
            "Nothing to do for one machine. Where it is host 0 of several, give --master-addr as "
            "an address that the others reach, not as this name.",
            name=name,
            address=address,
        )
    return _says.ok("host_name", words, name=name, address=address)
