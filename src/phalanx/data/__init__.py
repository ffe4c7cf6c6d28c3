"""Data for ranks: who gets which samples, and loops over them that end together.

`partition` splits a data set by fractions; `batches` splits every global batch over the ranks, so
that a step sees the same samples at every world size; `evaluation` shares out a set exactly, and
combines the ranks' metrics; `resuming` goes on in the middle of an epoch; `uneven` keeps ranks in
step that have more or less data than others; `idx` reads MNIST's file format. All of it is plain
PyTorch: any data set, any `DataLoader`, any backend, or none. `ranks` is what they share.
"""

from phalanx.data.batches import GlobalBatchSampler, per_rank_batch_size
from phalanx.data.evaluation import EvaluationSampler, mean_over_ranks
from phalanx.data.idx import load_mnist, read_idx
from phalanx.data.partition import DataPartitioner, Partition
from phalanx.data.resuming import ResumableSampler
from phalanx.data.uneven import samples_in, until_all_end, until_one_ends

__all__ = [
    "DataPartitioner",
    "EvaluationSampler",
    "GlobalBatchSampler",
    "Partition",
    "ResumableSampler",
    "load_mnist",
    "mean_over_ranks",
    "per_rank_batch_size",
    "read_idx",
    "samples_in",
    "until_all_end",
    "until_one_ends",
]
