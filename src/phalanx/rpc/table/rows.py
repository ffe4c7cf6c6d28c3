"""`Table`: rows in shared memory, read and written by processes of a host at the same time."""

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
from phalanx.errors import PhalanxError, UsageError
from phalanx.rpc.table.arguments import (
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
from phalanx.rpc.table.gradients import Addresses, Batch, Share, added_up
from phalanx.rpc.table.rules import SGD, Rule

__all__ = ["Table", "TableHandle"]

# Seconds for a row that another process writes to; that takes a microsecond unless it is stopped.
_PATIENCE = 10.0
# Rows that are copied at a time where all of a table is.
_BLOCK = 1 << 16


@dataclass(frozen=True)
class TableHandle:
    """Where a process of the same host finds a table; it may travel by any message."""

    name: str
    pid: int
    descriptor: int
    nonce: int
    rule: Rule


class Table:
    """Rows of floats in shared memory, with the state of their optimizer beside them.

    The process that makes it fills it; others of the host open it by its `handle`. All may then
    read and update at the same time. Each row that is read is as one update has left it, its state
    too; rows of one call may be from different moments. A process that dies in the middle of an
    update leaves the row that it was in as it was before. No call blocks but for a row that another
    process is just writing to: for less than a microsecond, 10 s at most.

    Args:
        rows: How many.
        width: Elements of a row.
        rule: How rows are updated: `SGD`, `Adagrad` or `Adam`.
        dtype: float32 or float64.
        name: What errors call it.
        weight: The rows to begin with, of shape (rows, width); without, they are drawn from a
            normal distribution, as those of `torch.nn.EmbeddingBag`.

    Raises:
        UsageError: A shape, a dtype or a weight that can't be.
        PhalanxError: There is not so much memory.
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
        """The table of another process of this host, which lives as long as somebody has it open.

        Raises:
            OSError: It isn't there: its process has ended, or is on another host or in another pid
                namespace.
            UsageError: The handle names another optimizer than the table has state for.
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
        """How many updates there were; optimizers count by it."""
        return self._core.step

    def view(self, part: int = 0) -> Tensor:
        """All rows as they lie in memory, of shape (rows, width); part 1 and on: their state.

        Nothing is synchronised: for tables that nobody else uses just now.
        """
        flat = from_dlpack(self._core.view(part)).view(self.dtype)
        return flat.view(self.rows, -1)[:, : self.width]

    def gather(self, indices: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The rows of these indices, of shape (*indices.shape, width).

        Args:
            indices: int64 or int32, on the CPU.
            out: Where to put them: of that shape, contiguous, of the table's dtype.

        Raises:
            UsageError: An index is out of range, or an argument isn't as said.
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
        """The rows of each bag combined, as `torch.nn.functional.embedding_bag` does.

        Args:
            indices: A flat list with `offsets`, or a row for each bag without.
            offsets: Where each bag begins in the list, the first at 0; an empty bag gives zeros.
            mode: "sum", "mean" or "max".
            per_sample_weights: A factor for each index, of the table's dtype; for "sum".
            include_last_offset: `offsets` has the list's length as its last.

        Returns:
            A tensor of shape (bags, width).

        Raises:
            UsageError: An index or an offset is out of range, or an argument isn't as said.
            PhalanxError: A process that is writing to one of the rows is stopped.
        """
        flat = checked_indices(self.name, indices)
        begins = checked_begins(self.name, indices, offsets, include_last_offset)
        weights = checked_weights(self.name, indices, mode, per_sample_weights, self.dtype)
        return self.pooled(Batch(flat, begins, mode, weights))

    def pooled(self, batch: Batch) -> Tensor:
        """The same for what has been checked, but for where rows and bags are."""
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
        """One step of the optimizer with the gradients of these rows; others stay as they are.

        Gradients of a row that is there more than once are added up first. It counts as a step
        also without any row.

        Args:
            indices: Flat, int64 or int32.
            gradients: Of shape (len(indices), width), of the table's dtype.

        Raises:
            UsageError: An index is out of range, or an argument isn't as said: nothing is updated.
            PhalanxError: A process that is writing to one of the rows is stopped: rows may have
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
        share: Share = Share(),  # noqa: B008 - it never changes
        number: int = 0,
    ) -> None:
        """The same with the gradients of several batches, added up and divided; all are checked.

        Args:
            batches: Where they are.
            divisor: By what sums are divided.
            share: Which rows are updated.
            number: Which step it is, if this is a part of one; 0: the next, which this counts.
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
        """Copies of all rows, of their optimizer's state, and the number of steps.

        Others may go on with updates: each row is of one moment, with its state.
        """
        names = ("weight", *self.rule.state)
        state = {name: torch.empty(self.rows, self.width, dtype=self.dtype) for name in names}
        for block in self._blocks():
            parts = [state[name][block[0] :].data_ptr() for name in names]
            self._check(self._core.gather(block.data_ptr(), len(block), parts, _PATIENCE))
        return {**state, "step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace all rows, their state, and the number of steps, by what `state_dict` returned.

        Raises:
            UsageError: It is of another shape, dtype or optimizer: nothing is replaced.
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
