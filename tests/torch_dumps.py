"""Dumps of PyTorch's Flight Recorder, as NCCL and Gloo make them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

BEGIN = 1_795_889_596_000_000_000
SECOND = 1_000_000_000


class DumpBuilder:
    """The dumps of the ranks of a job, as NCCL writes them."""

    def __init__(self, size: int, backend: str = "nccl") -> None:
        self.size, self.backend, self.time = size, backend, BEGIN
        self.entries: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(size)}
        self.config = {"0": {"name": "0", "desc": "default_pg", "ranks": str([*range(size)])}}
        self._numbers: dict[tuple[int, str], int] = {}

    def add_group(self, name: str, ranks: list[int]) -> None:
        self.config[name] = {"name": name, "desc": "undefined", "ranks": str(ranks)}

    def call(
        self,
        ranks: Any,
        name: str = "all_reduce",
        *,
        done: bool = False,
        group: str = "0",
        line: int = 7,
        size: int = 4,
        dtype: str = "Float",
    ) -> DumpBuilder:
        """Let ranks call an operation at a line of train.py, and end it if it is done."""
        for rank in ranks:
            is_message = name.startswith(("send", "recv"))
            number = self._numbers.get((rank, group), 0) + (not is_message)
            self._numbers[rank, group] = number
            self.entries[rank].append(
                {
                    "frames": [
                        {"name": name, "filename": "/x/torch/distributed/c.py", "line": 1},
                        {"name": "step", "filename": "/srv/job/train.py", "line": line},
                        {"name": "<module>", "filename": "/srv/job/train.py", "line": 90},
                    ],
                    "record_id": len(self.entries[rank]),
                    "pg_id": 0,
                    "process_group": (group, self.config[group]["desc"]),
                    "collective_seq_id": number,
                    "p2p_seq_id": 0,
                    "op_id": number,
                    "profiling_name": f"{self.backend}:{name}",
                    "time_created_ns": self.time,
                    "time_discovered_started_ns": None,
                    "time_discovered_completed_ns": None,
                    "input_sizes": [[size, 2]] if name != "barrier" else [],
                    "input_dtypes": [dtype] if name != "barrier" else [],
                    "output_sizes": [[size, 2]] if name != "barrier" else [],
                    "output_dtypes": [dtype] if name != "barrier" else [],
                    "state": "completed" if done else "started",
                    "retired": done,
                    "timeout_ms": 600_000,
                    "is_p2p": is_message,
                }
            )
        self.time += SECOND // 100
        return self

    def get_content(self, rank: int) -> dict[str, Any]:
        return {"version": "2.10", "pg_config": self.config, "entries": self.entries[rank]}

    def write(self, folder: Path, *, prefix: str = "nccl_trace_rank_", after: int = 30) -> Path:
        """Write the dumps, some seconds after the last call."""
        folder.mkdir(exist_ok=True)
        for rank in range(self.size):
            file = folder / f"{prefix}{rank}"
            file.write_bytes(pickle.dumps(self.get_content(rank), protocol=2))
            os.utime(file, ns=(self.time + after * SECOND,) * 2)
        return folder
