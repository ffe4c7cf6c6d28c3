"""The options of groups, and those of operations in the forms that PyTorch's own groups accept.

`torch.distributed` passes an options object to a group's methods. Direct callers pass the main
option (root or operator) or nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from phalanx import _native, env, transports
from phalanx.errors import UsageError
from phalanx.topology import HostLink
from phalanx.topology.layout import AUTO

MAX_CONNECTIONS = 4
"""As many as chunks in flight: `hierarchical.execution` is not imported on one host."""


@dataclass(frozen=True)
class Options:
    """The options of a group of the backend "phalanx", given as `pg_options`.

    Attributes:
        transport: The transport between hosts, one of `phalanx.transports.NAMES`. If empty, it is
            taken from `PHALANX_TRANSPORT`, else from the default group, else it is "gloo".
        compress: The encoding of sums and averages of float32 between hosts, from 64 KiB on, by
            `all_reduce`, `reduce_scatter` and all that stands on them: "bfloat16", "int8" or
            "int4", with 50%, 25.4% and 14.1% of the bytes. The results are the same on all ranks,
            but rounded. What is lost of a tensor is added to its next values, while its memory
            exists (error feedback). "auto": the group measures its links when it is formed, and
            uses "int8" if the slowest one is slower than 2 Gbit/s. Empty, the default, to send
            float32. Within a host it has no effect.
        connections: The number of connections between two ranks of different hosts, from 1 to 4,
            for links that one does not fill: fast ones over long distances, or with losses. The
            chunks of collectives, of 4 MiB each, go over them in turn, four at a time. Not with
            "mpi". By default, as many as in the default group; there, 1.

    Example:
        >>> options = phalanx.Options(transport="gloo", compress="int8")
        >>> group = dist.new_group(backend="phalanx", pg_options=options)
    """

    transport: str = ""
    compress: str = ""
    connections: int | None = None


def select_link(options: object, default_group: object) -> HostLink:
    """Return the link between hosts for a new group.

    Args:
        options: The options given for the group. Anything but an `Options` is ignored, since it is
            meant for a backend that Phalanx replaces.
        default_group: The default group, or None.

    Raises:
        UsageError: There is no such transport or encoding, or so many connections.
    """
    own = options if isinstance(options, Options) else Options()
    configured = own.transport
    name = (
        configured
        or env.transport()
        or getattr(default_group, "transport", "")
        or transports.DEFAULT
    )
    transports.check_name(name, "" if configured else "PHALANX_TRANSPORT in the environment: ")
    encodings = [*_native.ENCODINGS, AUTO]
    if own.compress and own.compress not in encodings:
        raise UsageError(
            f"compress={own.compress!r}: expected one of {', '.join(encodings)}, or ''"
        )
    most = 1 if name == "mpi" else MAX_CONNECTIONS
    connections: Any = own.connections
    if connections is None:
        inherited = getattr(default_group, "link", HostLink())
        connections = inherited.connections if name == inherited.transport else 1
    if not (isinstance(connections, int) and 1 <= connections <= most):
        raise UsageError(
            f"connections={connections!r} with the transport {name!r}: expected an integer "
            f"from 1 to {most}"
        )
    return HostLink(name, own.compress, connections)


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
