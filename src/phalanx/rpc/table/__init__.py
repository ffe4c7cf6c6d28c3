"""Embedding tables that live on servers, and are read from memory where those share a host.

- `rules`: how rows are updated: SGD, Adagrad, Adam, each with its state beside the rows.
- `arguments`: what lookups are given, checked.
- `rows`: `Table`, rows in shared memory that processes of a host read and write at the same time.
- `shards`: which server has which row.
- `server`: `Server`, what trainers call: it looks rows up, and takes updates in step or not.
- `lookup`: a batch's rows, each fetched once, from all servers.
- `serving`: `serve`, which puts a table on workers, and `save` and `load` of all its parts.
- `gradients`: gradients of rows, each once, as the core puts them together.
- `together`: a step of trainers that share the servers' host, without a call.
- `bag`: `ShardedEmbeddingBag`, a module like `torch.nn.EmbeddingBag` over servers.

Everything about why is in docs/design/table.md.
"""

from phalanx.rpc.table.bag import ShardedEmbeddingBag
from phalanx.rpc.table.rows import Table, TableHandle
from phalanx.rpc.table.rules import SGD, Adagrad, Adam
from phalanx.rpc.table.server import Server
from phalanx.rpc.table.serving import load, save, serve
from phalanx.rpc.table.shards import HashShards, RangeShards

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
