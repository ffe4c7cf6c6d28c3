"""Description of an operation, exchanged by ranks of different hosts when they enter it."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from phalanx import _native

_LAYOUT = struct.Struct("<QQQiBBH16s224s")
_SITE_BYTES = 224


@dataclass(frozen=True)
class Fingerprint:
    """A native fingerprint whose ranks are those of the whole group."""

    kind: str
    sequence: int
    count: int
    dtype: int
    op: int
    root: int

    @classmethod
    def from_native(cls, native: _native.Fingerprint, ranks: tuple[int, ...]) -> Fingerprint:
        """Convert a native fingerprint.

        Args:
            native: The native fingerprint. The peer of a send or recv is a local rank.
            ranks: The ranks of the host in the whole group, by local rank.
        """
        root = native.root
        if native.kind in ("send", "recv") and root >= 0:
            root = ranks[root]
        return cls(native.kind, native.sequence, native.count, native.dtype, native.op, root)


@dataclass(frozen=True)
class Header:
    """A fingerprint to be sent to another host, with the call site of the operation."""

    fingerprint: Fingerprint
    site: str
    number: int = 0
    """For messages, the number of earlier messages from the sender to the receiver."""

    SIZE = _LAYOUT.size

    def pack(self) -> bytearray:
        """Return the header in `SIZE` bytes."""
        fingerprint = self.fingerprint
        return bytearray(
            _LAYOUT.pack(
                self.number,
                fingerprint.sequence,
                fingerprint.count,
                fingerprint.root,
                fingerprint.dtype,
                fingerprint.op,
                0,
                fingerprint.kind.encode(),
                # The end of a long path is more informative than its beginning.
                self.site.encode(errors="replace")[-_SITE_BYTES:],
            )
        )

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Header:
        """Parse the bytes that `pack` returned."""
        number, sequence, count, root, dtype, op, _, kind, site = _LAYOUT.unpack(data)
        text = site.rstrip(b"\0").decode(errors="replace")
        name = kind.rstrip(b"\0").decode(errors="replace")
        return cls(Fingerprint(name, sequence, count, dtype, op, root), text, number)


def current_site() -> str:
    """Return the call site of the current operation, with its directories."""
    return _native.call_site_text(_native.call_site())
