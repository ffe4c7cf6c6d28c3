"""Training: what a loop needs around its step.

`snapshots` keeps the state of a training on disk, so that nothing is lost when ranks die, and
`random_states` the random generators of every rank. All of it stands on `torch.distributed`'s
public API alone, so it runs on any backend, or without a group in a single process.
"""

from phalanx.train.random_states import random_states, restore_random_states
from phalanx.train.snapshots import Snapshot, Snapshots

__all__ = ["Snapshot", "Snapshots", "random_states", "restore_random_states"]
