"""The exceptions that Phalanx raises.

`PhalanxError` and its subclasses mean that a peer, or the group, cannot continue. They are
`torch.distributed.DistBackendError`, so that code written for other backends catches them.
`CheckpointError` concerns checkpoints on disk. `UsageError` means that a call was wrong. It is
raised before any communication with a peer, and the group stays usable. It is both a ValueError and
a RuntimeError, the exception that PyTorch raises for most wrong calls.
"""

from torch.distributed import DistBackendError

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
    "RemoteError",
    "UsageError",
]


class PhalanxError(DistBackendError):
    """A group or a peer cannot continue; the message names rank, operation and call site."""


class PeerLost(PhalanxError):  # noqa: N818 - the design's name
    """A rank of the group died; the message names the rank, its pid and, if known, the cause."""


class CollectiveMismatch(PhalanxError):  # noqa: N818 - the design's name
    """Ranks called operations that do not match; the message names both."""


class CollectiveTimeout(PhalanxError):  # noqa: N818 - the design's name
    """A rank did not arrive before the deadline; the message names it."""


class Aborted(PhalanxError):  # noqa: N818 - the design's name
    """The group was aborted, left or interrupted; the message names the rank and the reason."""


class CallTimeout(PhalanxError):  # noqa: N818 - like the ones above
    """A remote call exceeded its timeout; it may still be executed."""


class RemoteError(PhalanxError):
    """A remote call or backward pass failed with an exception that cannot be raised here itself."""


class LaunchError(PhalanxError):
    """A process that Phalanx started failed; has its rank and its traceback or exit code."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or loaded; the message names the file and the reason."""


class UsageError(ValueError, RuntimeError):
    """An invalid argument or call; the message has the value, the expected value and a fix."""


class ArgumentTypeError(UsageError, TypeError):
    """An argument of a wrong type, for which PyTorch raises TypeError."""
