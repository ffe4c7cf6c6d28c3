"""The hook that runs at `import torch`: registers three names and imports nothing else.

If `PHALANX_REPLACE` is set, the hook also installs `phalanx.backend.replace`. In a rank of a
launcher of Phalanx, it starts `phalanx.recorder.torch_recorder`.

PyTorch calls `register` through the `torch.backends` entry point. An exception here would break
`import torch` itself, and every user of torch pays for time spent here.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def register() -> None:
    """Register the backend "phalanx" and the rendezvous schemes `mpi://` and `slurm://`."""
    from torch.distributed import Backend, is_available

    if is_available() and not hasattr(Backend, "PHALANX"):
        from torch.distributed.rendezvous import register_rendezvous_handler

        for scheme in ("mpi", "slurm"):
            with contextlib.suppress(RuntimeError):  # another package's handler takes precedence
                register_rendezvous_handler(scheme, _rendezvous)  # type: ignore[no-untyped-call]
        Backend.register_backend("phalanx", _create, extended_api=True, devices=["cpu", "cuda"])
        begin()


def begin() -> None:
    """Do what the environment of this process asks for; in a copy, `import torch` is long over.

    This replaces the backends that `PHALANX_REPLACE` names, and keeps PyTorch's records of a rank.
    """
    if os.environ.get("PHALANX_REPLACE"):
        from phalanx.backend.replace import install

        install(_create)
    if os.environ.get("PHALANX_JOB"):
        from phalanx.recorder.torch_recorder import start

        start()


def _create(options: object, backend_options: object = None) -> object:
    # The functions for lost ranks now: after a loss, the import would take as long as all else.
    import phalanx.backend.rank_changes  # noqa: F401
    from phalanx.backend.process_group import create

    return create(options, backend_options)


def _rendezvous(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    if url.startswith("mpi:"):
        from phalanx.launcher.mpi import rendezvous_handler
    else:
        from phalanx.launcher.slurm import rendezvous_handler

    return rendezvous_handler(url, **options)
