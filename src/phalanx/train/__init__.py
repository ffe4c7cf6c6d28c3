"""A training loop that resumes exactly, and the checkpoints that it resumes from.

`trainer` contains the loop. It is built on these modules:

- `batch_schedule`: the order of the samples and the weight of each micro-batch.
- `replicas`: the synchronization of the model's replicas across ranks.
- `step_sync`: the values that ranks exchange in each step.
- `backward`: precision, clipping, and the detection of gradients that are not finite.
- `evaluation`: loss and metrics over a data set.
- `state`: the contents of a checkpoint, and the check that a checkpoint fits the run.
- `seeds`: random seeds that differ between ranks.
- `preemption`: the handling of SIGTERM.
- `progress`: the progress bar, TensorBoard and `phalanx watch`.

`checkpoints` saves the training state to disk, so that it survives the death of ranks.
`random_states` captures the random generators of every rank. A custom training loop can use both.

The package uses only the public API of `torch.distributed`. It runs on any backend, and in a single
process without a process group.
"""

from phalanx.train.checkpoints import Checkpoint, Checkpointer
from phalanx.train.preemption import PREEMPTION_EXIT_CODE
from phalanx.train.random_states import random_states, restore_random_states
from phalanx.train.trainer import Result, Trainer

__all__ = [
    "PREEMPTION_EXIT_CODE",
    "Checkpoint",
    "Checkpointer",
    "Result",
    "Trainer",
    "random_states",
    "restore_random_states",
]
