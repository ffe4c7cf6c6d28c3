"""Starting processes: `phalanx.launch(fn, nprocs)`, `phalanx run` and `phalanx.init()`.

`function` starts a function on several ranks of this machine and returns their results, `worker`
is what each of those processes runs. `agent` is `phalanx run`, on PyTorch's elastic agent; `child`
ties a process's life to its parent's. With several hosts, `meeting` decides where they find each
other, `news` is what their launchers tell each other, `ssh` starts them from one shell.
`relay` brings the ranks' output and deaths to the caller, `failure` finds the first real error
among what several ranks report, `cores` counts the cores, `defaults` is what a rank's environment
gets besides its place.
`session` forms the group in a process that any of them, or nobody, has started; `mpi` and `slurm`
are how ranks meet that `mpirun` or `srun` has started.

The package is also the function: `phalanx.launch(fn, 2)` calls `phalanx.launch.function.launch`.
See docs/design/launch.md for why. It imports neither torch nor the backend.
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
        from phalanx.launch.function import launch

        return launch(fn, nprocs, args, kwargs=kwargs, timeout=timeout, env=env, prefix=prefix)


sys.modules[__name__].__class__ = _Launch
