"""Phalanx in the place of other backends, for scripts that name those (`PHALANX_REPLACE`).

PyTorch forms every group, the default one and those of `new_group`, in one private function of its
own, `_new_process_group_helper`. The function that `install` puts in its place asks it for a group
of "phalanx" where one of a replaced name is wanted. `get_backend()`, the group's configuration and
its own name stay those that the script asked for, since scripts branch on them. Everything else is
left alone: `ProcessGroupGloo`, made directly, is still Gloo.
"""

from __future__ import annotations

import inspect
import os
import sys
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from phalanx import env

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["install"]

_HELPER = "_new_process_group_helper"
_PARAMETERS = frozenset(
    "group_size group_rank global_ranks_in_group backend store group_name timeout".split()
)
_said: set[str] = set()


def install(create: Callable[..., Any]) -> None:
    """Put Phalanx in the place of the backends that `PHALANX_REPLACE` names.

    Never raises, since it runs inside of `import torch`: when the names are wrong, or PyTorch isn't
    as it must be, forming a group raises `UsageError`.

    Args:
        create: the creator of "phalanx", for the names that PyTorch doesn't know any more.
    """
    try:
        names = env.replaced_backends()
        original = _helper()
    except ValueError as error:
        _refuse(str(error))
        return
    setattr(c10d, _HELPER, _replacing(original, names))
    if "mpi" in names:
        c10d._MPI_AVAILABLE = True
    for name in names:
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])


def _helper() -> Callable[..., Any]:
    helper: Callable[..., Any] | None = getattr(c10d, _HELPER, None)
    if helper is None or not _PARAMETERS.issubset(inspect.signature(helper).parameters):
        raise ValueError(
            f"PHALANX_REPLACE: torch {torch.__version__} forms groups in a way that this version "
            "of Phalanx doesn't know, so it can't stand in for another backend: unset the "
            'variable (or leave out --replace) and name the backend "phalanx" in the script'
        )
    return helper


def _refuse(reason: str) -> None:
    def refuse(*_args: object, **_options: object) -> NoReturn:
        raise _usage_error(reason)

    c10d.init_process_group = dist.init_process_group = refuse
    setattr(c10d, _HELPER, refuse)  # for the modules that hold init_process_group by now


def _replacing(original: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @wraps(original)
    def new_process_group(*args: Any, **options: Any) -> Any:
        call = signature.bind(*args, **options)
        asked = call.arguments["backend"]
        config = c10d.BackendConfig(asked)
        name = _replaced_name(config.get_device_backend_map(), call.arguments, names)
        if name is None:
            return original(*args, **options)
        if call.arguments["group_size"] < 0:
            _find_place(call.arguments)
        call.arguments["backend"] = dist.Backend("phalanx")
        group, store = original(*call.args, **call.kwargs)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            group.stand_in_for(name)
            c10d._world.pg_map[group] = (asked, store)
            c10d._world.pg_backend_config[group] = str(config)
            default = dist.group.WORLD or group
            if default.rank() == 0:
                _say(f"runs in place of {name} (PHALANX_REPLACE)")
        return group, store

    return new_process_group


def _replaced_name(
    backends: dict[str, Any], arguments: dict[str, Any], names: tuple[str, ...]
) -> str | None:
    """The name that Phalanx stands in for; None if it can't, or isn't wanted to."""
    replaced = [name for name in backends.values() if name in names]
    others = {device: name for device, name in backends.items() if name not in names}
    if not replaced:
        return None
    # A Python group replaces all of PyTorch's: what serves another device would be gone. NCCL has a
    # place in ours, but not with options of its own.
    own = bool(others) and arguments.get("backend_options") is not None
    if others not in ({}, {"cuda": "nccl"}) or own:
        why = f"for {'the options of ' * own}{', '.join(others.values())}, which would be lost"
        _say(f"{str(arguments['backend'])!r} is left as it is {why}")
        return None
    return str(replaced[0])


def _find_place(arguments: dict[str, Any]) -> None:
    """Fill in what MPI's runtime would say: this process's rank, the world size, and a store."""
    try:
        launcher = "" if os.environ.get("RANK", "").strip() else env.launcher()
        place = None if launcher else env.place()
    except ValueError as error:
        raise _usage_error(str(error)) from None
    if place is None and not launcher:
        raise _usage_error(
            'the backend "mpi" is replaced by Phalanx (PHALANX_REPLACE), which takes rank and '
            "world size from the environment, and it has none: start the script with "
            "`phalanx run --replace mpi`, or with `mpirun -n 4 phalanx run --replace mpi`"
        )
    timeout = arguments["timeout"]
    store, rank, size = next(rendezvous(f"{launcher or 'env'}://", timeout=timeout))
    store.set_timeout(timeout)
    store = PrefixStore("default_pg", store)
    arguments.update(store=store, group_rank=rank, group_size=size)


def _usage_error(text: str) -> Exception:
    # Not imported above: where `phalanx.errors` is what imports torch, it isn't ready by then.
    from phalanx.errors import UsageError

    return UsageError(text)


def _say(text: str) -> None:
    if text not in _said:
        _said.add(text)
        sys.stderr.write(f"phalanx: {text}\n")
        sys.stderr.flush()
