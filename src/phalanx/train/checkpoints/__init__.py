"""Checkpoints: training state on disk, written atomically and verified before use.

- `tree`: the conversion of nested dicts and lists to JSON, with references to tensors.
- `safetensors`: the format of the files that hold the tensors.
- `files`: file input and output with checksums.
- `directory`: the creation, commit and removal of checkpoints in their directory.
- `pieces`: the division of tensors between ranks, and their reassembly.
- `manifest`: the description of a checkpoint's contents.
- `likeness`: the comparison of a checkpoint with an existing state.
- `peers`: actions that succeed on all ranks or fail on all ranks.
- `saving`, `loading`: the procedures to save and load.
- `store`: `Checkpointer`, the public interface.

docs/design/checkpoints.md explains the design.
"""

from phalanx.train.checkpoints.checkpointer import Checkpointer
from phalanx.train.checkpoints.loading import Checkpoint

__all__ = ["Checkpoint", "Checkpointer"]
