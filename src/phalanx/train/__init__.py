"""Training: a loop that resumes exactly, and the snapshots that it resumes from.

`trainer` is the loop, and reads like one. It stands on `order` (which samples come next, and what
each of them weighs), `replicas` (how the copies of a model on the ranks stay alike), `agreement`
(what ranks exchange in each step), `backward` (precision, clipping, gradients that aren't finite),
`evaluation`, `state` (what a snapshot holds, and whether it fits), `seeds`, `stopping` (SIGTERM)
and `progress` (the bar, TensorBoard, `phalanx watch`). `snapshots` keeps the state of a training on
disk, so that nothing is lost when ranks die, and `random_states` has the random generators of every
rank; both are of use to a loop written by hand too.

All of it stands on `torch.distributed`'s public API alone, so it runs on any backend, or without a
group in a single process.
"""

from phalanx.train.random_states import random_states, restore_random_states
from phalanx.train.snapshots import Snapshot, Snapshots
from phalanx.train.stopping import STOPPED
from phalanx.train.trainer import Result, Trainer

__all__ = [
    "STOPPED",
    "Result",
    "Snapshot",
    "Snapshots",
    "Trainer",
    "random_states",
    "restore_random_states",
]
