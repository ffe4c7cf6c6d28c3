"""The function `phalanx.abort`, which breaks a group that cannot continue."""

from __future__ import annotations

import torch.distributed as dist

from phalanx.backend.membership import Membership
from phalanx.errors import UsageError


def abort(group: dist.ProcessGroup | None = None, reason: str = "") -> None:
    """Break a group: every rank that waits in it, or enters an operation, raises `Aborted` at once.

    This rank leaves the group; the others should too (`destroy_process_group`). The same processes,
    or the remaining ones, can then form another group. Blocks for at most the two seconds that this
    rank's own pending operations have to end.

    Args:
        group: The group; None for the default group.
        reason: The reason, in one line, for the exceptions of the other ranks and
            `phalanx explain`. Text beyond 639 bytes of UTF-8 is cut.

    Raises:
        UsageError: There is no such group, it is not a group of Phalanx, or `reason` is not a str.
    """
    if group is None:
        group = dist.group.WORLD if dist.is_initialized() else None
        if group is None:
            raise UsageError("abort: there is no default group; give one, or form it first")
    if not isinstance(group, Membership):
        raise UsageError(
            f"abort: group is {group!r}, expected a group of the backend 'phalanx'; for others "
            "see torch.distributed.ProcessGroup.abort"
        )
    group.abort(reason)
