"""Snapshots: the state of a training on disk, whole or not there at all, and checked before use.

- `tree`: a state of nested dicts and lists as JSON, with references to its tensors.
- `safetensors`: the layout of the files that hold the tensors.
- `files`: bytes to disk and back, with their checksum on the way.
- `directory`: the names in the directory; how a snapshot begins, is committed and is removed.
- `pieces`: which rank writes which part of a tensor, and how parts become tensors again.
- `manifest`: what a snapshot says of itself.
- `peers`: a step that succeeds on all ranks or fails on all.
- `saving`, `loading`, `store`: the two ways, and `Snapshots`, which has both.

Everything about why is in docs/design/snapshots.md.
"""

from phalanx.train.snapshots.loading import Snapshot
from phalanx.train.snapshots.store import Snapshots

__all__ = ["Snapshot", "Snapshots"]
