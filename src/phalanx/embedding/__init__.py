"""Embedding tables on servers, read from shared memory by trainers on the same host.

- `optimizers`: the optimizers SGD, Adagrad and Adam, whose state is stored with the rows.
- `arguments`: validation of the arguments of lookups and updates.
- `table`: `EmbeddingTable`, rows in shared memory that the processes of a host read and write
  concurrently.
- `sharding`: the assignment of rows to servers.
- `server`: `EmbeddingServer`, which answers lookups and applies updates synchronously or with a
  staleness bound.
- `lookup`: lookup of the rows of a batch, each fetched once, from all servers.
- `deployment`: `deploy`, which creates a table on workers, and `save` and `load` of all its parts.
- `gradients`: summation of the gradients of duplicate rows, by the core.
- `collective_update`: a synchronous step of trainers on the servers' host, without a remote call.
- `sharded_embedding_bag`: `ShardedEmbeddingBag`, like `torch.nn.EmbeddingBag`, over servers.

docs/design/embedding.md explains the design.
"""

from phalanx.embedding.deployment import deploy, load, save
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
    "save",
]
