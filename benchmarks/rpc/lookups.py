"""Lookups: four trainers concurrently look up batches in a table on one server.

A lookup has 128 bags of 5 new random indices. The table has 1,000,000 rows of 64 floats, more than
the caches hold. The results are seconds per lookup of a trainer. Systems:

- `phalanx`: `ShardedEmbeddingBag`, reading from memory that the server shares with the trainers.
- `phalanx_calls`: the same, but rows are fetched by calls, as from another host.
- `same_program`: `rpc_sync` of a function that calls `embedding_bag` on the server, by Phalanx.
- `torch`, `torch_uv`: the same by `torch.distributed.rpc`.
- `local`: `embedding_bag` on a separate table in each trainer.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from systems import join
from torch import Tensor
from torch.nn.functional import embedding_bag
from turns import Team, compare, format_timings

from phalanx import embedding
from phalanx.embedding import ShardedEmbeddingBag

SYSTEMS = ("phalanx", "phalanx_calls", "same_program", "torch", "torch_uv", "local")
ROWS, WIDTH, BATCH, PER_BAG, LOOKUPS, TRAINERS = 1_000_000, 64, 128, 5, 100, 4
MASTER, SERVER = TRAINERS, TRAINERS + 1

_state: dict[str, Any] = {}


def create_server() -> embedding.EmbeddingServer:
    """Create the server of a Phalanx table; called on the server."""
    return embedding.EmbeddingServer.create_shard(
        embedding.RangeSharding(ROWS, 1), 0, WIDTH, trainers=TRAINERS
    )


def create_plain_table() -> None:
    """Create a plain table, on the server or on a trainer with a table of its own."""
    _state["table"] = torch.randn(ROWS, WIDTH)


def look_up(indices: Tensor, offsets: Tensor) -> Tensor:
    """Look up a batch in the plain table of this process."""
    with torch.no_grad():
        return embedding_bag(indices, _state["table"], offsets, mode="sum")


def prepare(system: str, trainer: int, remote: Any) -> None:
    """Prepare a trainer for the rounds."""
    if system == "local":
        create_plain_table()
        _state["look_up"] = look_up
    elif remote is not None:
        _state["look_up"] = ShardedEmbeddingBag(
            ROWS,
            WIDTH,
            [remote],
            mode="sum",
            trainer=trainer,
            use_shared_memory=system == "phalanx",
        )
    else:
        rpc = _state["rpc"]
        _state["look_up"] = lambda *batch: rpc.rpc_sync(SERVER, look_up, batch)
    _state["random"] = torch.Generator().manual_seed(trainer)


def measure_round() -> float:
    """Run a round on a trainer; return the seconds per lookup."""
    shape = LOOKUPS, BATCH * PER_BAG
    batches = torch.randint(ROWS, shape, generator=_state["random"]).unbind()
    offsets = torch.arange(0, BATCH * PER_BAG, PER_BAG)
    with torch.no_grad():
        start = time.perf_counter()
        for indices in batches:
            _state["look_up"](indices, offsets)
        return (time.perf_counter() - start) / LOOKUPS


def work(
    rank: int, folder: str, rounds: Iterable[None], report: Callable[[float], None], *options: Any
) -> None:
    """Run as one of six workers. The first process is the master."""
    (system,) = options
    rank = (MASTER, *range(TRAINERS), SERVER)[rank]
    torch.set_num_threads(1)
    kind = system if system.startswith("torch") else "phalanx"
    rpc = _state["rpc"] = join(kind, folder, f"worker-{rank}", rank, TRAINERS + 2)
    if rank == MASTER:
        is_table = system in ("phalanx", "phalanx_calls")
        remote = rpc.remote(SERVER, create_server) if is_table else None
        if not is_table and system != "local":
            rpc.rpc_sync(SERVER, create_plain_table)
        for future in [
            rpc.rpc_async(trainer, prepare, (system, trainer, remote))
            for trainer in range(TRAINERS)
        ]:
            future.wait()
        for _ in rounds:
            futures = [rpc.rpc_async(trainer, measure_round) for trainer in range(TRAINERS)]
            report(max(future.wait() for future in futures))
    rpc.shutdown()


def measure(rounds: int) -> dict[str, Any]:
    """Measure all systems."""
    teams = [Team(system, work, TRAINERS + 2, (system,)) for system in SYSTEMS]
    results = compare(teams, rounds, "lookups")
    print(f"lookups  {format_timings(results)}")
    return {"lookups": results}
