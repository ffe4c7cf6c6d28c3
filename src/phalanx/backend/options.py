"""The options of operations, in the forms that PyTorch's own groups take.

A group's methods get an options object from `torch.distributed`, and from those who call them
directly the option that matters (root, operator) or nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx import engines, env_hosts

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta


@dataclass(frozen=True)
class Options:
    """What a group of the backend "phalanx" can be told, as `pg_options`.

    Attributes:
        engine: What carries bytes between hosts, one of `phalanx.engines.NAMES`; empty for what
            `PHALANX_ENGINE` says, else the default group's, else "gloo".
    """

    engine: str = ""


def engine_of(options: object, world: object) -> str:
    """The engine of a new group.

    Args:
        options: The `Options` that it was given. Others are those of a backend in whose place the
            group is.
        world: The default group, if there is one.

    Raises:
        UsageError: There is no such engine.
    """
    given = options.engine if isinstance(options, Options) else ""
    name = given or env_hosts.engine() or getattr(world, "engine", "") or engines.DEFAULT
    engines.check_name(name, "" if given else "PHALANX_ENGINE in the environment: ")
    return name


def options_of(
    kind: Callable[[], Any], field: str | None = None
) -> Callable[[Any, timedelta | None], Any]:
    """A function that makes an options object of what a method was given.

    Args:
        kind: The class of the options.
        field: What a value that is no options object is meant for.
    """

    def options(given: Any, timeout: timedelta | None) -> Any:
        if isinstance(given, kind):  # type: ignore[arg-type]
            return given
        made = kind()
        if given is not None:
            setattr(made, field or "timeout", given)
        if timeout is not None:
            made.timeout = timeout
        return made

    return options
