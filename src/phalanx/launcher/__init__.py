"""Launchers and initialization: `phalanx.launch(fn, nprocs)`, `phalanx run`, `phalanx.init()`.

- `function` runs a function on several ranks of this machine and returns their results.
  `rank_processes` starts and stops the processes, and `worker` is the program of each rank.
- `elastic_agent` is `phalanx run`, on PyTorch's elastic agent; `options` parses its command line.
  `rank_bootstrap` ties a rank's lifetime to its parent's.
- For several hosts, `rendezvous` connects the launchers, `endpoint` reads its options,
  `job_coordinator` exchanges failures between the launchers, and `ssh` starts the hosts from one
  shell. `tunnel_server` and `tunnel_client` forward connections between the hosts; `handshake`
  authenticates them, and `connections` runs their event loop.
- `output_forwarder` forwards the ranks' output and exits to the launcher, and `output_pipes`
  connects it to the agent. `root_cause` finds the first real error among several failures, and
  `failure_report` describes it.
- `cores` counts the cores, `rank_environment` sets defaults in the environment of the ranks, and
  `requirements` checks this host. `torch_import` imports torch without its warnings.
- `init` forms the group in a process, however it was started. `mpi` and `slurm` are the rendezvous
  of ranks that `mpirun` or `srun` has started. `store` hosts the ranks' store, and `store_wait`
  reports on it.

The package is also callable: `phalanx.launch(fn, 2)` calls `phalanx.launcher.function.launch`. It
imports neither torch nor the backend. See docs/design/launch.md for the reasons.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")


class _CallableModule(ModuleType):
    def __call__(
        self,
        fn: Callable[..., T],
        nprocs: int,
        args: Sequence[Any] = (),
        *,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        prefix: bool = False,
    ) -> list[T]:
        from phalanx.launcher.function import launch

        return launch(fn, nprocs, args, kwargs=kwargs, timeout=timeout, env=env, prefix=prefix)


sys.modules[__name__].__class__ = _CallableModule
