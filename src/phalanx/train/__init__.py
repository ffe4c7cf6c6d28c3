"""Training: a loop that resumes exactly, and the snapshots that it resumes from.

`trainer` is the loop, and reads like one. It stands on `order` (which samples come next, and what
each of them weighs), `replicas` (how the copies of a model on the ranks stay alike, and what ranks
agree on), `backward` (precision, clipping, gradients that aren't finite), `evaluation`, `state`
(what a snapshot holds, and whether it fits), `seeds`, `stopping` (SIGTERM) and `progress` (the bar,
TensorBoard, `phalanx watch`). `snapshots` keeps states on disk. All of it is plain
`torch.distributed`: it runs in one process and on any backend.
"""

from phalanx.train.snapshots import Snapshot, Snapshots
from phalanx.train.stopping import STOPPED
from phalanx.train.trainer import Result, Trainer

__all__ = ["STOPPED", "Result", "Snapshot", "Snapshots", "Trainer"]
