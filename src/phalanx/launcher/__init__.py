"""Launchers and initialization: `phalanx.launch(fn, nprocs)`, `phalanx run`, `phalanx.init()`.

- `function` runs a function on several ranks of this machine and returns their results; `worker`
  is the program of each rank.
- `agent` is `phalanx run`, on PyTorch's elastic agent; `child` ties a rank's lifetime to its
  parent's.
- For several hosts, `meeting` is the rendezvous, `news` exchanges failures between the launchers,
  and `ssh` starts the hosts from one shell.
- `relay` forwards the ranks' output and exits to the launcher, and `failure` finds the first real
  error among several reports.
- `cores` counts the cores, and `defaults` sets defaults in the environment of the ranks.
- `session` forms the group in a process, however it was started. `mpi` and `slurm` are the
  rendezvous of ranks that `mpirun` or `srun` has started.

The package is also callable: `phalanx.launch(fn, 2)` calls `phalanx.launcher.function.launch`. It
imports neither torch nor the backend. See docs/design/launch.md for the reasons.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")


class _Launch(ModuleType):
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


sys.modules[__name__].__class__ = _Launch
