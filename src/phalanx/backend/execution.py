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
from phalanx.backend.call_site import brief, call_site
from phalanx.backend.dtypes import OP_NAMES
from phalanx.backend.failure import error_for, unfinished
from phalanx.backend.messages import Messages
from phalanx.backend.operands import label, settle
from phalanx.backend.operators import EVENTS, Operator, active_modes, is_wrapper, through_operator
from phalanx.backend.profiling import event, profiled, profiling
from phalanx.backend.work import CollectiveWork, FinishedWork, JointWork, seconds_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from phalanx.errors import PhalanxError

Tensors = list[torch.Tensor]
NativeCall = Callable[[float], "_native.Status | None"]
Pairs = list[tuple[torch.Tensor, torch.Tensor]]

_DONE = FinishedWork([])
_PLAIN = (torch.Tensor, type(None))
"""Types that are never wrappers, which saves each operation a closer check."""
_SMALL_BYTES = 256 * 1024


class Running(Messages):
    """A group whose collectives run one after another, in the order of their calls."""

    def _collective(
        self,
        name: str,
        call: NativeCall,
        subject: torch.Tensor | None,
        opts: Any,
        outputs: Pairs,
        operator: Operator | None,
        op: int = 0,
        root: int = -1,
        keep: object = None,
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
            keep: An object that must live until the operation has ended.
            inputs: The tensors whose shapes the profiler records; `subject` if None.
        """
        if active_modes() or profiling() or (type(subject) not in _PLAIN and is_wrapper(subject)):
            if operator is not None:
                again = partial(self._collective, name, call, subject, opts, outputs, None)
                run = partial(again, op, root, keep, inputs)
                if active_modes() or is_wrapper(subject):
                    return through_operator(self, operator, run)
                with event(EVENTS[operator[0]], _inputs(subject, inputs)):
                    return run()
            if profiling():
                call = self._profiled(name, call, _inputs(subject, inputs))
        timeout = seconds_of(opts.timeout, self._timeout)
        if opts.asyncOp or self._collectives.pending:
            return self._queued(name, call, subject, opts, outputs, op, root, keep, timeout)
        status = call(timeout)
        if status is not None:
            raise self._failed(status, name, subject, op, root, timeout, call_site())
        for tensor, flat in outputs:
            if flat is not tensor:
                settle(tensor, flat)
        return _DONE

    def _queued(
        self,
        name: str,
        call: NativeCall,
        subject: torch.Tensor | None,
        opts: Any,
        outputs: Pairs,
        op: int,
        root: int,
        keep: object,
        timeout: float,
    ) -> dist.Work:
        place, called = _native.call_site(), time.monotonic()
        at_once = self._has_come_last(subject)

        def run(_keep: object = keep) -> None:
            if not at_once:  # the group's thread acts for the caller
                _native.set_caller(place)
            status = call(timeout)
            if status is not None:
                site = brief(_native.call_site_text(place))
                raise self._failed(status, name, subject, op, root, timeout, site)
            for tensor, flat in outputs:
                settle(tensor, flat)

        def late(seconds: float, begun: bool) -> PhalanxError:
            site = brief(_native.call_site_text(place))
            words = self._words(name if begun else f"queued {name}", subject, op, root, site, begun)
            return unfinished(self._native, self._rank, self._place, words, seconds, called)

        results = [tensor for tensor, _ in outputs] or ([] if subject is None else [subject])
        work = CollectiveWork(run, results, self._native, late)
        if at_once:
            work.execute()
            if isinstance(error := work.exception(), KeyboardInterrupt):
                raise error
        else:
            self._collectives.submit(work.execute)
        if self._joined is not None:
            self._joined.append(work)
        if not opts.asyncOp:
            work.wait()
        return work

    def _has_come_last(self, subject: torch.Tensor | None) -> bool:
        """Return whether an asynchronous operation may as well run at once in this thread.

        If all other ranks already wait for it, there is nothing left to overlap with. For a small
        operation, the switch to another thread and back takes longer than the operation.
        """
        small = subject is None or subject.numel() * subject.element_size() <= _SMALL_BYTES
        return small and not self._collectives.pending and self._native.is_awaited()

    def _failed(
        self,
        status: _native.Status,
        name: str,
        subject: torch.Tensor | None,
        op: int,
        root: int,
        timeout: float,
        site: str,
    ) -> PhalanxError:
        operation = self._words(name, subject, op, root, site)
        lifetime.failed(self._native)
        return error_for(status, self._native, self._place, operation, timeout)

    def _words(
        self,
        name: str,
        subject: torch.Tensor | None,
        op: int,
        root: int,
        site: str,
        begun: bool = True,
    ) -> str:
        """Return text for an operation in progress, or a queued one, which has no number yet."""
        native = self._native
        # Another thread may have left the group in the meantime.
        words = [f"{name} #{native.sequence}" if begun and not native.closed else name]
        if subject is not None:
            words.append(label(subject))
        if op:
            words.append(OP_NAMES[op])
        if root >= 0:
            words.append(f"root {root}")
        return f"{' '.join(words)} at {site}"

    def _profiled(self, name: str, call: NativeCall, inputs: Sequence[torch.Tensor]) -> NativeCall:
        # All forms of an operation have one name, as in PyTorch's backends.
        kind = name.removesuffix("_coalesced").removesuffix("_single")
        return profiled(f"{self.name()}:{kind}", inputs, call)

    def _start_coalescing(self, device: torch.device) -> None:  # noqa: ARG002 - PyTorch's signature
        self._joined = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:  # noqa: ARG002
        works, self._joined = self._joined or [], None
        return JointWork(works)

    # The names that PyTorch's C++ calls from 2.14 on.
    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing


def _inputs(
    subject: torch.Tensor | None, inputs: Sequence[torch.Tensor] | None
) -> Sequence[torch.Tensor]:
    """Return the tensors whose shapes the profiler records."""
    if inputs is not None:
        return inputs
    return [] if subject is None else [subject]


def divided(call: NativeCall, result: torch.Tensor, size: int) -> NativeCall:
    """Return a call that then divides its result by `size`, rounded towards zero."""

    def run(timeout: float) -> _native.Status | None:
        status = call(timeout)
        if status is None:
            with torch.inference_mode():
                result.div_(size, rounding_mode="trunc")
        return status

    return run


def in_turn(calls: Iterable[NativeCall]) -> NativeCall:
    """Return a call that makes all calls in order, each with the whole timeout, until one fails."""
    steps = list(calls)

    def run(timeout: float) -> _native.Status | None:
        for step in steps:
            status = step(timeout)
            if status is not None:
                return status
        return None

    return run
