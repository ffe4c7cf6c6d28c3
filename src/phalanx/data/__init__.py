"""Data sets, samplers and loops for distributed training and evaluation.

- `partition`: splits a data set by fractions.
- `samplers`: divide the samples among the ranks, for training and evaluation, and resume in the
  middle of an epoch.
- `loader_seed`: keeps the random numbers of an epoch that a loader continues.
- `ranks`: means and sums over all ranks.
- `uneven_inputs`: loops over uneven inputs.
- `digits`: a small data set for examples.

All modules work with any data set, any `DataLoader` and any backend, and without a process group.
"""

from phalanx.data.digits import load_digits
from phalanx.data.partition import DataPartitioner, Partition
from phalanx.data.ranks import mean_over_ranks
from phalanx.data.samplers import (
    EvaluationSampler,
    GlobalBatchSampler,
    ResumableSampler,
    per_rank_batch_size,
)
from phalanx.data.uneven_inputs import count_samples, join_uneven_inputs, truncate_uneven_inputs

__all__ = [
    "DataPartitioner",
    "EvaluationSampler",
    "GlobalBatchSampler",
    "Partition",
    "ResumableSampler",
    "count_samples",
    "join_uneven_inputs",
    "load_digits",
    "mean_over_ranks",
    "per_rank_batch_size",
    "truncate_uneven_inputs",
]
