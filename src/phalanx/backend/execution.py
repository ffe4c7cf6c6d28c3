"""The execution of collectives in the caller's or the group's thread, with profiler events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed import Work

from phalanx import _native, torch_versions
from phalanx.backend import known_failures, operands
from phalanx.backend.autograd import is_followed, warn_of_backward
from phalanx.backend.call_site import call_site, short_site
from phalanx.backend.collectives import NativeCall
from phalanx.backend.failure import status_error, wait_timeout_error
from phalanx.backend.instrumentation import (
    OperatorCall,
    has_wrapper,
    record_call,
    run_observed,
)
from phalanx.backend.membership import Membership, propagate_deadlock
from phalanx.backend.operands import OP_NAMES, copy_back, format_tensor
from phalanx.backend.work import CollectiveWork, FinishedWork, timeout_seconds
from phalanx.errors import PhalanxError
from phalanx.torch_versions import active_mode_count, is_profiling

Pairs = list[tuple[torch.Tensor, torch.Tensor]]

_Operation = tuple[str, torch.Tensor | None, int, int]
"""An operation, for messages: its name, its tensor, the core's code of its operator, its root."""

DONE = FinishedWork([])
"""The work of every collective that has ended when its call returns."""
_SMALL_BYTES = 256 * 1024


class CollectiveExecutor:
    """The execution of a group's collectives, one after another in the order of their calls.

    Args:
        membership: The membership of this rank in the group.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def run(
        self,
        name: str,
        call: NativeCall,
        subject: torch.Tensor | None,
        opts: Any,
        outputs: Pairs,
        operator: OperatorCall | None,
        op: int = 0,
        root: int = -1,
        keep_alive: object = None,
        inputs: Sequence[torch.Tensor] | None = None,
    ) -> Work:
        """Run now, or in the group's thread if asynchronous or if others are queued there.

        Args:
            name: The name of the operation.
            call: The native call.
            subject: The tensor that stands for the operation in messages; None for a barrier.
            opts: The options of the operation.
            outputs: Pairs of the user's tensor and the contiguous one that the core writes.
            operator: The operation as dispatch modes see it; None if they have seen it.
            op: The core's code of the reduction operator; 0 if there is none.
            root: The root; -1 if there is none.
            keep_alive: An object that must live until the operation has ended.
            inputs: The tensors whose shapes the profiler records; `subject` if None.
        """
        if operator is not None and (
            active_mode_count()
            or is_profiling()
            or (operands.has_met_wrapper and has_wrapper(operator))
        ):
            if inputs is None:
                inputs = [] if subject is None else [subject]
            # All forms of an operation have one name, as in PyTorch's backends.
            kind = name.removesuffix("_coalesced").removesuffix("_single")
            event = f"{operator[0].name()}:{kind}", inputs
            # A closure here would cost every call the cells of its variables.
            arguments = subject, opts, outputs, None, op, root, keep_alive
            run = partial(self._run_recorded, event, name, call, *arguments)
            return run_observed(operator, inputs, run)
        if operator is not None and is_followed(operator):
            arguments = subject, opts, outputs, None, op, root, keep_alive
            work = CollectiveExecutor.run(self, name, call, *arguments)  # as in _run_recorded
            warn_of_backward(operator)
            return work
        membership = self._membership
        timeout = timeout_seconds(opts.timeout, membership.timeout)
        if opts.asyncOp or membership.pending:
            operation = name, subject, op, root
            return self._enqueue(operation, call, opts, outputs, keep_alive, timeout)
        status = call(timeout)
        if status is not None:
            error = self.error(status, (name, subject, op, root), timeout, call_site())
            raise known_failures.seen(error)
        for tensor, flat in outputs:
            copy_back(tensor, flat)
        return DONE

    def _run_recorded(
        self,
        event: tuple[str, Sequence[torch.Tensor]],
        name: str,
        call: NativeCall,
        *arguments: Any,
    ) -> Work:
        """Run an operation that dispatch modes have seen, with an event of the profiler."""
        recorded = record_call(*event, call) if is_profiling() else call
        # Not `self.run`, which fault injection may have wrapped: it would count the call twice.
        return CollectiveExecutor.run(self, name, recorded, *arguments)

    def _enqueue(
        self,
        operation: _Operation,
        call: NativeCall,
        opts: Any,
        outputs: Pairs,
        keep_alive: object,
        timeout: float,
    ) -> Work:
        site_number, call_time = _native.call_site(), time.monotonic()
        membership, subject = self._membership, operation[1]
        thread = membership.collective_thread

        def run(_keep_alive: object = keep_alive) -> None:
            if thread.is_current():  # it acts for the caller
                _native.set_caller(site_number)
            status = call(timeout)
            if status is not None:
                site = short_site(_native.call_site_text(site_number))
                raise self.error(status, operation, timeout, site)
            for tensor, flat in outputs:
                copy_back(tensor, flat)

        def wait_error(seconds: float, has_begun: bool) -> PhalanxError:
            site = short_site(_native.call_site_text(site_number))
            description = self._describe(operation, site, has_begun)
            return wait_timeout_error(membership, description, seconds, call_time)

        results = [tensor for tensor, _ in outputs] or ([] if subject is None else [subject])
        work = CollectiveWork(run, results, membership.native, wait_error, thread)
        self._dispatch(work, may_run_here=opts.asyncOp and _is_small(subject))
        if membership.coalesced_works is not None:
            membership.coalesced_works.append(work)
        if not opts.asyncOp:
            work.wait()
        return work

    def _dispatch(self, work: CollectiveWork, *, may_run_here: bool) -> None:
        """Run an operation in this thread, or leave it to the group's.

        If all other ranks already wait for it, there is nothing left to overlap with. For a small
        operation, the switch to another thread and back takes longer than the operation.
        """
        membership = self._membership
        if may_run_here:
            if not membership.pending and membership.native.is_awaited():
                _run_here(work, work.execute)
                return
            if self._defer(work):
                return
        membership.collective_thread.submit(work.execute)

    def _defer(self, work: CollectiveWork) -> bool:
        """Leave an operation to the end of the current backward pass; False if there is none.

        DDP waits for it there. The caller's own thread then runs it, unless anything waits for it
        before, or the end is far. Not in the callbacks at the end, in which DDP may wait at once.
        """
        thread = self._membership.collective_thread
        if (
            not isinstance(self._membership.native, _native.Group)  # other hosts are worth overlap
            or torch_versions.backward_node() is None
            or not thread.defer(work.execute)
        ):
            return False
        torch_versions.call_after_backward(partial(_run_here, work, thread.run_deferred))
        return True

    def error(
        self, status: _native.Status, operation: _Operation, timeout: float, site: str
    ) -> PhalanxError:
        """Return the error of an operation that ended with a status."""
        description = self._describe(operation, site)
        native = self._membership.native
        propagate_deadlock(native)
        return status_error(status, native, self._membership, description, timeout)

    def _describe(self, operation: _Operation, site: str, has_begun: bool = True) -> str:
        """Return text for an operation in progress, or a queued one, which has no number yet."""
        name, subject, op, root = operation
        native = self._membership.native
        if not has_begun:
            parts = [f"queued {name}"]
        else:  # another thread may have left the group in the meantime
            parts = [name if native.closed else f"{name} #{native.sequence}"]
        if subject is not None:
            parts.append(format_tensor(subject))
        if op:
            parts.append(OP_NAMES[op])
        if root >= 0:
            parts.append(f"root {root}")
        return f"{' '.join(parts)} at {site}"


def _is_small(subject: torch.Tensor | None) -> bool:
    """Return whether an operation takes less time than a switch to another thread and back."""
    return subject is None or subject.numel() * subject.element_size() <= _SMALL_BYTES


def _run_here(work: CollectiveWork, run: Callable[[], None]) -> None:
    run()
    if isinstance(work.error, KeyboardInterrupt):
        raise known_failures.seen(work.error)
