"""Phalanx: distributed PyTorch over shared memory within a host and a transport between hosts.

General layout, from the bottom up (dependencies point downward only):

- `_native`: the C++ core: the segment that the ranks of a host share, waiting, reductions,
  collectives and messages. It does not depend on Python objects or torch.
- `errors`, `env`: all exceptions and all environment variables. They import nothing else of the
  package but `usage_errors`.
- `system`: operating system utilities that every layer may use: processes, ssh, host identity,
  polling, signals.
- `usage_errors`, `torch_sources`: the exceptions for wrong calls, and torchrun's options, for
  commands that answer before torch is imported, or without it.
- `torch_versions`: the differences between versions of PyTorch.
- `key`: the job's key, which authenticates its processes.
- `address`: the address at which other hosts reach this machine.
- `topology`: the ranks of each host, and the setup of the segment that they share.
- `transports`: the transports between hosts: Gloo, MPI, the relay.
- `hierarchical`: groups that span hosts: shared memory within each host, a transport between them.
- `recorder`: what ranks and launchers write about themselves, in their job's directory.
- `diagnosis`: what became of a job, from these records and from those of PyTorch.
- `backend`: the `torch.distributed` backend "phalanx": a process group and its works.
- `launcher`: starts processes and determines the rank of each. It stands beside `backend` and uses
  `topology`, `transports` and `recorder`.
- `rpc`: calls of functions on other workers, and references to values that live there.
- `checkpoints`: the state of a training or of a server on disk.
- `embedding`: embedding tables whose rows are on servers.
- `data`, `parallel`: samplers and partitions; synchronous SGD, `SharedDataParallel`, all-reduces
  built on messages. They use `torch.distributed`'s public API, so they run on any backend.
  `SharedDataParallel` additionally takes memory that ranks share from the core.
- `train`: the trainer, on any backend too.
- `bench`, `testing`: measurements; the self-check of `phalanx test`, and fault injection.
- `doctor`: checks of a machine, and of the network between several.
- `cli`: the command `phalanx`.

The names below are loaded on first use, since `import torch` imports this package through the
`torch.backends` entry point and must stay cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from phalanx.backend.compiled import PreparedOperation as PreparedOperation
    from phalanx.backend.operands import empty_shared as empty_shared
    from phalanx.backend.options import Options as Options
    from phalanx.backend.prepared import plan as plan
    from phalanx.backend.prepared import prepare as prepare
    from phalanx.backend.process_group import abort as abort
    from phalanx.backend.process_group import host_ranks as host_ranks
    from phalanx.backend.rank_changes import RankChange as RankChange
    from phalanx.backend.rank_changes import replace as replace
    from phalanx.backend.rank_changes import shrink as shrink
    from phalanx.diagnosis.debug_server import start_debug_server as start_debug_server
    from phalanx.errors import Aborted as Aborted
    from phalanx.errors import ArgumentTypeError as ArgumentTypeError
    from phalanx.errors import CallTimeout as CallTimeout
    from phalanx.errors import CheckpointError as CheckpointError
    from phalanx.errors import CollectiveMismatch as CollectiveMismatch
    from phalanx.errors import CollectiveTimeout as CollectiveTimeout
    from phalanx.errors import LaunchError as LaunchError
    from phalanx.errors import PeerLost as PeerLost
    from phalanx.errors import PhalanxError as PhalanxError
    from phalanx.errors import RankExcluded as RankExcluded
    from phalanx.errors import RemoteError as RemoteError
    from phalanx.errors import UsageError as UsageError
    from phalanx.launcher.init import Session as Session
    from phalanx.launcher.init import init as init
    from phalanx.launcher.launch import launch as launch
    from phalanx.recorder.flight_recorder import report as report

_MODULES = {
    "Aborted": "phalanx.errors",
    "ArgumentTypeError": "phalanx.errors",
    "CallTimeout": "phalanx.errors",
    "CheckpointError": "phalanx.errors",
    "CollectiveMismatch": "phalanx.errors",
    "CollectiveTimeout": "phalanx.errors",
    "LaunchError": "phalanx.errors",
    "Options": "phalanx.backend.options",
    "PeerLost": "phalanx.errors",
    "PhalanxError": "phalanx.errors",
    "PreparedOperation": "phalanx.backend.compiled",
    "RankChange": "phalanx.backend.rank_changes",
    "RankExcluded": "phalanx.errors",
    "RemoteError": "phalanx.errors",
    "Session": "phalanx.launcher.init",
    "UsageError": "phalanx.errors",
    "abort": "phalanx.backend.process_group",
    "empty_shared": "phalanx.backend.operands",
    "host_ranks": "phalanx.backend.process_group",
    "init": "phalanx.launcher.init",
    "launch": "phalanx.launcher.launch",
    "plan": "phalanx.backend.prepared",
    "prepare": "phalanx.backend.prepared",
    "replace": "phalanx.backend.rank_changes",
    "report": "phalanx.recorder.flight_recorder",
    "shrink": "phalanx.backend.rank_changes",
    "start_debug_server": "phalanx.diagnosis.debug_server",
}

__all__ = ["__version__", *_MODULES]  # noqa: PLE0604 - the keys are strings


def __getattr__(name: str) -> object:
    if name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
