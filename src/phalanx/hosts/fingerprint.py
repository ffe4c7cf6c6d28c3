"""What ranks of different hosts tell each other of the operation that they enter."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx import _native

__all__ = ["Fingerprint", "Header"]

_LAYOUT = struct.Struct("<QQQiBBH16s224s")
_SITE_BYTES = 224


@dataclass(frozen=True)
class Fingerprint:
    """As a native one, with ranks of the whole group."""

    kind: str
    sequence: int
    count: int
    dtype: int
    op: int
    root: int

    @classmethod
    def of(cls, native: _native.Fingerprint, ranks: tuple[int, ...]) -> Fingerprint:
        """A native one, whose messages are for or from one of a host's `ranks`."""
        root = native.root
        if native.kind in ("send", "recv") and root >= 0:
            root = ranks[root]
        return cls(native.kind, native.sequence, native.count, native.dtype, native.op, root)


@dataclass(frozen=True)
class Header:
    """A fingerprint on its way to another host, with where the operation was called."""

    fingerprint: Fingerprint
    site: str
    number: int = 0
    """Of a message: how many this rank has sent to that one before."""

    SIZE = _LAYOUT.size

    def pack(self) -> bytearray:
        """As many bytes as `SIZE`."""
        its = self.fingerprint
        return bytearray(
            _LAYOUT.pack(
                self.number,
                its.sequence,
                its.count,
                its.root,
                its.dtype,
                its.op,
                0,
                its.kind.encode(),
                # The end of a long path says more than its beginning.
                self.site.encode(errors="replace")[-_SITE_BYTES:],
            )
        )

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Header:
        """From what `pack` made."""
        number, sequence, count, root, dtype, op, _, kind, site = _LAYOUT.unpack(data)
        text = site.rstrip(b"\0").decode(errors="replace")
        name = kind.rstrip(b"\0").decode(errors="replace")
        return cls(Fingerprint(name, sequence, count, dtype, op, root), text, number)
