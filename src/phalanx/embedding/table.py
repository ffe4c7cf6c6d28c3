"""`Table`: rows in shared memory, which the processes of a host read and write concurrently."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from phalanx import _native
from phalanx.embedding.arguments import (
    DTYPES,
    MODES,
    checked_begins,
    checked_gradients,
    checked_indices,
    checked_weights,
    in_memory,
    out_of_range,
    wrong_offset,
)
from phalanx.embedding.gradients import Addresses, Batch, Share, added_up
from phalanx.embedding.optimizers import SGD, Rule
from phalanx.errors import PhalanxError, UsageError

__all__ = ["Table", "TableHandle"]

# Seconds to wait for a row that another process is writing: a microsecond, unless it is stopped.
_PATIENCE = 10.0
# Rows in a block when a whole table is copied.
_BLOCK = 1 << 16


@dataclass(frozen=True)
class TableHandle:
    """The data by which a process of the same host opens a table; it may be sent in any message."""

    name: str
    pid: int
    descriptor: int
    nonce: int
    rule: Rule


class Table:
    """Rows of floats in shared memory, stored together with the state of their optimizer.

    The process that creates the table fills it; other processes of the host open it by its
    `handle`. All of them may read and update concurrently. A read returns each row, with its state,
    as a completed update left it; the rows of one call may be from different times. If a process
    dies during an update, the row that it was writing keeps its previous value. A call blocks only
    on a row that another process is writing: usually for less than a microsecond, 10 s at most.

    Args:
        rows: The number of rows.
        width: The number of elements of a row.
        rule: The optimizer of the rows: `SGD` (the default), `Adagrad` or `Adam`.
        dtype: float32 or float64.
        name: The table's name in error messages.
        weight: The initial rows, of shape (rows, width); by default drawn from a normal
            distribution, as for `torch.nn.EmbeddingBag`.

    Raises:
        UsageError: The shape, the dtype or the weight is invalid.
        PhalanxError: There is not enough memory.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        rule: Rule | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        name: str = "table",
        weight: Tensor | None = None,
    ) -> None:
        rule = SGD() if rule is None else rule
        if dtype not in DTYPES:
            raise UsageError(f"table {name!r}: {dtype} given, expected float32 or float64")
        if not (0 < rows <= 1 << 36 and 0 < width <= 1 << 20):
            raise UsageError(
                f"table {name!r}: {rows} rows of {width} elements given, expected at least one of "
                "each, at most 2**36 rows and 2**20 elements"
            )
        if weight is not None and (weight.shape != (rows, width) or weight.dtype != dtype):
            raise UsageError(
                f"table {name!r}: a weight of {tuple(weight.shape)} and {weight.dtype} given, "
                f"expected ({rows}, {width}) and {dtype}"
            )
        nonce = secrets.randbits(64)
        try:
            core = _native.Rows.create(rows, width, 1 + len(rule.state), DTYPES[dtype], nonce)
        except OSError as error:
            raise PhalanxError(
                f"no shared memory for table {name!r} of {rows} rows of {width} {dtype} with "
                f"{len(rule.state)} of state ({os.strerror(error.errno or 0)}): free memory, or "
                "split it over more servers"
            ) from None
        self._set(core, TableHandle(name, os.getpid(), core.descriptor, nonce, rule))
        values = self.view()
        values.normal_() if weight is None else values.copy_(weight.detach())
        if initial := getattr(rule, "initial_accumulator_value", 0.0):
            self.view(1).fill_(initial)

    def _set(self, core: _native.Rows, handle: TableHandle) -> None:
        self._core = core
        self.handle = handle
        self.name = handle.name
        self.rule = handle.rule
        self.rows, self.width = core.rows, core.width
        self.dtype = next(dtype for dtype, number in DTYPES.items() if number == core.dtype)

    @classmethod
    def open(cls, handle: TableHandle) -> Table:
        """Open the table of another process of this host; it exists while any process has it open.

        Raises:
            OSError: The table does not exist: its process has exited, or is on another host or in
                another pid namespace.
            UsageError: The table's state does not fit the optimizer in the handle.
        """
        core = _native.Rows.open(handle.pid, handle.descriptor, handle.nonce)
        if core.parts != 1 + len(handle.rule.state):
            raise UsageError(
                f"table {handle.name!r}: a handle with {handle.rule} given, but the table has "
                f"{core.parts - 1} of state"
            )
        table = cls.__new__(cls)
        table._set(core, handle)
        return table

    @property
    def step(self) -> int:
        """The number of updates, which is the step count of the optimizer."""
        return self._core.step

    def view(self, part: int = 0) -> Tensor:
        """Return a view of all rows, of shape (rows, width), or of their state (part 1 and up).

        Access is not synchronized: use it only while no other process uses the table.
        """
        flat = from_dlpack(self._core.view(part)).view(self.dtype)
        return flat.view(self.rows, -1)[:, : self.width]

    def gather(self, indices: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the rows of these indices, of shape (*indices.shape, width).

        Args:
            indices: Row indices, int64 or int32, on the CPU.
            out: The output tensor, of the returned shape and the table's dtype, contiguous.

        Raises:
            UsageError: An index is out of range, or an argument is invalid.
            PhalanxError: A process that is writing to one of the rows is stopped.
        """
        flat = checked_indices(self.name, indices)
        shape = (*indices.shape, self.width)
        if out is None:
            out = torch.empty(shape, dtype=self.dtype)
        elif (
            out.shape != shape
            or out.dtype != self.dtype
            or not in_memory(out)
            or not out.is_contiguous()
        ):
            raise UsageError(
                f"table {self.name!r}: out of {tuple(out.shape)} and {out.dtype} on {out.device} "
                f"given, expected {shape} and {self.dtype}, contiguous, on the CPU"
            )
        parts = [out.data_ptr()] + [0] * len(self.rule.state)
        self._check(self._core.gather(flat.data_ptr(), len(flat), parts, _PATIENCE))
        return out

    def pool(
        self,
        indices: Tensor,
        offsets: Tensor | None = None,
        *,
        mode: str = "mean",
        per_sample_weights: Tensor | None = None,
        include_last_offset: bool = False,
    ) -> Tensor:
        """Combine the rows of each bag, like `torch.nn.functional.embedding_bag`.

        Args:
            indices: Row indices: 1-D with `offsets`, or 2-D, one row for each bag, without.
            offsets: The position in `indices` at which each bag begins, the first at 0. An empty
                bag gives zeros.
            mode: "sum", "mean" or "max".
            per_sample_weights: A factor for each index, of the table's dtype; for "sum" only.
            include_last_offset: Whether the last element of `offsets` is the number of indices.

        Returns:
            A tensor of shape (bags, width).

        Raises:
            UsageError: An index or an offset is out of range, or an argument is invalid.
            PhalanxError: A process that is writing to one of the rows is stopped.
        """
        flat = checked_indices(self.name, indices)
        begins = checked_begins(self.name, indices, offsets, include_last_offset)
        weights = checked_weights(self.name, indices, mode, per_sample_weights, self.dtype)
        return self.pooled(Batch(flat, begins, mode, weights))

    def pooled(self, batch: Batch) -> Tensor:
        """Combine the rows of a checked batch; only the ranges of rows and offsets are checked."""
        begins = torch.arange(len(batch.rows)) if batch.begins is None else batch.begins
        out = torch.empty(len(begins), self.width, dtype=self.dtype)
        trouble = self._core.pool(
            batch.rows.data_ptr(),
            len(batch.rows),
            begins.data_ptr(),
            len(begins),
            MODES[batch.mode],
            0 if batch.weights is None else batch.weights.data_ptr(),
            out.data_ptr(),
            _PATIENCE,
        )
        self._check(trouble, len(batch.rows))
        return out

    def update(self, indices: Tensor, gradients: Tensor) -> None:
        """Make one step of the optimizer with the gradients of these rows; others do not change.

        The gradients of a duplicate row are summed first. A call without rows counts as a step too.

        Args:
            indices: Row indices, 1-D, int64 or int32.
            gradients: Gradients of shape (len(indices), width), of the table's dtype.

        Raises:
            UsageError: An index is out of range, or an argument is invalid. Nothing is updated.
            PhalanxError: A process that is writing to one of the rows is stopped. Rows may have
                been updated.
        """
        flat = checked_indices(self.name, indices)
        shape = len(flat), self.width
        summed = checked_gradients(self.name, gradients, shape, self.dtype)
        self.update_all([Batch(flat).at(summed)])

    def update_all(
        self,
        batches: Sequence[Addresses],
        divisor: float = 1.0,
        share: Share = Share(),  # noqa: B008 - it is immutable
        number: int = 0,
    ) -> None:
        """Make one step with the gradients of several checked batches, summed and divided.

        Args:
            batches: The addresses of the batches.
            divisor: The divisor of the sums.
            share: The share of the rows to update.
            number: The number of the step, if this is a part of it; 0: the next step, which this
                call counts.
        """
        flat, summed = added_up(batches, self.width, self.dtype, divisor, share)
        trouble = self._core.update(
            flat.data_ptr(),
            len(flat),
            summed.data_ptr(),
            self.rule.number,
            self.rule.factors(),
            number,
            _PATIENCE,
        )
        self._check(trouble)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all rows and of their optimizer's state, and the number of steps.

        Updates may continue meanwhile: each row is consistent with its own state.
        """
        names = ("weight", *self.rule.state)
        state = {name: torch.empty(self.rows, self.width, dtype=self.dtype) for name in names}
        for block in self._blocks():
            parts = [state[name][block[0] :].data_ptr() for name in names]
            self._check(self._core.gather(block.data_ptr(), len(block), parts, _PATIENCE))
        return {**state, "step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace all rows, their state and the number of steps by a result of `state_dict`.

        Raises:
            UsageError: The shape, the dtype or the optimizer differs. Nothing is replaced.
        """
        names = ("weight", *self.rule.state)
        expected = dict.fromkeys(names, ((self.rows, self.width), self.dtype))
        found = {name: (tuple(x.shape), x.dtype) for name, x in state.items() if name != "step"}
        if found != expected or "step" not in state:
            raise UsageError(
                f"table {self.name!r}: a state of {found} given, expected {expected} and step"
            )
        tensors = [cast("Tensor", state[name]).contiguous() for name in names]
        for block in self._blocks():
            parts = [tensor[block[0] :].data_ptr() for tensor in tensors]
            self._check(self._core.write(block.data_ptr(), len(block), parts, _PATIENCE))
        self._core.step = int(state["step"])

    def _blocks(self) -> Iterator[Tensor]:
        for begin in range(0, self.rows, _BLOCK):
            yield torch.arange(begin, min(begin + _BLOCK, self.rows))

    def _check(self, trouble: tuple[str, int, int, int] | None, count: int = 0) -> None:
        if trouble is None:
            return
        kind, at, value, pid = trouble
        if kind == "index":
            raise out_of_range(self.name, value, self.rows)
        if kind == "offset":
            raise wrong_offset(self.name, value, at, count)
        if kind == "full":
            raise PhalanxError(
                f"table {self.name!r}: too many processes write to it at the same time, for more "
                f"than {_PATIENCE:g} s"
            )
        if pid == 0:
            raise PhalanxError(
                f"table {self.name!r}: row {value} was written so often for {_PATIENCE:g} s that "
                "there was no moment to read it"
            )
        raise PhalanxError(
            f"table {self.name!r}: row {value}, or one with the same lock, is being written by "
            f"process {pid} for more than {_PATIENCE:g} s: is that process stopped?"
        )
