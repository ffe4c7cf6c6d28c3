"""Lookups: four trainers look up batches in a table of one server, all at the same time.

A lookup is 128 bags of 5 indices, random, new in each, out of 1,000,000 rows of 64 floats, more
than the caches hold. Given are seconds per lookup of a trainer. Systems:

- `phalanx`: `ShardedEmbeddingBag`, out of memory that server and trainers share.
- `phalanx_calls`: the same, but rows come by calls, as from another host.
- `same_words`: `rpc_sync` of a function that does `embedding_bag` on the server, by Phalanx.
- `torch`, `torch_uv`: that by `torch.distributed.rpc`.
- `local`: `embedding_bag` on a table that each trainer has for itself.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from systems import join
from torch import Tensor
from torch.nn.functional import embedding_bag
from turns import Team, compare, said

from phalanx import embedding
from phalanx.embedding import ShardedEmbeddingBag

SYSTEMS = ("phalanx", "phalanx_calls", "same_words", "torch", "torch_uv", "local")
ROWS, WIDTH, BATCH, PER_BAG, LOOKUPS, TRAINERS = 1_000_000, 64, 128, 5, 100, 4
MASTER, SERVER = TRAINERS, TRAINERS + 1

_state: dict[str, Any] = {}


def serve() -> embedding.Server:
    """On the server, for Phalanx's tables."""
    return embedding.Server.of_shard(embedding.RangeShards(ROWS, 1), 0, WIDTH, trainers=TRAINERS)


def fill() -> None:
    """On the server; on a trainer that has a table for itself."""
    _state["table"] = torch.randn(ROWS, WIDTH)


def look_up(indices: Tensor, offsets: Tensor) -> Tensor:
    """Where the table is."""
    with torch.no_grad():
        return embedding_bag(indices, _state["table"], offsets, mode="sum")


def begin(system: str, trainer: int, remote: Any) -> None:
    """On a trainer: get ready."""
    if system == "local":
        fill()
        _state["look_up"] = look_up
    elif remote is not None:
        _state["look_up"] = ShardedEmbeddingBag(
            ROWS, WIDTH, [remote], mode="sum", trainer=trainer, shared=system == "phalanx"
        )
    else:
        rpc = _state["rpc"]
        _state["look_up"] = lambda *batch: rpc.rpc_sync(SERVER, look_up, batch)
    _state["random"] = torch.Generator().manual_seed(trainer)


def round_of() -> float:
    """On a trainer: a round; seconds per lookup."""
    shape = LOOKUPS, BATCH * PER_BAG
    batches = torch.randint(ROWS, shape, generator=_state["random"]).unbind()
    offsets = torch.arange(0, BATCH * PER_BAG, PER_BAG)
    with torch.no_grad():
        begun = time.perf_counter()
        for indices in batches:
            _state["look_up"](indices, offsets)
        return (time.perf_counter() - begun) / LOOKUPS


def work(
    rank: int, folder: str, rounds: Iterable[None], tell: Callable[[float], None], *options: Any
) -> None:
    """One of six workers. The first process is the master."""
    (system,) = options
    rank = (MASTER, *range(TRAINERS), SERVER)[rank]
    torch.set_num_threads(1)
    kind = system if system.startswith("torch") else "phalanx"
    rpc = _state["rpc"] = join(kind, folder, f"worker-{rank}", rank, TRAINERS + 2)
    if rank == MASTER:
        is_table = system in ("phalanx", "phalanx_calls")
        remote = rpc.remote(SERVER, serve) if is_table else None
        if not is_table and system != "local":
            rpc.rpc_sync(SERVER, fill)
        for future in [
            rpc.rpc_async(each, begin, (system, each, remote)) for each in range(TRAINERS)
        ]:
            future.wait()
        for _ in rounds:
            futures = [rpc.rpc_async(each, round_of) for each in range(TRAINERS)]
            tell(max(future.wait() for future in futures))
    rpc.shutdown()


def measure(rounds: int) -> dict[str, Any]:
    """All systems."""
    teams = [Team(system, work, TRAINERS + 2, (system,)) for system in SYSTEMS]
    found = compare(teams, rounds, "lookups")
    print(f"lookups  {said(found)}")
    return {"lookups": found}
