"""Tensors to workers of the same host: copied once, into memory that the receiver maps.

A worker that sends has segments of blocks, each block of one power of two of bytes. It leases a
block to the receiver, whose tensor is a view of it; when that tensor's storage is gone, the
receiver ends the lease by a byte in the segment, and the block is used again: its pages are there
already, and often still in the cache. What a receiver that dies has leased is taken back.

The byte has two writers, one after the other: the sender writes `LEASED` before it sends the
message that gives the block away, the receiver writes `FREE` after the last use of its tensor.
Where the sender finds `FREE`, it may write the block: the read of the byte and the copy that
follows depend on one another by control, and the receiver's reads of its tensor are over before the
interpreter frees it, behind at least one atomic operation on the count of its references.

A large tensor is copied while its message is under way, so that the receiver wakes and unpickles
meanwhile: the sender writes `FILLING`, sends, copies, and writes `LEASED`, or `UNWRITTEN` if it was
interrupted; the receiver waits for either. That the copy is seen no later than the byte needs a
processor that keeps stores in order, and loads: x86. Others copy before they send.

`arena.py` is the sender's side, `mapped.py` the receiver's; here is the layout, which both know.
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
    "MOST_BLOCKS",
    "NONCE",
    "SEALS",
    "SHAPE",
    "UNWRITTEN",
]

NONCE = 16
"""Bytes at a segment's beginning, by which its owner is known."""
SHAPE = struct.Struct("<QQQ")
"""Behind the nonce: the segment's number, the size of its blocks, how many they are."""
FLAGS = 64
"""Where the bytes of the blocks begin."""
HEAD = 4096
"""Where the blocks begin."""
MOST_BLOCKS = 256
"""Of a segment."""

FREE, LEASED, FILLING, UNWRITTEN = range(4)
"""What a block's byte says."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""Who maps memory that becomes smaller is killed when it reads on."""
