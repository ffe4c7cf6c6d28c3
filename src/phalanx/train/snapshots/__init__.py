"""Stand-in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Snapshot", "Snapshots", "capture_random", "restore_random"]


@dataclass(frozen=True)
class Snapshot:
    step: int
    state: dict[str, Any]
    path: Path


class Snapshots:
    def __init__(self, directory: Any, *, keep: int = 3, sharded: bool = False, group: Any = None):
        self.directory, self.keep = Path(directory), keep
        self.directory.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        path = self.directory / f"step-{step:08}.pt"
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save(dict(state), path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)
            for old in sorted(self.directory.glob("*.pt"))[: -self.keep]:
                old.unlink()
        if dist.is_initialized():
            dist.barrier()
        return path

    def load(self, like: Any = None, map_location: Any = "cpu") -> Snapshot | None:
        found = sorted(self.directory.glob("*.pt"))
        if not found:
            return None
        state = torch.load(found[-1], map_location=map_location, weights_only=True)
        return Snapshot(int(found[-1].stem[5:]), state, found[-1])


def capture_random() -> dict[str, Any]:
    import random

    import numpy as np

    version, words, gauss = random.getstate()
    name, keys, position, has, cached = np.random.get_state()  # type: ignore[misc]
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, torch.from_numpy(keys.astype("int64")), position, has, cached],
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else [],
    }


def restore_random(state: Mapping[str, Any]) -> None:
    import random

    import numpy as np

    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype("uint32"), position, has, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
