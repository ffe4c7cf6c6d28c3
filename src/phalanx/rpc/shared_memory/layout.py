"""Tensors in shared memory of a host: copied once, into memory that the receiver maps.

A worker that sends has segments of blocks; the blocks of a segment have one size, a power of two in
bytes. It leases a block to the receiver, whose tensor is a view of the block. When the storage of
that tensor is freed, the receiver ends the lease by writing a byte in the segment. The block can
then be reused: its pages are allocated already, and often still in the cache. The sender takes back
the blocks leased to a receiver that dies.

The byte has two writers, one after the other. The sender writes `LEASED` before it sends the
message that hands over the block; the receiver writes `FREE` after the last use of its tensor. When
the sender reads `FREE`, it may write the block. The copy that follows has a control dependency on
the read of the byte, and the receiver's reads of its tensor are over before the interpreter frees
it, behind at least one atomic operation on its reference count.

A large tensor is copied while its message is in transit, so that the receiver wakes and unpickles
meanwhile. The sender writes `FILLING`, sends, copies, and writes `LEASED`, or `UNWRITTEN` if it was
interrupted; the receiver waits for either. The copy must be visible no later than the byte. That
needs a processor that keeps stores in order, and loads: x86. On others, senders copy before they
send.

`sender.py` is the sender's side and `receiver.py` the receiver's. This module is the layout that
both use.
"""

from __future__ import annotations

import fcntl
import struct

__all__ = [
    "FILLING",
    "FLAGS",
    "FREE",
    "HEAD",
    "LEASED",
    "MAX_BLOCKS",
    "NONCE",
    "SEALS",
    "SHAPE",
    "UNWRITTEN",
]

NONCE = 16
"""The size in bytes of the nonce at the start of a segment, which identifies its owner."""
SHAPE = struct.Struct("<QQQ")
"""After the nonce: the segment's number, the size of its blocks in bytes, and their number."""
FLAGS = 64
"""The offset, in bytes, of the bytes of the blocks."""
HEAD = 4096
"""The offset, in bytes, of the blocks."""
MAX_BLOCKS = 256
"""The maximum number of blocks in a segment."""

FREE, LEASED, FILLING, UNWRITTEN = range(4)
"""The values of a block's byte."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""Seals that fix the size: a process that reads beyond the end of shrunk memory is killed."""
