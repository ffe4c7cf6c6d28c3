"""Send and recv of a process group."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist

from phalanx.backend.call_site import call_site
from phalanx.backend.dtypes import code_of
from phalanx.backend.failure import error_for
from phalanx.backend.membership import Membership
from phalanx.backend.operands import dense, label, only, settle
from phalanx.backend.profiling import begin_event, profiling
from phalanx.backend.work import MessageWork
from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from phalanx import _native

    Tensors = list[torch.Tensor]

_ANY_SOURCE = -1
# PyTorch's send is isend and wait; to know that the wait comes at once saves waking a thread.
_BLOCKING = frozenset(inspect.unwrap(call).__code__ for call in (dist.send, dist.recv))


class Messages(Membership):
    """A group of which any rank sends to any other, each message on its own."""

    def send(self, tensors: Tensors, dst: int, tag: int) -> dist.Work:
        """Send a tensor to a rank of the group; done when it stands in shared memory."""
        tensor = only(tensors, "send")
        peer = self._check_peer(dst, tag, "send")
        flat = dense(tensor, "send", written=False)
        return self._message("send", self._native.send, tensor, flat, peer, tag)

    def recv(self, tensors: Tensors, src: int, tag: int) -> dist.Work:
        """Receive a tensor of exactly this dtype and element count from a rank of the group."""
        tensor = only(tensors, "recv")
        peer = self._check_peer(src, tag, "recv")
        flat = dense(tensor, "recv", written=True)
        return self._message("recv", self._native.recv, tensor, flat, peer, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> dist.Work:
        """Receive from whichever rank sends first; `Work._source_rank()` tells which."""
        tensor = only(tensors, "recv")
        self._check_peer(self._rank, tag, "recv")
        flat = dense(tensor, "recv", written=True)
        return self._message("recv", self._native.recv, tensor, flat, _ANY_SOURCE, tag)

    def _message(
        self,
        name: str,
        post: Callable[..., _native.Message],
        tensor: torch.Tensor,
        flat: torch.Tensor,
        peer: int,
        tag: int,
    ) -> dist.Work:
        code = code_of(tensor.dtype, name)
        detached = not _called_blocking()
        end_event = None
        if profiling():
            event = "recvAnySource" if peer == _ANY_SOURCE else name
            end_event = begin_event(f"{self.name()}:{event}", [tensor])
        message = post(flat.data_ptr(), flat.numel(), code, peer, tag, detached)
        site = call_site() if detached else None
        native, timeout = self._native, self._timeout

        def end(status: _native.Status | None) -> BaseException | None:
            if end_event is not None:
                end_event()
            if status is None:
                if name == "recv":
                    settle(tensor, flat)
                return None
            where = f"{name} {label(tensor)} {self._other(name, peer)}at {site or call_site()}"
            return error_for(status, native, self._place, where, timeout)

        wait = partial(native.wait, message)
        work = MessageWork(message, wait, end, [tensor], self._messages, timeout)
        if detached and not work.is_completed():
            self._keep(work)
            self._messages.start()
        if self._joined is not None:
            self._joined.append(work)
        return work

    def _keep(self, work: MessageWork) -> None:
        """Hold on to a message, whose memory the core uses, until it is done."""
        self._kept.append(work)
        if len(self._kept) >= self._kept_limit:
            self._kept = [kept for kept in self._kept if not kept.is_completed()]
            self._kept_limit = max(64, 2 * len(self._kept))

    def _check_peer(self, peer: int, tag: int, name: str) -> int:
        if not 0 <= peer < self._size:
            raise UsageError(f"{name}: rank {peer}, expected a rank from 0 to {self._size - 1}")
        if not 0 <= tag < 2**31:
            raise UsageError(f"{name}: tag {tag}, expected 0 to {2**31 - 1}")
        return peer

    def _other(self, name: str, peer: int) -> str:
        if name == "send":
            return f"to rank {peer} "
        return "from any rank " if peer == _ANY_SOURCE else f"from rank {peer} "


def _called_blocking() -> bool:
    """Whether the caller of the method that calls this is `dist.send` or `dist.recv`."""
    frame = sys._getframe(3)
    for _ in range(3):
        if frame.f_code in _BLOCKING:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
