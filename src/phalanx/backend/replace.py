"""Replacement of other backends by Phalanx, for scripts that name those (`PHALANX_REPLACE`).

PyTorch forms every group, the default group and those of `new_group`, in one private function,
`_new_process_group_helper`. `install` wraps this function to request a group of "phalanx" if the
script requests a replaced backend. `get_backend()`, the group's configuration and its own name keep
the requested backend, since scripts branch on them. Nothing else changes: a `ProcessGroupGloo` that
is constructed directly is still Gloo.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from phalanx import env, torch_versions

_logged: set[str] = set()


def install(create: Callable[..., Any]) -> None:
    """Replace the backends that `PHALANX_REPLACE` names by Phalanx.

    Never raises, since it runs inside of `import torch`. If the names are invalid, or PyTorch's
    private function is missing or changed, forming a group raises `UsageError`.

    Args:
        create: The creator of "phalanx", registered for names that PyTorch no longer knows.
    """
    try:
        names = env.replaced_backends()
        original = torch_versions.group_factory()
    except ValueError as error:
        _refuse(str(error))
        return
    setattr(c10d, torch_versions.FACTORY, _wrap_factory(original, names))
    if "mpi" in names:
        torch_versions.pretend_mpi()
    for name in names:
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])


def _refuse(reason: str) -> None:
    def refuse(*_args: object, **_options: object) -> NoReturn:
        raise _usage_error(reason)

    c10d.init_process_group = dist.init_process_group = refuse
    setattr(
        c10d, torch_versions.FACTORY, refuse
    )  # for modules that have already imported init_process_group


def _wrap_factory(original: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @wraps(original)
    def new_process_group(*args: Any, **options: Any) -> Any:
        call = signature.bind(*args, **options)
        requested = call.arguments["backend"]
        config = c10d.BackendConfig(requested)
        name = _replaced_name(config.get_device_backend_map(), call.arguments, names)
        if name is None:
            return original(*args, **options)
        if call.arguments["group_size"] < 0:
            _fill_in_ranks(call.arguments)
        call.arguments["backend"] = dist.Backend("phalanx")
        group, store = original(*call.args, **call.kwargs)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            group.set_backend_name(name)
            torch_versions.world().pg_map[group] = (requested, store)
            torch_versions.world().pg_backend_config[group] = str(config)
            default = dist.group.WORLD or group
            if default.rank() == 0:
                _log_once(f"runs in place of {name} (PHALANX_REPLACE)")
        return group, store

    return new_process_group


def _replaced_name(
    backends: dict[str, Any], arguments: dict[str, Any], names: tuple[str, ...]
) -> str | None:
    """Return the name of the backend that Phalanx replaces; None if it replaces none."""
    replaced = [name for name in backends.values() if name in names]
    others = {device: name for device, name in backends.items() if name not in names}
    if not replaced:
        return None
    # A Python group replaces the backends of all devices, so those of other devices would be lost.
    # A group of Phalanx can contain NCCL, but not with options of its own.
    has_options = bool(others) and arguments.get("backend_options") is not None
    if others not in ({}, {"cuda": "nccl"}) or has_options:
        lost = f"{'the options of ' * has_options}{', '.join(others.values())}"
        _log_once(f"{str(arguments['backend'])!r} is not replaced: {lost} would be lost")
        return None
    return str(replaced[0])


def _fill_in_ranks(arguments: dict[str, Any]) -> None:
    """Fill in the values that come from MPI's runtime: rank, world size, and a store."""
    try:
        launcher = "" if os.environ.get("RANK", "").strip() else env.launcher()
        ranks = None if launcher else env.assigned_ranks()
    except ValueError as error:
        raise _usage_error(str(error)) from None
    if ranks is None and not launcher:
        raise _usage_error(
            'the backend "mpi" is replaced by Phalanx (PHALANX_REPLACE), which takes rank and '
            "world size from the environment, but the environment has none: start the script with "
            "`phalanx run --replace mpi`, or with `mpirun -n 4 phalanx run --replace mpi`"
        )
    timeout = arguments["timeout"]
    store, rank, size = next(rendezvous(f"{launcher or 'env'}://", timeout=timeout))
    store.set_timeout(timeout)
    store = PrefixStore("default_pg", store)
    arguments.update(store=store, group_rank=rank, group_size=size)


def _usage_error(text: str) -> Exception:
    # Imported late: `phalanx.errors` may be the module that imports torch, and not be ready yet.
    from phalanx.errors import UsageError

    return UsageError(text)


def _log_once(text: str) -> None:
    if text not in _logged:
        _logged.add(text)
        sys.stderr.write(f"phalanx: {text}\n")
        sys.stderr.flush()
