"""Data for ranks: who gets which samples, and the readers that the examples need.

`partition` splits a data set by fractions; `batches` splits every global batch over the ranks, so
that a step sees the same samples at every world size; `idx` reads MNIST's file format. All of it is
plain PyTorch: any data set with a length, any `DataLoader`, any backend, or none.
"""

from phalanx.data.batches import GlobalBatchSampler, per_rank_batch_size
from phalanx.data.idx import load_mnist, read_idx
from phalanx.data.partition import DataPartitioner, Partition

__all__ = [
    "DataPartitioner",
    "GlobalBatchSampler",
    "Partition",
    "load_mnist",
    "per_rank_batch_size",
    "read_idx",
]
