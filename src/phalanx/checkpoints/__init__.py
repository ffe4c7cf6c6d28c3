"""Checkpoints: training state on disk, written atomically and verified before use.

- `checkpointer`: `Checkpointer`, the public interface, and the procedures to save and load.
- `collective_action`: actions that succeed on all ranks or fail on all ranks.
- `directory`: the creation, commit and removal of checkpoints in their directory.
- `manifest`: the description of a checkpoint's contents, and its comparison with an existing state.
- `sharding`: the division of tensors into shards, and their reassembly.
- `safetensors`: the format of the files that hold the tensors.
- `files`: file input and output with checksums.

The design note "Checkpoints" explains the design.
"""

from phalanx.checkpoints.checkpointer import (
    Checkpoint,
    Checkpointer,
    load_local,
    save_local,
)

__all__ = ["Checkpoint", "Checkpointer", "load_local", "save_local"]
