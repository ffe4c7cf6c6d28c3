"""A record of the process groups that the processes of a test form, in a shared file."""

from __future__ import annotations

import os
from functools import wraps
from typing import TYPE_CHECKING, Any

# Imported before any module of Phalanx that imports it: its import replaces Gloo by Phalanx.
import torch  # noqa: F401

from phalanx import torch_versions

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FormedGroups"]

# Backend names by the class of a group's backend.
_NAMES = {
    "ProcessGroupGloo": "gloo",
    "FakeProcessGroup": "fake",
    "ProcessLocalGroup": "threaded",
}


class FormedGroups:
    """The backends of all process groups that were formed since `record_in`."""

    _fd = -1

    @classmethod
    def watch(cls) -> None:
        """Record every group that this process and those forked from it form from now on."""
        from torch.distributed import distributed_c10d as c10d

        form = getattr(c10d, torch_versions.FACTORY)

        @wraps(form)
        def form_and_record(*args: Any, **options: Any) -> Any:
            formed = form(*args, **options)
            if formed[0] is not c10d.GroupMember.NON_GROUP_MEMBER:
                cls._add(formed[0])
            return formed

        setattr(c10d, torch_versions.FACTORY, form_and_record)

    @classmethod
    def record_in(cls, path: Path) -> None:
        """Begin a new record."""
        cls._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)

    @classmethod
    def recorded(cls) -> str:
        """Return the names of the backends, separated by commas."""
        size = os.fstat(cls._fd).st_size
        return ", ".join(sorted(set(os.pread(cls._fd, size, 0).decode().splitlines())))

    @classmethod
    def _add(cls, group: Any) -> None:
        if cls._fd >= 0:
            os.write(cls._fd, "".join(f"{name}\n" for name in _backends(group)).encode())


def _backends(group: Any) -> set[str]:
    """Return the backends of a group by their classes, since its name is the requested one."""
    if type(group).__module__.partition(".")[0] == "phalanx":
        return {"phalanx"}
    names = {type(group._get_backend(device)).__name__ for device in group._device_types}
    names = names or {type(group).__name__}
    return {_NAMES.get(name, name) for name in names}
