"""The send and recv operations of a process group."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from phalanx._native import call_site as call_site_number
from phalanx._native import call_site_text
from phalanx.backend import lifetime
from phalanx.backend.call_site import brief, call_site
from phalanx.backend.dtypes import code_of
from phalanx.backend.failure import error_for, left_behind, other_end
from phalanx.backend.membership import Membership
from phalanx.backend.operands import dense, label, only, settle, tell_once, writable
from phalanx.backend.operators import EVENTS, active_modes, is_wrapper, through_operator
from phalanx.backend.profiling import begin_event, event, profiling
from phalanx.backend.work import FinishedMessage, FinishedWork, MessageWork
from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx import _native
    from phalanx.backend.operators import Operator
    from phalanx.errors import PhalanxError

    Tensors = list[torch.Tensor]

_ANY_SOURCE = -1
_IS_WRAPPED = torch.version.cuda is not None  # by `cuda.handing_over`, which adds a frame
# PyTorch's send is isend followed by wait.
_BLOCKING = frozenset(inspect.unwrap(call).__code__ for call in (dist.send, dist.recv))
# The result of a blocking call. Only PyTorch sees it, and waits for it.
_DONE = FinishedWork([])
# Bytes of private memory for messages that arrive before their recv, above which a warning is due.
_MUCH_EARLY = 256 * 2**20


class Messages(Membership):
    """A group in which any rank can send messages to any other.

    The operations complete for any order of isend and irecv on both sides. Messages of one source
    and tag keep their order. `dist.send` and `dist.recv` wait at once, so no handle is made.
    """

    def send(self, tensors: Tensors, dst: int, tag: int) -> dist.Work:
        """Send a tensor to a rank of the group; complete when the tensor is in shared memory."""
        blocking = _is_blocking()
        if active_modes() or profiling():
            run = partial(self._send, dst, tag, blocking, tensors)
            return self._observed("send", ("send", tensors, dst, tag), run)
        return self._send(dst, tag, blocking, tensors)

    def recv(self, tensors: Tensors, src: int, tag: int) -> dist.Work:
        """Receive a tensor of exactly this dtype and element count from a rank of the group."""
        _check_peer(src, self._size, "recv")
        blocking = _is_blocking()
        if active_modes() or profiling():
            run = partial(self._recv, src, tag, blocking, tensors)
            return self._observed("recv", ("recv", tensors, src, tag), run)
        return self._recv(src, tag, blocking, tensors)

    def recv_anysource(self, tensors: Tensors, tag: int) -> dist.Work:
        """Receive from any rank; `Work._source_rank()` returns the rank of the sender."""
        blocking = _is_blocking()
        run = partial(self._recv, _ANY_SOURCE, tag, blocking, tensors)
        if active_modes() or profiling():
            return self._observed("recvAnySource", ("recv_anysource", tensors, tag), run)
        return run()

    def _send(self, dst: int, tag: int, blocking: bool, tensors: Tensors) -> dist.Work:
        tensor = only(tensors, "send")
        _check_peer(dst, self._size, "send")
        _check_tag(tag, "send")
        if type(tensor) is not torch.Tensor and is_wrapper(tensor):
            return through_operator(self, ("send", [tensor], dst, tag), lambda: _DONE)
        flat = dense(tensor, "send")
        code = code_of(tensor.dtype, "send")
        native = self._native
        if blocking:
            timeout = self._timeout
            status = native.send(flat.data_ptr(), flat.numel(), code, dst, tag, timeout)
            if status is not None:
                raise self._failure(native, "send", tensor, dst, tag, timeout, call_site(), status)
            return _DONE
        message = native.isend(flat.data_ptr(), flat.numel(), code, dst, tag)
        return self._under_way("send", native, message, tensor, flat, dst, tag)

    def _recv(self, src: int, tag: int, blocking: bool, tensors: Tensors) -> dist.Work:
        tensor = only(tensors, "recv")
        _check_tag(tag, "recv")
        if type(tensor) is not torch.Tensor and is_wrapper(tensor):
            operator: Operator = ("recv", [tensor], src, tag)
            if src == _ANY_SOURCE:
                operator = ("recv_anysource", [tensor], tag)
            return through_operator(self, operator, lambda: _DONE)
        flat = writable(tensor, "recv")
        code = code_of(tensor.dtype, "recv")
        native = self._native
        if not blocking:
            message = native.irecv(flat.data_ptr(), flat.numel(), code, src, tag)
            return self._under_way("recv", native, message, tensor, flat, src, tag)
        timeout = self._timeout
        source = native.recv(flat.data_ptr(), flat.numel(), code, src, tag, timeout)
        if not isinstance(source, int):
            raise self._failure(native, "recv", tensor, src, tag, timeout, call_site(), source)
        _received(native, tensor, flat)
        return _DONE if src >= 0 else FinishedMessage([tensor], source)

    def _under_way(
        self,
        name: str,
        native: _native.Group,
        message: _native.Message,
        tensor: torch.Tensor,
        flat: torch.Tensor,
        peer: int,
        tag: int,
    ) -> dist.Work:
        """Return the work of a message that was posted and may still be in progress."""
        if message.done and message.status is None:
            if name == "recv":
                _received(native, tensor, flat)
            return FinishedMessage([tensor], message.peer)
        timeout = self._timeout
        place = call_site_number()

        def end(status: _native.Status | None, seconds: float) -> BaseException | None:
            self._kept.discard(work)
            if status is not None:
                site = brief(call_site_text(place))
                return self._failure(native, name, tensor, peer, tag, seconds, site, status)
            if name == "recv":
                _received(native, tensor, flat)
            return None

        work = MessageWork(message, native, end, [tensor], self._messages, timeout)
        self._keep(work)
        self._messages.start()
        if self._joined is not None:
            self._joined.append(work)
        return work

    def _observed(self, kind: str, operator: Operator, run: Callable[[], dist.Work]) -> dist.Work:
        """Run a message operation in view of dispatch modes or the profiler."""
        if profiling():
            run = partial(self._profiled_message, kind, operator[1], run)
        if active_modes():
            return through_operator(self, operator, run)
        with event(EVENTS[operator[0]], operator[1]):
            return run()

    def _profiled_message(
        self, kind: str, tensors: Tensors, run: Callable[[], dist.Work]
    ) -> dist.Work:
        end = begin_event(f"{self.name()}:{kind}", list(tensors))
        try:
            work = run()
        except BaseException:
            end()
            raise
        if isinstance(work, FinishedWork):
            end()
        else:
            work.get_future().add_done_callback(lambda _future: end())
        return work

    def _keep(self, work: MessageWork) -> None:
        """Keep a message alive until it is done, since the core uses its memory."""
        self._kept.add(work)
        if len(self._kept) >= self._kept_limit:
            for kept in list(self._kept):
                kept.is_completed()  # removes it if so
            self._kept_limit = max(64, 2 * len(self._kept))

    def _failure(
        self,
        native: _native.Group,
        name: str,
        tensor: torch.Tensor,
        peer: int,
        tag: int,
        timeout: float,
        site: str,
        status: _native.Status,
    ) -> PhalanxError:
        what = f"{name} {label(tensor)} {other_end(name, peer, tag)} at {site}"
        if status.code == "left" and status.peer == self._rank:
            return left_behind(self._place, what)
        lifetime.failed(native)
        return error_for(status, native, self._place, what, timeout)


def _check_peer(peer: int, size: int, name: str) -> None:
    if not 0 <= peer < size:
        raise UsageError(f"{name}: rank {peer}, expected a rank from 0 to {size - 1}")


def _check_tag(tag: int, name: str) -> None:
    if not 0 <= tag < 2**31:
        raise UsageError(f"{name}: tag {tag}, expected 0 to {2**31 - 1}")


def _received(native: _native.Group, tensor: torch.Tensor, flat: torch.Tensor) -> None:
    settle(tensor, flat)
    if native.unexpected_peak > _MUCH_EARLY:
        tell_once(
            "early",
            f"{native.unexpected_peak >> 20} MiB of messages came before they were asked for, and "
            "took private memory: receive in the order in which the other rank sends",
        )


def _is_blocking() -> bool:
    """Return whether `dist.send` or `dist.recv` called the caller, by way of isend or irecv."""
    caller = sys._getframe(1).f_back
    if _IS_WRAPPED:
        caller = caller and caller.f_back
    caller = caller and caller.f_back
    return caller is not None and caller.f_code in _BLOCKING
