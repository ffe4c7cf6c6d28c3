"""The execution of collectives in the caller's or the group's thread, with profiler events."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from phalanx import _native
from phalanx.backend import lifetime
from phalanx.backend.call_site import call_site, short_site
from phalanx.backend.failure import status_error, wait_timeout_error
from phalanx.backend.instrumentation import (
    EVENT_NAMES,
    OperatorCall,
    active_mode_count,
    is_profiling,
    is_wrapper,
    record_call,
    record_event,
    run_through_operator,
)
from phalanx.backend.messages import Messages
from phalanx.backend.operands import OP_NAMES, copy_back, format_tensor
from phalanx.backend.work import (
    CollectiveWork,
    CompositeWork,
    FinishedWork,
    timeout_seconds,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from phalanx.errors import PhalanxError

NativeCall = Callable[[float], "_native.Status | None"]
Pairs = list[tuple[torch.Tensor, torch.Tensor]]

_DONE = FinishedWork([])
_PLAIN = (torch.Tensor, type(None))
"""Types that are never wrappers, which saves each operation a closer check."""
_SMALL_BYTES = 256 * 1024


class CollectiveExecutor(Messages):
    """A group whose collectives run one after another, in the order of their calls."""

    def _run_collective(
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
    ) -> dist.Work:
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
        if (
            active_mode_count()
            or is_profiling()
            or (type(subject) not in _PLAIN and is_wrapper(subject))
        ):
            if operator is not None:
                execute = partial(self._run_collective, name, call, subject, opts, outputs, None)
                run = partial(execute, op, root, keep_alive, inputs)
                if active_mode_count() or is_wrapper(subject):
                    return run_through_operator(self, operator, run)
                with record_event(EVENT_NAMES[operator[0]], _profiled_tensors(subject, inputs)):
                    return run()
            if is_profiling():
                call = self._record_call(name, call, _profiled_tensors(subject, inputs))
        timeout = timeout_seconds(opts.timeout, self._timeout)
        if opts.asyncOp or self._collective_thread.pending:
            return self._enqueue(name, call, subject, opts, outputs, op, root, keep_alive, timeout)
        status = call(timeout)
        if status is not None:
            raise self._collective_error(status, name, subject, op, root, timeout, call_site())
        for tensor, flat in outputs:
            if flat is not tensor:
                copy_back(tensor, flat)
        return _DONE

    def _enqueue(
        self,
        name: str,
        call: NativeCall,
        subject: torch.Tensor | None,
        opts: Any,
        outputs: Pairs,
        op: int,
        root: int,
        keep_alive: object,
        timeout: float,
    ) -> dist.Work:
        site_number, call_time = _native.call_site(), time.monotonic()
        runs_inline = self._can_run_inline(subject)

        def run(_keep_alive: object = keep_alive) -> None:
            if not runs_inline:  # the group's thread acts for the caller
                _native.set_caller(site_number)
            status = call(timeout)
            if status is not None:
                site = short_site(_native.call_site_text(site_number))
                raise self._collective_error(status, name, subject, op, root, timeout, site)
            for tensor, flat in outputs:
                copy_back(tensor, flat)

        def wait_error(seconds: float, has_begun: bool) -> PhalanxError:
            site = short_site(_native.call_site_text(site_number))
            operation = self._describe(
                name if has_begun else f"queued {name}", subject, op, root, site, has_begun
            )
            return wait_timeout_error(
                self._native, self._rank, self._rank_label, operation, seconds, call_time
            )

        results = [tensor for tensor, _ in outputs] or ([] if subject is None else [subject])
        work = CollectiveWork(run, results, self._native, wait_error)
        if runs_inline:
            work.execute()
            if isinstance(error := work.exception(), KeyboardInterrupt):
                raise error
        else:
            self._collective_thread.submit(work.execute)
        if self._coalesced_works is not None:
            self._coalesced_works.append(work)
        if not opts.asyncOp:
            work.wait()
        return work

    def _can_run_inline(self, subject: torch.Tensor | None) -> bool:
        """Return whether an asynchronous operation may as well run at once in this thread.

        If all other ranks already wait for it, there is nothing left to overlap with. For a small
        operation, the switch to another thread and back takes longer than the operation.
        """
        is_small = subject is None or subject.numel() * subject.element_size() <= _SMALL_BYTES
        return is_small and not self._collective_thread.pending and self._native.is_awaited()

    def _collective_error(
        self,
        status: _native.Status,
        name: str,
        subject: torch.Tensor | None,
        op: int,
        root: int,
        timeout: float,
        site: str,
    ) -> PhalanxError:
        operation = self._describe(name, subject, op, root, site)
        lifetime.propagate_deadlock(self._native)
        return status_error(status, self._native, self._rank_label, operation, timeout)

    def _describe(
        self,
        name: str,
        subject: torch.Tensor | None,
        op: int,
        root: int,
        site: str,
        has_begun: bool = True,
    ) -> str:
        """Return text for an operation in progress, or a queued one, which has no number yet."""
        native = self._native
        # Another thread may have left the group in the meantime.
        parts = [f"{name} #{native.sequence}" if has_begun and not native.closed else name]
        if subject is not None:
            parts.append(format_tensor(subject))
        if op:
            parts.append(OP_NAMES[op])
        if root >= 0:
            parts.append(f"root {root}")
        return f"{' '.join(parts)} at {site}"

    def _record_call(
        self, name: str, call: NativeCall, inputs: Sequence[torch.Tensor]
    ) -> NativeCall:
        # All forms of an operation have one name, as in PyTorch's backends.
        kind = name.removesuffix("_coalesced").removesuffix("_single")
        return record_call(f"{self.name()}:{kind}", inputs, call)

    def _start_coalescing(self, device: torch.device) -> None:  # noqa: ARG002 - PyTorch's signature
        self._coalesced_works = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:  # noqa: ARG002
        works, self._coalesced_works = self._coalesced_works or [], None
        return CompositeWork(works)

    # The names that PyTorch's C++ calls from 2.14 on.
    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing


def _profiled_tensors(
    subject: torch.Tensor | None, inputs: Sequence[torch.Tensor] | None
) -> Sequence[torch.Tensor]:
    """Return the tensors whose shapes the profiler records."""
    if inputs is not None:
        return inputs
    return [] if subject is None else [subject]


def divide_after(call: NativeCall, result: torch.Tensor, size: int) -> NativeCall:
    """Return a call that then divides its result by `size`, rounded towards zero."""

    def run(timeout: float) -> _native.Status | None:
        status = call(timeout)
        if status is None:
            with torch.inference_mode():
                result.div_(size, rounding_mode="trunc")
        return status

    return run


def run_sequentially(calls: Iterable[NativeCall]) -> NativeCall:
    """Return a call that makes all calls in order, each with the whole timeout, until one fails."""
    steps = list(calls)

    def run(timeout: float) -> _native.Status | None:
        for step in steps:
            status = step(timeout)
            if status is not None:
                return status
        return None

    return run
