"""Transports that carry bytes between hosts: existing libraries behind one small interface.

`interface` defines a transport: tagged sends and receives between the ranks of a group, matched in
the order in which they are posted. Each transport has its own module. Transports are independent of
collectives, of shared memory and of each other.
"""

from phalanx.transports import (
    shutdown_hooks as shutdown_hooks,  # must register its exit handler early
)
from phalanx.transports.interface import Transfer, Transport, TransportError
from phalanx.transports.selection import DEFAULT, NAMES, check_name, open_transport

__all__ = [
    "DEFAULT",
    "NAMES",
    "Transfer",
    "Transport",
    "TransportError",
    "check_name",
    "open_transport",
]
