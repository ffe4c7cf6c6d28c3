"""Embedding tables on servers, read from shared memory by trainers on the same host.

- `rules`: the optimizers SGD, Adagrad and Adam, whose state lies beside the rows.
- `arguments`: argument checks of lookups.
- `rows`: `Table`, rows in shared memory that the processes of a host read and write concurrently.
- `shards`: the assignment of rows to servers.
- `server`: `Server`, which serves lookups and applies updates synchronously or with a staleness
  bound.
- `lookup`: the rows of a batch, each fetched once, from all servers.
- `serving`: `serve`, which creates a table on workers, and `save` and `load` of all its parts.
- `gradients`: summation of the gradients of duplicate rows, by the core.
- `together`: a synchronous step of trainers on the servers' host, without a remote call.
- `bag`: `ShardedEmbeddingBag`, a module like `torch.nn.EmbeddingBag` over servers.

docs/design/embedding.md explains the design.
"""

from phalanx.embedding.deployment import load, save, serve
from phalanx.embedding.optimizers import SGD, Adagrad, Adam
from phalanx.embedding.server import Server
from phalanx.embedding.sharded_embedding_bag import ShardedEmbeddingBag
from phalanx.embedding.sharding import HashShards, RangeShards
from phalanx.embedding.table import Table, TableHandle

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "HashShards",
    "RangeShards",
    "Server",
    "ShardedEmbeddingBag",
    "Table",
    "TableHandle",
    "load",
    "save",
    "serve",
]
