"""Embedding tables on servers, read from shared memory by trainers on the same host.

- `optimizers`: the optimizers SGD, Adagrad and Adam, whose state is stored with the rows.
- `batch`: the checks of the arguments of lookups and updates, and the summation of the gradients of
  duplicate rows, by the core.
- `table`: `EmbeddingTable`, rows in shared memory that the processes of a host read and write
  concurrently.
- `sharding`: the assignment of rows to servers.
- `replication`: the roles of the two servers of a replicated part, and the changes that one sends.
- `server`: `EmbeddingServer`, which answers lookups and applies updates synchronously or with a
  staleness bound.
- `replicated_server`: the two servers of a part, as a trainer sees them.
- `deployment`: `deploy`, which creates a table on workers, `save` and `load` of all parts, and
  `replicate` and `move`, which replace servers.
- `sharded_table`: a table on all servers, seen from a trainer: lookups of batches, each row fetched
  once, and updates by calls, or by trainers on the servers' host without a remote call.
- `sharded_embedding_bag`: `ShardedEmbeddingBag`, like `torch.nn.EmbeddingBag`, over servers.

The design note "Embedding tables" explains the design.
"""

from phalanx.embedding.deployment import deploy, load, move, replicate, save
from phalanx.embedding.optimizers import SGD, Adagrad, Adam
from phalanx.embedding.server import EmbeddingServer
from phalanx.embedding.sharded_embedding_bag import ShardedEmbeddingBag
from phalanx.embedding.sharding import HashSharding, RangeSharding
from phalanx.embedding.table import EmbeddingTable, TableHandle

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "EmbeddingServer",
    "EmbeddingTable",
    "HashSharding",
    "RangeSharding",
    "ShardedEmbeddingBag",
    "TableHandle",
    "deploy",
    "load",
    "move",
    "replicate",
    "save",
]
