"""`phalanx.abort`: wake every rank of a group that can't go on."""

from __future__ import annotations

import torch.distributed as dist

from phalanx.backend.membership import Membership
from phalanx.errors import UsageError


def abort(group: dist.ProcessGroup | None = None, reason: str = "") -> None:
    """Break a group: every rank that waits in it, or comes to it, raises `Aborted` at once.

    This rank leaves the group; the others should too (`destroy_process_group`). The same processes
    can form another group then, all of them or those that are left. Doesn't block beyond the two
    seconds that this rank's own pending operations have to end.

    Args:
        group: The group; None for the default one.
        reason: Why, in a line; the others' exceptions and `phalanx explain` say it. What is longer
            than 639 bytes of UTF-8 is cut.

    Raises:
        UsageError: There is no such group, or it isn't one of Phalanx; a reason that is no text.
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
