"""The options of groups, and those of operations in the forms that PyTorch's own groups accept.

`torch.distributed` passes an options object to a group's methods. Direct callers pass the main
option (root or operator) or nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from phalanx import env, transports


@dataclass(frozen=True)
class Options:
    """The options of a group of the backend "phalanx", given as `pg_options`.

    Attributes:
        transport: The transport between hosts, one of `phalanx.transports.NAMES`. If empty, it is
            taken from `PHALANX_TRANSPORT`, else from the default group, else it is "gloo".

    Example:
        >>> options = phalanx.Options(transport="gloo")
        >>> group = dist.new_group(backend="phalanx", pg_options=options)
    """

    transport: str = ""


def select_transport(options: object, default_group: object) -> str:
    """Return the name of the transport for a new group.

    Args:
        options: The options given for the group. Anything but an `Options` is ignored, since it is
            meant for a backend that Phalanx replaces.
        default_group: The default group, or None.

    Raises:
        UsageError: There is no such transport.
    """
    configured = options.transport if isinstance(options, Options) else ""
    name = (
        configured
        or env.transport()
        or getattr(default_group, "transport", "")
        or transports.DEFAULT
    )
    transports.check_name(name, "" if configured else "PHALANX_TRANSPORT in the environment: ")
    return name


def options_factory(
    kind: Callable[[], Any], field: str | None = None
) -> Callable[[Any, timedelta | None], Any]:
    """Return a function that makes an options object from the arguments of a method.

    Args:
        kind: The class of the options.
        field: The field for a value that is not an options object; "timeout" if None.
    """

    def options(value: Any, timeout: timedelta | None) -> Any:
        if isinstance(value, kind):  # type: ignore[arg-type]
            return value
        options = kind()
        if value is not None:
            setattr(options, field or "timeout", value)
        if timeout is not None:
            options.timeout = timeout
        return options

    return options
