"""The exchange of a part of the parameters among all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.torch_versions import foreach_add_, foreach_copy_

_ALIGNMENT = 256
"""The flags of the ranks begin at a multiple of it, so that they are encoded by themselves."""


class Report(NamedTuple):
    """The flags of a rank that the others get in an exchange.

    Attributes:
        counts: Whether its changes count in the average.
        has_ended: Whether it makes no more steps before all ranks have said so.
        is_finite: Whether its changes are finite; others never count.
    """

    counts: bool = True
    has_ended: bool = False
    is_finite: bool = True


class Fragment:
    """A part of the parameters, which is exchanged as a whole.

    Args:
        parameters: The parameters.
        offset: The number of steps by which its exchanges come later than those of the first one.

    Attributes:
        outer: The parameters that all ranks have in common, in one tensor of float32, or of float64
            if the model has such parameters.
        since: The number of steps from which those until the next exchange are counted.
        begun_at: The number of steps before the exchange that is running; None if there is none.
        equal_at: The number of steps after which all ranks had the common parameters last; None if
            they never had, or the steps of a running exchange have changed them.
    """

    def __init__(self, parameters: Sequence[Tensor], offset: int) -> None:
        self._parameters = list(parameters)
        self._count = sum(parameter.numel() for parameter in parameters)
        self._message = self._change = self._flags = self._start = torch.empty(
            0, dtype=torch.float32, device="cpu"
        )
        dtype = reduce(torch.promote_types, {each.dtype for each in parameters}, torch.float32)
        flat = torch.empty(self._count, dtype=dtype, device=parameters[0].device)
        self.outer = nn.Parameter(flat, requires_grad=False)
        self.offset = self.since = self._since_before = offset
        self.begun_at: int | None = None
        self.equal_at: int | None = None
        self._work: Any = None
        self._is_restored = False
        """True if the changes since the running exchange began are to be dropped."""
        self._copy_parameters(self.outer)

    def form(self, size: int) -> None:
        """Allocate what an exchange of `size` ranks needs."""
        padded = -(-self._count // _ALIGNMENT) * _ALIGNMENT
        fields = len(Report._fields)
        self._message = self.outer.new_zeros(padded + fields * size, requires_grad=False)
        self._change, flags = self._message[: self._count], self._message[padded:]
        self._flags = flags.view(size, fields)  # a report of each rank
        self._start = torch.empty(0, dtype=torch.float32, device="cpu")

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Return views of a flat tensor in the shapes of the parameters."""
        parts = torch.split(flat.detach(), [each.numel() for each in self._parameters])
        pairs = zip(parts, self._parameters, strict=True)
        return [part.view(parameter.shape) for part, parameter in pairs]

    def _copy_parameters(self, flat: Tensor) -> None:
        foreach_copy_(self._views(flat), [each.detach() for each in self._parameters])

    def broadcast(self, source: int, group: dist.ProcessGroup) -> None:
        """Give all ranks the parameters of the source's model."""
        self._copy_parameters(self.outer)
        dist.broadcast(self.outer.detach(), group_src=source, group=group)
        self.load()

    def reset(self, common: Tensor | None) -> None:
        """Forget the running exchange; continue from these common parameters, or the model's."""
        self.abandon()
        if common is None:
            self._copy_parameters(self.outer)
        else:
            self.outer.detach().copy_(common)

    def abandon(self) -> None:
        """Forget the running exchange, after its end; it is due again."""
        if self._work is not None:
            with contextlib.suppress(RuntimeError):  # it may have failed
                self._work.wait()
            self.since = self._since_before
        self._work, self.begun_at, self.equal_at = None, None, None
        self._is_restored = False

    def is_loaded(self) -> bool:
        """Return whether the model has the common parameters."""
        pairs = zip(self._parameters, self._views(self.outer), strict=True)
        return all(torch.equal(own.detach(), view.to(own.dtype)) for own, view in pairs)

    def restore(self) -> None:
        """Drop all changes since the last exchange, and those until the end of a running one."""
        self.load()
        self._is_restored = self.begun_at is not None

    def load(self) -> None:
        """Give the model the common parameters."""
        with torch.no_grad():
            foreach_copy_(self._parameters, self._views(self.outer))

    def begin(
        self, rank: int, completed: int, group: dist.ProcessGroup, report: Report, *, keep: bool
    ) -> None:
        """Begin to add up the changes of all ranks.

        Args:
            rank: The rank in the group.
            completed: The number of steps so far.
            group: The group.
            report: The flags of this rank.
            keep: Whether steps follow before the exchange ends.
        """
        self._copy_parameters(self._change)
        if keep:
            self._start = self._change.clone()
        torch.sub(self.outer.detach(), self._change, out=self._change)
        if report.counts and not self._change.isfinite().all():
            report = report._replace(counts=False, is_finite=False)
        if not report.counts:
            self._change.zero_()
        self._flags.zero_()
        self._flags[rank] = torch.tensor(report, device="cpu")
        self._since_before, self.since = self.since, completed
        self.begun_at = completed
        self._work = dist.all_reduce(self._message, group=group, async_op=True)

    def check(self) -> None:
        """Raise the error of the running exchange if it has failed; do not wait."""
        if self._work.is_completed():
            self._work.wait()

    def wait(self, completed: int) -> list[Report]:
        """Wait for the sum; return the flags of each rank.

        The average of the changes that count becomes the gradient of the outer parameters. If none
        does, they have no gradient.
        """
        self._work.wait()
        self.equal_at = completed if self.begun_at == completed else None
        self._work, self.begun_at = None, None
        reports = [Report(*map(bool, flags)) for flags in self._flags.round().tolist()]
        count = sum(report.counts for report in reports)
        self.outer.grad = self._change.div_(count) if count else None
        return reports

    def apply(self, *, replace: bool) -> None:
        """Give the model the new common parameters, and the changes of later steps.

        Args:
            replace: Whether the later changes are dropped.
        """
        self.outer.grad = None
        replace, self._is_restored = replace or self._is_restored, False
        if replace or self.equal_at is not None:
            self.load()
            return
        difference = torch.sub(self.outer.detach(), self._start, out=self._start)
        foreach_add_(
            [each.detach() for each in self._parameters],
            [
                view.to(parameter.dtype)
                for view, parameter in zip(self._views(difference), self._parameters, strict=True)
            ],
        )
