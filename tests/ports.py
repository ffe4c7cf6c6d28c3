"""Ports for the tests that must know one before anything listens at it."""

import random
import socket
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def find_free_port() -> int:
    """Return a port that is free on all interfaces and stays so until it is bound by its number.

    It lies below the ephemeral ports. One of those could be given to another program at any
    moment, and a connection to one that nobody listens at can even connect to itself.
    """
    lowest_ephemeral = int(_EPHEMERAL.read_text().split()[0])
    for port in random.sample(range(10_000, lowest_ephemeral), 100):
        try:
            with socket.create_server(("", port)):
                return port
        except OSError:
            continue
    raise RuntimeError(f"none of 100 ports between 10000 and {lowest_ephemeral} was free")
