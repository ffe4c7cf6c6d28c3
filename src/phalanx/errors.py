"""The exceptions that Phalanx raises.

`PhalanxError` and its subclasses mean that a peer, or the group, cannot continue. They are
`torch.distributed.DistBackendError`, so that code written for other backends catches them.
`CheckpointError` concerns checkpoints on disk. `UsageError` means that a call was wrong. It is
raised before any communication with a peer, and the group stays usable. It is both a ValueError and
a RuntimeError, the exception that PyTorch raises for most wrong calls.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import DistBackendError

from phalanx.usage_errors import ArgumentTypeError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "Aborted",
    "ArgumentTypeError",
    "CallTimeout",
    "CheckpointError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "LaunchError",
    "PeerLost",
    "PhalanxError",
    "RankExcluded",
    "RemoteError",
    "UsageError",
]


_Error = TypeVar("_Error", bound="PhalanxError")


class PhalanxError(DistBackendError):
    """A group or a peer cannot continue; the message names rank, operation and call site.

    The attributes repeat parts of the message for programs. They survive pickling, so an exception
    from another process has them too.

    Attributes:
        ranks: The ranks at fault, as numbers in the default group: those that are lost or late,
            that disagree, or that aborted the group; in `phalanx.rpc` the ids of the workers, in
            `phalanx.embedding` the numbers of the trainers. Empty if they are not known, or if the
            error is not about particular ranks.
        operation: The operation of this rank, such as "all_reduce #41"; in `phalanx.rpc`, a
            description of the call. None if there was none.
        group: The name of the process group, as PyTorch calls it; None outside of groups.
        seconds: The timeout that passed, in seconds; None if the error is not a timeout.
        job: The name of the job, for `phalanx explain`; None if it has no record, and in
            `phalanx.rpc`.

    Example:
        >>> try:
        ...     raise phalanx.PeerLost("rank 1 was killed", ranks=[1], operation="all_reduce #41")
        ... except phalanx.PhalanxError as error:
        ...     print(error, error.ranks, error.operation)
        rank 1 was killed (1,) all_reduce #41
    """

    ranks: tuple[int, ...]
    operation: str | None
    group: str | None
    seconds: float | None
    job: str | None

    def __init__(
        self,
        *args: object,
        ranks: Iterable[int] = (),
        operation: str | None = None,
        group: str | None = None,
        seconds: float | None = None,
        job: str | None = None,
    ) -> None:
        super().__init__(*args)
        # `BaseException.__reduce__` pickles them, since they are in `__dict__`.
        self.ranks = tuple(ranks)
        self.operation = operation
        self.group = group
        self.seconds = seconds
        self.job = job

    def replace(self: _Error, message: str, **attributes: Any) -> _Error:
        """Return a copy with another message, and with other values of the given attributes."""
        other = copy.copy(self)
        other.args = (message,)
        vars(other).update(attributes)
        return other


class PeerLost(PhalanxError):  # noqa: N818 - the design's name
    """A rank of the group died; the message names the rank, its pid and, if known, the cause.

    Example:
        >>> error = phalanx.PeerLost("rank 1 was killed by SIGKILL", ranks=[1])
        >>> error.ranks
        (1,)
    """


class CollectiveMismatch(PhalanxError):  # noqa: N818 - the design's name
    """Ranks called operations that do not match; the message names both.

    Example:
        >>> error = phalanx.CollectiveMismatch("rank 0 is in a barrier, rank 1 not", ranks=[0, 1])
        >>> error.ranks
        (0, 1)
    """


class CollectiveTimeout(PhalanxError):  # noqa: N818 - the design's name
    """A rank did not arrive before the deadline; the message names it.

    Example:
        >>> error = phalanx.CollectiveTimeout("rank 2 did not arrive", ranks=[2], seconds=60.0)
        >>> error.ranks, error.seconds
        ((2,), 60.0)
    """


class Aborted(PhalanxError):  # noqa: N818 - the design's name
    """The group was aborted, left or interrupted; the message names the rank and the reason.

    Example:
        >>> error = phalanx.Aborted("the group was aborted by rank 0: loss is NaN", ranks=[0])
        >>> error.ranks
        (0,)
    """


class RankExcluded(PhalanxError):  # noqa: N818 - like the ones above
    """The other ranks of the group go on without this one; this process should end.

    Example:
        >>> error = phalanx.RankExcluded("rank 2 was late, and is not in the new group", ranks=[2])
        >>> error.ranks
        (2,)
    """


class CallTimeout(PhalanxError):  # noqa: N818 - like the ones above
    """A remote call exceeded its timeout; it may still be executed.

    Example:
        >>> error = phalanx.CallTimeout("fit took longer than 2 s", ranks=[1], seconds=2.0)
        >>> error.ranks, error.seconds
        ((1,), 2.0)
    """


class RemoteError(PhalanxError):
    """A remote call or backward pass failed with an exception that cannot be raised here itself.

    Example:
        >>> issubclass(phalanx.RemoteError, phalanx.PhalanxError)
        True
    """


class LaunchError(PhalanxError):
    """A process that Phalanx started failed; has its rank and its traceback or exit code.

    Its cause is the exception of that rank, if it can be pickled.

    Example:
        >>> try:
        ...     phalanx.launch(divmod, 2, (1, 0))
        ... except phalanx.LaunchError as error:
        ...     print(type(error.__cause__).__name__, len(error.ranks))
        ZeroDivisionError 1
    """


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or loaded; the message names the file and the reason.

    Example:
        >>> issubclass(phalanx.CheckpointError, RuntimeError)
        True
    """
