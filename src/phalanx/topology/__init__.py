"""Who shares a host, and how the ranks of a group come to share a segment.

`join` is the one entry: it takes the group's store and gives back the native group. That two ranks
share a host is proved, not assumed: one opens the other's segment and finds the nonce in it.
"""

from phalanx.topology.join import join

__all__ = ["join"]
