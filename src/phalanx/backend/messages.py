"""The send and recv operations of a process group."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from phalanx import _native
from phalanx.backend import known_failures
from phalanx.backend.call_site import call_site, short_site
from phalanx.backend.failure import left_group_error, status_error
from phalanx.backend.instrumentation import (
    OperatorCall,
    begin_event,
    is_wrapper,
    run_observed,
)
from phalanx.backend.membership import Membership, propagate_deadlock
from phalanx.backend.operands import (
    copy_back,
    dtype_code,
    format_tensor,
    prepare_input,
    prepare_output,
    single_tensor,
    warn_once,
)
from phalanx.backend.work import FinishedWork, MessageWork
from phalanx.diagnosis.formatting import format_peer
from phalanx.errors import PhalanxError, UsageError
from phalanx.torch_versions import is_profiling

ANY_SOURCE = -1
_IS_WRAPPED = torch.version.cuda is not None  # by `cuda.delegate_cuda`, which adds a frame
# PyTorch's send is isend followed by wait.
_BLOCKING_CODES = frozenset(inspect.unwrap(call).__code__ for call in (dist.send, dist.recv))
# The result of a blocking call. Only PyTorch sees it, and waits for it.
_DONE = FinishedWork([])
# Bytes of private memory for messages that arrive before their recv, above which a warning is due.
_UNEXPECTED_BYTES_LIMIT = 256 * 2**20


class Messages:
    """The messages of a group, in which any rank can send to any other.

    The operations complete for any order of isend and irecv on both sides. Messages of one source
    and tag keep their order. `dist.send` and `dist.recv` wait at once, so no handle is made.

    Args:
        membership: The membership of this rank in the group.
        size: World size of the group.
    """

    def __init__(self, membership: Membership, size: int) -> None:
        self._membership = membership
        self._size = size
        self._active_limit = 64

    def send(self, operator: OperatorCall, dst: int, tag: int, blocking: bool) -> dist.Work:
        """Send a tensor; the operator call holds it in a list."""
        tensor = single_tensor(operator[2], "send")
        check_peer(dst, self._size, "send")
        _check_tag(tag, "send")
        if type(tensor) is not torch.Tensor and is_wrapper(tensor):
            return run_observed((*operator[:2], [tensor], dst, tag), [tensor], lambda: _DONE)
        flat = prepare_input(tensor, "send")
        code = dtype_code(tensor.dtype, "send")
        native = self._membership.native
        if blocking:
            timeout = self._membership.timeout
            status = native.send(flat.data_ptr(), flat.numel(), code, dst, tag, timeout)
            if status is not None:
                error = self.error(native, "send", tensor, dst, tag, timeout, call_site(), status)
                raise known_failures.seen(error)
            return _DONE
        message = native.isend(flat.data_ptr(), flat.numel(), code, dst, tag)
        return self._make_work("send", native, message, tensor, flat, dst, tag)

    def recv(self, operator: OperatorCall, src: int, tag: int, blocking: bool) -> dist.Work:
        """Receive a tensor; the operator call holds it in a list."""
        tensor = single_tensor(operator[2], "recv")
        _check_tag(tag, "recv")
        if type(tensor) is not torch.Tensor and is_wrapper(tensor):
            return run_observed((*operator[:2], [tensor], *operator[3:]), [tensor], lambda: _DONE)
        flat = prepare_output(tensor, "recv")
        code = dtype_code(tensor.dtype, "recv")
        native = self._membership.native
        if not blocking:
            message = native.irecv(flat.data_ptr(), flat.numel(), code, src, tag)
            return self._make_work("recv", native, message, tensor, flat, src, tag)
        timeout = self._membership.timeout
        source = native.recv(flat.data_ptr(), flat.numel(), code, src, tag, timeout)
        if not isinstance(source, int):
            error = self.error(native, "recv", tensor, src, tag, timeout, call_site(), source)
            raise known_failures.seen(error)
        _finish_recv(native, tensor, flat)
        return _DONE if src >= 0 else FinishedWork([tensor], source)

    def run_observed(
        self, event: str, operator: OperatorCall, run: Callable[[], dist.Work]
    ) -> dist.Work:
        """Run a message operation in view of dispatch modes or the profiler."""
        tensors = operator[2]

        def run_profiled() -> dist.Work:
            end = begin_event(f"{operator[0].name()}:{event}", list(tensors))
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

        return run_observed(operator, tensors, run_profiled if is_profiling() else run)

    def abandon(self) -> None:
        """End the works of all messages, whose group this rank has left."""
        for work in list(self._membership.messages):
            work.abandon(left_group_error(self._membership, "a message"))
        self._membership.messages.clear()

    def _make_work(
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
            return FinishedWork([tensor], message.peer)
        membership = self._membership
        site_number = _native.call_site()

        def on_done(status: _native.Status | None, seconds: float) -> BaseException | None:
            membership.messages.discard(work)
            if status is not None:
                site = short_site(_native.call_site_text(site_number))
                return self.error(native, name, tensor, peer, tag, seconds, site, status)
            if name == "recv":
                _finish_recv(native, tensor, flat)
            return None

        thread = membership.message_thread
        work = MessageWork(
            message,
            native,
            on_done,
            [tensor],
            thread,
            membership.timeout,
            is_send=name == "send",
        )
        self._keep_alive(work)
        thread.start()
        if membership.coalesced_works is not None:
            membership.coalesced_works.append(work)
        return work

    def _keep_alive(self, work: MessageWork) -> None:
        """Keep a message alive until it is done, since the core uses its memory."""
        active = self._membership.messages
        active.add(work)
        if len(active) >= self._active_limit:
            for message in list(active):
                message.is_completed()  # removes it if so
            self._active_limit = max(64, 2 * len(active))

    def error(
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
        """Return the error of a message that ended with a status."""
        operation = f"{name} {format_tensor(tensor)} {format_peer(name, peer, tag)} at {site}"
        membership = self._membership
        if status.code == "left" and status.peer == membership.rank:
            return left_group_error(membership, operation)
        propagate_deadlock(native)
        return status_error(status, native, membership, operation, timeout)


def check_peer(peer: int, size: int, name: str) -> None:
    """Check that a rank is one of the group."""
    if not 0 <= peer < size:
        raise UsageError(f"{name}: rank {peer}, expected a rank from 0 to {size - 1}")


def _check_tag(tag: int, name: str) -> None:
    if not 0 <= tag < 2**31:
        raise UsageError(f"{name}: tag {tag}, expected 0 to {2**31 - 1}")


def _finish_recv(native: _native.Group, tensor: torch.Tensor, flat: torch.Tensor) -> None:
    copy_back(tensor, flat)
    check_unexpected(native)


def check_unexpected(native: _native.Group) -> None:
    """Warn once if messages that arrived before their recv took much memory."""
    if native.unexpected_peak > _UNEXPECTED_BYTES_LIMIT:
        warn_once(
            "early",
            f"{native.unexpected_peak >> 20} MiB of messages arrived before their recv, and "
            "took private memory: receive in the order in which the other rank sends",
        )


def is_blocking() -> bool:
    """Return whether `dist.send` or `dist.recv` called the caller, by way of isend or irecv."""
    caller = sys._getframe(1).f_back
    if _IS_WRAPPED:
        caller = caller and caller.f_back
    caller = caller and caller.f_back
    return caller is not None and caller.f_code in _BLOCKING_CODES
