"""The membership of this rank in a group: the base of the process group, without operations.

It has the group's name, its timeout, its threads and its end, and the two public functions
`phalanx.abort` and `phalanx.host_ranks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from phalanx.backend import lifetime
from phalanx.backend.cuda import NcclChild
from phalanx.backend.failure import left_group_error
from phalanx.backend.progress import CollectiveThread, MessageThread
from phalanx.errors import UsageError
from phalanx.observe.escape import encodable

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import Store  # type: ignore[attr-defined]

    from phalanx import _native
    from phalanx.backend.work import MessageWork

_STOP_SECONDS = 2.0

_NO_RECONFIGURE = (
    "a group of Phalanx keeps its ranks: to continue with others, call destroy_process_group() and "
    "init_process_group() on all of them"
)
_NO_WINDOW = "Phalanx has no one-sided operations: exchange tensors with isend() and irecv()"
_NO_HOOKS = (
    "PyTorch calls these hooks for its own groups only: `phalanx watch`, `phalanx trace` and "
    "PyTorch's profiler show the operations of a group of Phalanx"
)


def _unsupported_method(method: str, advice: str) -> Any:
    """Return a method that raises `NotImplementedError` on every call."""

    def refuse(self: Any, *_arguments: object, **_options: object) -> NoReturn:
        raise NotImplementedError(f"[{self._rank_label}] {method} is not supported: {advice}")

    return refuse


class Membership(dist.ProcessGroup):
    """The membership of this rank in a group: the native group, its threads, and leaving it."""

    # PyTorch queries these on a group's backend. This group is its own backend.
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False

    def __init__(
        self,
        native: _native.Group,
        store: Store,
        rank: int,
        size: int,
        name: str,
        timeout: timedelta,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg] # the stub lacks this constructor
        self._native = native
        self._store = store
        self._rank = rank
        self._size = size
        self._rank_label = f"rank {rank}/{size}"
        self._name = name
        self._desc = ""
        self._backend_name = "phalanx"
        self.hosts: tuple[tuple[int, ...], ...] = (tuple(range(size)),)
        """The ranks of each host."""
        self.transport = ""
        """The name of the transport between hosts, if there are several."""
        self._timeout = timeout.total_seconds()
        self._nccl = NcclChild(store, rank, size, timeout)
        self._collective_thread = CollectiveThread(f"phalanx-{name}-collectives")
        self._message_thread = MessageThread(f"phalanx-{name}-messages", native)
        self._active_messages: set[MessageWork] = set()
        self._active_messages_limit = 64
        self._coalesced_works: list[dist.Work] | None = None  # while operations are coalesced
        lifetime.register(self)

    # Methods that PyTorch requires of a group.

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        # Only PyTorch's C++ calls this. Given the name "gloo", it would use the Gloo backend.
        return "phalanx"

    def name(self) -> str:
        """Return the backend's name: "phalanx", or that of the backend that the group replaces."""
        return self._backend_name

    def set_backend_name(self, name: str) -> None:
        """Set the name of the backend that this group replaces (see `replace`)."""
        self._backend_name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    def get_group_store(self) -> Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: torch.device) -> Any:  # noqa: ARG002 - PyTorch's signature
        return self

    get_backend = _get_backend  # called by `dist.get_backend_impl`

    # Methods of PyTorch 2.14 that Phalanx does not support.

    get_reconfigure_handle = _unsupported_method("get_reconfigure_handle", _NO_RECONFIGURE)
    reconfigure = _unsupported_method("reconfigure", _NO_RECONFIGURE)
    new_window = _unsupported_method("new_window", _NO_WINDOW)
    register_abort_hook = _unsupported_method("register_abort_hook", _NO_HOOKS)
    register_pre_hook = _unsupported_method("register_pre_hook", _NO_HOOKS)
    register_post_hook = _unsupported_method("register_post_hook", _NO_HOOKS)

    def _has_hooks(self) -> bool:
        return False

    def _get_sequence_number_for_group(self) -> int:
        return self._native.sequence

    def _set_sequence_number_for_group(self) -> None:
        pass  # the core counts from the beginning

    def _wait_for_pending_works(self) -> None:
        self._collective_thread.drain()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time that an operation may wait for its peers, from the next operation on."""
        self._timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Leave the group and notify its peers.

        Operations in progress that do not end within two seconds abort the group.
        """
        native = self._native
        if not native.closed:
            self.stop_threads()
            self._nccl.shutdown()
            native.close()
            self.replace_native(lifetime.left_group())
            for work in list(self._active_messages):
                work.abandon(left_group_error(self._rank_label, "a message"))
            self._active_messages.clear()

    def abort(self, reason: str = "") -> None:
        """Make every waiting rank of the group raise `Aborted`, and leave the group."""
        if not isinstance(reason, str):
            raise UsageError(f"abort: reason is {reason!r}, expected a str that states the reason")
        if not self._native.closed:
            self._native.abort(encodable(reason))
            self._nccl.abort()
            self.shutdown()

    def fail(self, error: BaseException) -> None:
        """Leave the group because of `error`, so that its peers raise `PeerLost`.

        The peers in all other groups of this process do so too; those groups become unusable.
        """
        if not self._native.closed:
            lifetime.fail_all_groups(error)
            self._nccl.abort()
            self.shutdown()

    def stop_threads(self, grace_seconds: float | None = None) -> None:
        """End the group's threads; operations that do not end in time abort the group.

        Args:
            grace_seconds: The time for operations to end, in seconds; two if None.
        """
        if not self._collective_thread.stop(
            _STOP_SECONDS if grace_seconds is None else grace_seconds
        ):
            self._native.abort("it left with an operation in progress")
            self._collective_thread.stop(_STOP_SECONDS)
        self._message_thread.stop(_STOP_SECONDS)

    def replace_native(self, native: Any) -> None:
        """Replace the native group by another object (see `lifetime`)."""
        self._native = native


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


def host_ranks(group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Return the ranks of a group by host; the ranks in one list share memory. Never blocks.

    On the backend "phalanx", the ranks proved this to each other when the group was formed. On
    other backends it is unknown, and each rank counts as a host of its own.

    Args:
        group: The group; None for the default group.

    Returns:
        A list of ranks in ascending order for each host, numbered as in the default group. Hosts
        are in order of their lowest rank.

    Raises:
        UsageError: There is no process group, or this rank is not in `group`.
    """
    if not dist.is_initialized():
        raise UsageError("host_ranks: no process group, expected one: call phalanx.init() first")
    if dist.get_rank(group) < 0:
        raise UsageError("host_ranks: this rank is not a member of the group given")
    ranks = dist.get_process_group_ranks(group)
    actual = group or dist.group.WORLD
    if not isinstance(actual, Membership):
        return [[rank] for rank in ranks]
    return [[ranks[member] for member in host] for host in actual.hosts]
