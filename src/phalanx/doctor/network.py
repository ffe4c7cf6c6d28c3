"""Checks of the network interfaces and of the address at which other hosts reach this one."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from phalanx import env
from phalanx.address import local_address
from phalanx.doctor.finding import Finding, FindingFactory
from phalanx.errors import UsageError

_finding = FindingFactory("network")
_UNASSIGNED_ADDRESS = "198.51.100.1"
"""An address that no host has, used to look up the kernel's route. Nothing is sent to it."""


def check() -> list[Finding]:
    """Check each interface with a link or an address, the chosen address, and the host name."""
    return [*_interfaces(), _address(), _host_name()]


def listening_address(towards: str = "") -> str:
    """Return the address at which this machine listens for other hosts; empty if there is none.

    Args:
        towards: Host that must be reachable; if empty, any host outside of this machine.

    Raises:
        UsageError: `PHALANX_INTERFACE` names no interface or address of this machine.
    """
    return local_address(towards or _UNASSIGNED_ADDRESS)


def _interfaces() -> list[Finding]:
    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    found = []
    for name, state in states.items():
        kinds = (socket.AF_INET, socket.AF_INET6)
        own_addresses = [each.address for each in addresses.get(name, ()) if each.family in kinds]
        if "loopback" in state.flags or not (own_addresses or state.isup):
            continue
        # The kernel reports 0 if the speed is unknown, for example for a virtual interface.
        speed = f", {state.speed} Mbit/s" if state.speed else ""
        message = f"{name}: {', '.join(own_addresses) or 'no address'}, MTU {state.mtu}{speed}"
        values = {
            "interface": name,
            "addresses": own_addresses,
            "up": state.isup,
            "mtu": state.mtu,
            "mbit_per_second": state.speed or None,
        }
        if state.isup:
            found.append(_finding.ok("interface", message, **values))
        else:
            advice = f"If it leads to other hosts, run `ip link set {name} up` and check its cable."
            found.append(_finding.note("interface", f"{message}, no link", advice, **values))
    return found


def _address() -> Finding:
    master = os.environ.get("MASTER_ADDR", "")
    try:
        address = listening_address(master)
    except UsageError as error:
        return _finding.problem_from("address", error)
    if not address:
        return _finding.note(
            "address",
            f"there is no route to {master or 'other hosts'}",
            "Ranks of one machine need none. For several machines, configure an address and a "
            "route (`ip address`, `ip route`).",
            address=None,
        )
    reason = "PHALANX_INTERFACE" if env.interface() else f"the route to {master or 'other hosts'}"
    message = f"this machine would listen for other hosts at {address} ({reason})"
    if ipaddress.ip_address(address).is_loopback and master:
        message = f"ranks of this machine only: the rendezvous, {master}, is at {address}"
    return _finding.ok("address", message, address=address)


def _host_name() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return _finding.note(
            "host_name",
            f"the name of this machine, {name}, has no address",
            "If it is host 0 of a job, pass an address as --master-addr.",
            name=name,
            address=None,
        )
    message = f"the name of this machine, {name}, resolves to {address}"
    values = {"name": name, "address": address}
    if ipaddress.ip_address(address).is_loopback:
        return _finding.note(
            "host_name",
            message,
            "No action is needed for one machine. If it is host 0 of several, pass an address that "
            "the others can reach as --master-addr, not this name.",
            **values,
        )
    return _finding.ok("host_name", message, **values)
