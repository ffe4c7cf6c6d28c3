"""Every exception that Phalanx raises.

`PhalanxError` and its children say that a peer, or the group, can't go on; they are
`torch.distributed.DistBackendError`, so that code written for other backends catches them.
`SnapshotError` is about what is on a disk. `UsageError` says that a call was wrong: it is raised
before any peer is touched, and the group stays usable.
"""

from torch.distributed import DistBackendError

__all__ = [
    "Aborted",
    "CallTimeout",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "LaunchError",
    "PeerLost",
    "PhalanxError",
    "RemoteError",
    "SnapshotError",
    "UsageError",
]


class PhalanxError(DistBackendError):
    """A group or one of its peers can't go on; the message names rank, operation and call site."""


class PeerLost(PhalanxError):  # noqa: N818 - the design's name
    """A rank of the group died: which, its pid and, where it can be known, how."""


class CollectiveMismatch(PhalanxError):  # noqa: N818 - the design's name
    """Ranks called operations that don't fit together; both are named."""


class CollectiveTimeout(PhalanxError):  # noqa: N818 - the design's name
    """A rank didn't come before the deadline; it is named."""


class Aborted(PhalanxError):  # noqa: N818 - the design's name
    """The group was aborted, left or interrupted: by whom and why."""


class CallTimeout(PhalanxError):  # noqa: N818 - as the one above
    """A remote call took longer than its timeout; it may still be executed."""


class RemoteError(PhalanxError):
    """A remote call raised an exception that can't be sent: its words, and where it was raised."""


class LaunchError(PhalanxError):
    """A process that Phalanx started failed: its rank, and its traceback or exit code."""


class SnapshotError(RuntimeError):
    """A snapshot couldn't be written, or none of those there can be used: which file, and why."""


class UsageError(ValueError):
    """A wrong argument: what was given, what was expected, what to do."""
