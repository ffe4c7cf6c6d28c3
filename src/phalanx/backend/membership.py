"""What PyTorch asks of any process group: its name, its timeout, and how it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from phalanx.backend import lifetime
from phalanx.backend.cuda import NcclChild
from phalanx.backend.failure import left_behind
from phalanx.backend.progress import CollectiveThread, MessageThread
from phalanx.errors import UsageError
from phalanx.observe.escape import encodable

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import Store  # type: ignore[attr-defined]

    from phalanx import _native
    from phalanx.backend.work import MessageWork

_STOP_SECONDS = 2.0


class Membership(dist.ProcessGroup):
    """This rank's membership of a group: the native group, its threads, and leaving it."""

    # PyTorch asks a group's backend what it can; this group has none beside itself.
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

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
        self._place = f"rank {rank}/{size}"
        self._name = name
        self._desc = ""
        self._answers_to = "phalanx"
        self.hosts: tuple[tuple[int, ...], ...] = (tuple(range(size)),)
        """The ranks of each host."""
        self.engine = ""
        """What carries bytes between hosts, where there are several."""
        self._timeout = timeout.total_seconds()
        self._nccl = NcclChild(store, rank, size, timeout)
        self._collectives = CollectiveThread(f"phalanx-{name}-collectives")
        self._messages = MessageThread(f"phalanx-{name}-messages", native)
        self._kept: list[MessageWork] = []
        self._kept_limit = 64
        self._joined: list[dist.Work] | None = None  # while operations are coalesced
        lifetime.register(self)

    # What PyTorch asks of a group.

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        # For PyTorch's C++ alone: of a group with the name "gloo", it takes the Gloo backend.
        return "phalanx"

    def name(self) -> str:
        """The backend's name: "phalanx", or that of the backend in whose place the group is."""
        return self._answers_to

    def stand_in_for(self, name: str) -> None:
        """Answer to the name of another backend (see `replace`)."""
        self._answers_to = name

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

    def _has_hooks(self) -> bool:
        return False

    def _get_sequence_number_for_group(self) -> int:
        return self._native.sequence

    def _set_sequence_number_for_group(self) -> None:
        pass  # the core counts from the beginning

    def _wait_for_pending_works(self) -> None:
        self._collectives.drain()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long an operation may wait for its peers, from the next one on."""
        self._timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Leave the group: what runs ends within two seconds or is given up; peers are told."""
        native = self._native
        if not native.closed:
            self.quiesce()
            self._nccl.shutdown()
            native.close()
            self.replace_native(lifetime.left())
            for work in self._kept:
                work.give_up(left_behind(self._place, "a message"))
            self._kept.clear()

    def abort(self, reason: str = "") -> None:
        """Wake every rank out of what it waits for, with `Aborted`, and leave the group."""
        if not isinstance(reason, str):
            raise UsageError(f"abort: reason is {reason!r}, expected a text that says why")
        if not self._native.closed:
            self._native.abort(encodable(reason))
            self._nccl.abort()
            self.shutdown()

    def fail(self, error: BaseException) -> None:
        """Leave the group since `error` ended what this rank does: its peers raise `PeerLost`.

        So do those in all other groups of this process, which can't be used any more either.
        """
        if not self._native.closed:
            lifetime.fail(error)
            self._nccl.abort()
            self.shutdown()

    def quiesce(self, patience: float | None = None) -> None:
        """End the group's threads; operations that don't end in time abort the group.

        Args:
            patience: Seconds that they have, two if None.
        """
        if not self._collectives.stop(_STOP_SECONDS if patience is None else patience):
            self._native.abort("it left while an operation of its own was under way")
            self._collectives.stop(_STOP_SECONDS)
        self._messages.stop(_STOP_SECONDS)

    def replace_native(self, native: Any) -> None:
        """Put another object in the place of the native group (see `lifetime`)."""
        self._native = native
