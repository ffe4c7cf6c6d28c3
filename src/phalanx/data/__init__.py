"""Data sets, samplers and loops for distributed training and evaluation.

- `partition`: splits a data set by fractions.
- `batches`: splits every global batch over the ranks, so that a step uses the same samples at every
  world size.
- `evaluation`: distributes a data set without duplicates, and combines the ranks' metrics.
- `resumable`: samplers that resume in the middle of an epoch.
- `uneven_inputs`: loops over uneven inputs.
- `idx`: reads MNIST's file format.
- `ranks`: functions that these modules share.

All modules work with any data set, any `DataLoader` and any backend, and without a process group.
"""

from phalanx.data.batches import GlobalBatchSampler, per_rank_batch_size
from phalanx.data.evaluation import EvaluationSampler, mean_over_ranks
from phalanx.data.idx import load_mnist, read_idx
from phalanx.data.partition import DataPartitioner, Partition
from phalanx.data.resumable import ResumableSampler
from phalanx.data.uneven_inputs import count_samples, join_uneven_inputs, truncate_uneven_inputs

__all__ = [
    "DataPartitioner",
    "EvaluationSampler",
    "GlobalBatchSampler",
    "Partition",
    "ResumableSampler",
    "count_samples",
    "join_uneven_inputs",
    "load_mnist",
    "mean_over_ranks",
    "per_rank_batch_size",
    "read_idx",
    "truncate_uneven_inputs",
]
