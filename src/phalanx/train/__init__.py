"""A training loop that resumes exactly from checkpoints.

`trainer` contains the loop. It is built on these modules:

- `batch_schedule`: the order of the samples and the weight of each micro-batch.
- `replicas`: the synchronization of the model's replicas across ranks.
- `step`: precision, clipping, the detection of gradients that are not finite, and the values that
  ranks exchange in each step.
- `evaluation`: loss and metrics over a data set.
- `state`: the contents of a checkpoint, and the check that a checkpoint fits the run.
- `random_generators`: the seeds of the random generators of every rank, and their states.
- `preemption`: the handling of SIGTERM.
- `elastic`: the steps of a loop of one's own, which continues when ranks are lost.
- `recovery`: newcomers in the place of lost ranks, and the state that all take over.
- `trees`: the transfer of such a state from rank to rank, also in the background.
- `progress`: the progress bar, TensorBoard and `phalanx watch`.

`phalanx.checkpoints` saves the training state to disk, so that it survives the death of ranks. A
custom training loop can use its `Checkpointer` too, with `random_states` for the random generators
of every rank.

The package uses only the public API of `torch.distributed`. It runs on any backend, and in a single
process without a process group.
"""

from phalanx.checkpoints import Checkpoint, Checkpointer
from phalanx.train.elastic import Elastic
from phalanx.train.preemption import PREEMPTION_EXIT_CODE
from phalanx.train.random_generators import random_states, restore_random_states
from phalanx.train.trainer import Result, Trainer

__all__ = [
    "PREEMPTION_EXIT_CODE",
    "Checkpoint",
    "Checkpointer",
    "Elastic",
    "Result",
    "Trainer",
    "random_states",
    "restore_random_states",
]
