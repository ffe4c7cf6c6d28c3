"""Who shares a host, and how the ranks of a group come to share a segment.

`join` is the one entry: it takes the group's store and gives back the `Layout` of the group, which
says who shares a host, and the native group of this rank's host. That two ranks share a host is
proved, not assumed: each opens a piece of the other's memory and finds a nonce in it. Ranks of
other hosts reach this one at `own_address`.
"""

from phalanx.topology.address import address_towards, interface_address, own_address
from phalanx.topology.join import join
from phalanx.topology.layout import Layout
from phalanx.topology.place import Place

__all__ = ["Layout", "Place", "address_towards", "interface_address", "join", "own_address"]
