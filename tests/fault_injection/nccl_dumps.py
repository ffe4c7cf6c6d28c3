"""Dumps of a rank on Gloo as NCCL's watchdog makes them, for machines without a GPU.

They are those of PyTorch's Flight Recorder on Gloo, with what only NCCL's have (`ProcessGroupNCCL`
and `FlightRecorder` in PyTorch's sources): messages, and the members of groups. A rank whose peer
is lost goes on waiting, since NCCL does not notice it, and its operation stays in the dump.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_KINDS = {"send": "->", "isend": "->", "recv": "<-", "irecv": "<-"}


class NcclDumps:
    """The dumps of this rank, from its first group on, four times a second.

    Args:
        folder: Their directory.
    """

    def __init__(self, folder: str) -> None:
        self._file = Path(folder, f"rank{os.environ['RANK']}")
        self._groups: dict[str, dict[str, str]] = {}
        self._messages: list[dict[str, Any]] = []
        self._timeout = Path(folder, "timeout")
        """The file with which a rank whose operation times out lets all make their last dump."""
        self._hangs = self._hangs_in_message = self._has_timed_out = False
        dist.init_process_group = self._follow_start(dist.init_process_group)
        dist.new_group = self._follow_group(dist.new_group)
        for kind in _KINDS:
            setattr(dist, kind, self._follow_message(kind, getattr(dist, kind)))

    def hang(self, error: RuntimeError) -> None:
        """Go on waiting in the operation that has failed; does not return in time."""
        self._hangs, self._has_timed_out = True, "imed out" in str(error)
        time.sleep(3600)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._timeout.exists()
            part = self._file.with_suffix(".part")
            part.write_bytes(pickle.dumps(self._make_content()))
            part.replace(self._file)
            if self._has_timed_out:
                self._timeout.touch()
            time.sleep(0.25)

    def _make_content(self) -> dict[str, Any]:
        from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

        content: dict[str, Any] = pickle.loads(_dump_fr_trace(True, False, False))
        collectives = content["entries"]
        if self._hangs and not self._hangs_in_message and collectives:
            collectives[-1]["retired"] = False
        entries = [*collectives, *self._messages]
        content["entries"] = sorted(entries, key=lambda entry: int(entry["time_created_ns"]))
        content["pg_config"] = self._groups
        return content

    def _add_group(self, group: Any) -> None:
        ranks = str(dist.get_process_group_ranks(group))
        self._groups[group.group_name] = {"name": group.group_name, "ranks": ranks}

    def _follow_start(self, form: Callable[..., None]) -> Callable[..., None]:
        def init_process_group(*arguments: Any, **options: Any) -> None:
            form(*arguments, **options)
            self._add_group(dist.group.WORLD)
            threading.Thread(target=self._run, daemon=True).start()

        return init_process_group

    def _follow_group(self, form: Callable[..., Any]) -> Callable[..., Any]:
        def new_group(*arguments: Any, **options: Any) -> Any:
            group = form(*arguments, **options)
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                self._add_group(group)
            return group

        return new_group

    def _follow_message(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def message(tensor: torch.Tensor, peer: int | None = None, **options: Any) -> Any:
            if peer is None:  # NCCL has no recv from any rank
                return call(tensor, peer, **options)
            entry = _make_entry(kind, tensor, peer)
            self._messages.append(entry)
            if kind in ("send", "recv"):
                with self._complete(entry):
                    return call(tensor, peer, **options)
            return _Work(call(tensor, peer, **options), lambda: self._complete(entry))

        return message

    @contextmanager
    def _complete(self, entry: dict[str, Any]) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            self._hangs_in_message = True
            raise
        now = time.time_ns()
        entry.update(state="completed", retired=True, time_discovered_completed_ns=now)


class _Work:
    """The work of a message, whose end is recorded when it has been waited for."""

    def __init__(self, work: Any, complete: Callable[[], Any]) -> None:
        self._work, self._complete = work, complete

    def wait(self, *arguments: Any) -> Any:
        with self._complete():
            return self._work.wait(*arguments)


def _make_entry(kind: str, tensor: torch.Tensor, peer: int) -> dict[str, Any]:
    name = f"nccl:{kind.removeprefix('i')} {dist.get_rank()}{_KINDS[kind]}{peer}"
    sizes = [[*tensor.shape]]
    dtypes = [tensor.type().rpartition(".")[2].removesuffix("Tensor")]  # torch.FloatTensor
    frames = traceback.extract_stack()[:-2]
    return {
        "frames": [
            {"name": each.name, "filename": each.filename, "line": each.lineno}
            for each in reversed(frames)
        ],
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 0,
        "profiling_name": name,
        "time_created_ns": time.time_ns(),
        "time_discovered_completed_ns": None,
        "input_sizes": sizes,
        "input_dtypes": dtypes,
        "output_sizes": sizes,
        "output_dtypes": dtypes,
        "state": "started",
        "retired": False,
        "is_p2p": True,
    }
