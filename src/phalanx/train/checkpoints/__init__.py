"""Checkpoints: training state on disk, written atomically and verified before use.

- `state_tree`: the conversion of nested dicts and lists to JSON, with references to tensors.
- `safetensors`: the format of the files that hold the tensors.
- `files`: file input and output with checksums.
- `directory`: the creation, commit and removal of checkpoints in their directory.
- `sharding`: the division of tensors into shards, and their reassembly.
- `manifest`: the description of a checkpoint's contents.
- `compatibility`: the comparison of a checkpoint with an existing state.
- `collective_action`: actions that succeed on all ranks or fail on all ranks.
- `saving`, `loading`: the procedures to save and load.
- `checkpointer`: `Checkpointer`, the public interface.

docs/design/checkpoints.md explains the design.
"""

from phalanx.train.checkpoints.checkpointer import Checkpointer
from phalanx.train.checkpoints.loading import Checkpoint

__all__ = ["Checkpoint", "Checkpointer"]
