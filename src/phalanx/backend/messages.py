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
from phalanx.backend.call_site import call_site, short_site
from phalanx.backend.failure import format_peer, left_group_error, status_error
from phalanx.backend.instrumentation import (
    EVENT_NAMES,
    active_mode_count,
    begin_event,
    is_profiling,
    is_wrapper,
    record_event,
    run_through_operator,
)
from phalanx.backend.membership import Membership
from phalanx.backend.operands import (
    copy_back,
    dtype_code,
    format_tensor,
    prepare_input,
    prepare_output,
    single_tensor,
    warn_once,
)
from phalanx.backend.work import FinishedMessage, FinishedWork, MessageWork, Tensors
from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx import _native
    from phalanx.backend.instrumentation import OperatorCall
    from phalanx.errors import PhalanxError

_ANY_SOURCE = -1
_IS_WRAPPED = torch.version.cuda is not None  # by `cuda.delegate_cuda`, which adds a frame
# PyTorch's send is isend followed by wait.
_BLOCKING_CODES = frozenset(inspect.unwrap(call).__code__ for call in (dist.send, dist.recv))
# The result of a blocking call. Only PyTorch sees it, and waits for it.
_DONE = FinishedWork([])
# Bytes of private memory for messages that arrive before their recv, above which a warning is due.
_UNEXPECTED_BYTES_LIMIT = 256 * 2**20


class Messages(Membership):
    """A group in which any rank can send messages to any other.

    The operations complete for any order of isend and irecv on both sides. Messages of one source
    and tag keep their order. `dist.send` and `dist.recv` wait at once, so no handle is made.
    """

    def send(self, tensors: Tensors, dst: int, tag: int) -> dist.Work:
        """Send a tensor to a rank of the group; complete when the tensor is in shared memory."""
        blocking = _is_blocking()
        if active_mode_count() or is_profiling():
            run = partial(self._send, dst, tag, blocking, tensors)
            return self._run_observed("send", ("send", tensors, dst, tag), run)
        return self._send(dst, tag, blocking, tensors)

    def recv(self, tensors: Tensors, src: int, tag: int) -> dist.Work:
        """Receive a tensor of exactly this dtype and element count from a rank of the group."""
        _check_peer(src, self._size, "recv")
        blocking = _is_blocking()
        if active_mode_count() or is_profiling():
            run = partial(self._recv, src, tag, blocking, tensors)
            return self._run_observed("recv", ("recv", tensors, src, tag), run)
        return self._recv(src, tag, blocking, tensors)

    def recv_anysource(self, tensors: Tensors, tag: int) -> dist.Work:
        """Receive from any rank; `Work._source_rank()` returns the rank of the sender."""
        blocking = _is_blocking()
        run = partial(self._recv, _ANY_SOURCE, tag, blocking, tensors)
        if active_mode_count() or is_profiling():
            return self._run_observed("recvAnySource", ("recv_anysource", tensors, tag), run)
        return run()

    def _send(self, dst: int, tag: int, blocking: bool, tensors: Tensors) -> dist.Work:
        tensor = single_tensor(tensors, "send")
        _check_peer(dst, self._size, "send")
        _check_tag(tag, "send")
        if type(tensor) is not torch.Tensor and is_wrapper(tensor):
            return run_through_operator(self, ("send", [tensor], dst, tag), lambda: _DONE)
        flat = prepare_input(tensor, "send")
        code = dtype_code(tensor.dtype, "send")
        native = self._native
        if blocking:
            timeout = self._timeout
            status = native.send(flat.data_ptr(), flat.numel(), code, dst, tag, timeout)
            if status is not None:
                raise self._message_error(
                    native, "send", tensor, dst, tag, timeout, call_site(), status
                )
            return _DONE
        message = native.isend(flat.data_ptr(), flat.numel(), code, dst, tag)
        return self._make_message_work("send", native, message, tensor, flat, dst, tag)

    def _recv(self, src: int, tag: int, blocking: bool, tensors: Tensors) -> dist.Work:
        tensor = single_tensor(tensors, "recv")
        _check_tag(tag, "recv")
        if type(tensor) is not torch.Tensor and is_wrapper(tensor):
            operator: OperatorCall = ("recv", [tensor], src, tag)
            if src == _ANY_SOURCE:
                operator = ("recv_anysource", [tensor], tag)
            return run_through_operator(self, operator, lambda: _DONE)
        flat = prepare_output(tensor, "recv")
        code = dtype_code(tensor.dtype, "recv")
        native = self._native
        if not blocking:
            message = native.irecv(flat.data_ptr(), flat.numel(), code, src, tag)
            return self._make_message_work("recv", native, message, tensor, flat, src, tag)
        timeout = self._timeout
        source = native.recv(flat.data_ptr(), flat.numel(), code, src, tag, timeout)
        if not isinstance(source, int):
            raise self._message_error(
                native, "recv", tensor, src, tag, timeout, call_site(), source
            )
        _finish_recv(native, tensor, flat)
        return _DONE if src >= 0 else FinishedMessage([tensor], source)

    def _make_message_work(
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
                _finish_recv(native, tensor, flat)
            return FinishedMessage([tensor], message.peer)
        timeout = self._timeout
        site_number = call_site_number()

        def on_done(status: _native.Status | None, seconds: float) -> BaseException | None:
            self._active_messages.discard(work)
            if status is not None:
                site = short_site(call_site_text(site_number))
                return self._message_error(native, name, tensor, peer, tag, seconds, site, status)
            if name == "recv":
                _finish_recv(native, tensor, flat)
            return None

        work = MessageWork(message, native, on_done, [tensor], self._message_thread, timeout)
        self._keep_alive(work)
        self._message_thread.start()
        if self._coalesced_works is not None:
            self._coalesced_works.append(work)
        return work

    def _run_observed(
        self, kind: str, operator: OperatorCall, run: Callable[[], dist.Work]
    ) -> dist.Work:
        """Run a message operation in view of dispatch modes or the profiler."""
        if is_profiling():
            run = partial(self._run_profiled, kind, operator[1], run)
        if active_mode_count():
            return run_through_operator(self, operator, run)
        with record_event(EVENT_NAMES[operator[0]], operator[1]):
            return run()

    def _run_profiled(self, kind: str, tensors: Tensors, run: Callable[[], dist.Work]) -> dist.Work:
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

    def _keep_alive(self, work: MessageWork) -> None:
        """Keep a message alive until it is done, since the core uses its memory."""
        self._active_messages.add(work)
        if len(self._active_messages) >= self._active_messages_limit:
            for message in list(self._active_messages):
                message.is_completed()  # removes it if so
            self._active_messages_limit = max(64, 2 * len(self._active_messages))

    def _message_error(
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
        operation = f"{name} {format_tensor(tensor)} {format_peer(name, peer, tag)} at {site}"
        if status.code == "left" and status.peer == self._rank:
            return left_group_error(self._rank_label, operation)
        lifetime.propagate_deadlock(native)
        return status_error(status, native, self._rank_label, operation, timeout)


def _check_peer(peer: int, size: int, name: str) -> None:
    if not 0 <= peer < size:
        raise UsageError(f"{name}: rank {peer}, expected a rank from 0 to {size - 1}")


def _check_tag(tag: int, name: str) -> None:
    if not 0 <= tag < 2**31:
        raise UsageError(f"{name}: tag {tag}, expected 0 to {2**31 - 1}")


def _finish_recv(native: _native.Group, tensor: torch.Tensor, flat: torch.Tensor) -> None:
    copy_back(tensor, flat)
    if native.unexpected_peak > _UNEXPECTED_BYTES_LIMIT:
        warn_once(
            "early",
            f"{native.unexpected_peak >> 20} MiB of messages arrived before their recv, and "
            "took private memory: receive in the order in which the other rank sends",
        )


def _is_blocking() -> bool:
    """Return whether `dist.send` or `dist.recv` called the caller, by way of isend or irecv."""
    caller = sys._getframe(1).f_back
    if _IS_WRAPPED:
        caller = caller and caller.f_back
    caller = caller and caller.f_back
    return caller is not None and caller.f_code in _BLOCKING_CODES
