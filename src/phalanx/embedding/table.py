"""`EmbeddingTable`: rows in shared memory that a host's processes read and write concurrently."""

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
from phalanx.embedding.batch import (
    DTYPES,
    MODES,
    WHOLE,
    Batch,
    BatchAddresses,
    Share,
    index_error,
    is_strided_cpu,
    offset_error,
    prepare_gradients,
    prepare_indices,
    prepare_offsets,
    prepare_weights,
    sum_gradients,
)
from phalanx.embedding.optimizers import SGD, RowOptimizer
from phalanx.errors import PhalanxError, UsageError

# The wait for a row that another process is writing takes a microsecond, unless it is stopped.
_ROW_TIMEOUT_SECONDS = 10.0
# The number of rows in a block when a whole table is copied.
_BLOCK_ROWS = 1 << 16


@dataclass(frozen=True)
class TableHandle:
    """A picklable handle by which processes of the same host open a table.

    Example:
        >>> table = EmbeddingTable(4, 2)
        >>> rpc.rpc_sync(
        ...     "ps", lambda handle: EmbeddingTable.open(handle).rows, args=(table.handle,)
        ... )
        4
    """

    name: str
    pid: int
    descriptor: int
    nonce: int
    optimizer: RowOptimizer


class EmbeddingTable:
    """Rows of floats in shared memory, stored together with the state of their optimizer.

    The process that creates the table fills it; other processes of the host open it by its
    `handle`. All of them may read and update concurrently. A read returns each row, with its state,
    as a completed update left it; the rows of one call may be from different times. If a process
    dies during an update, the row that it was writing keeps its previous value. A call blocks only
    if another process is writing the row: usually for less than a microsecond, 10 s at most.

    Args:
        rows: The number of rows.
        width: The number of elements of a row.
        optimizer: The optimizer of the rows: `SGD` (the default), `Adagrad` or `Adam`.
        dtype: float32 or float64.
        name: The table's name in error messages.
        weight: The initial rows, of shape (rows, width); by default drawn from a normal
            distribution, as for `torch.nn.EmbeddingBag`.

    Raises:
        UsageError: The shape, the dtype or the weight is invalid.
        PhalanxError: There is not enough memory.

    Example:
        >>> table = EmbeddingTable(4, 2, SGD(lr=1.0), weight=torch.zeros(4, 2))
        >>> table.update(torch.tensor([1]), torch.ones(1, 2))
        >>> table.gather(torch.tensor([0, 1]))
        tensor([[ 0.,  0.],
                [-1., -1.]])
    """

    def __init__(
        self,
        rows: int,
        width: int,
        optimizer: RowOptimizer | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        name: str = "table",
        weight: Tensor | None = None,
    ) -> None:
        optimizer = SGD() if optimizer is None else optimizer
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
            core = _native.Rows.create(
                rows, width, 1 + len(optimizer.state_names), DTYPES[dtype], nonce
            )
        except OSError as error:
            raise PhalanxError(
                f"no shared memory for table {name!r} of {rows} rows of {width} {dtype} with "
                f"{len(optimizer.state_names)} state tensors ({error.strerror}): "
                "free memory, or use more servers"
            ) from None
        self._initialize(core, TableHandle(name, os.getpid(), core.descriptor, nonce, optimizer))
        values = self.view()
        values.normal_() if weight is None else values.copy_(weight.detach())
        if initial := getattr(optimizer, "initial_accumulator_value", 0.0):
            self.view(1).fill_(initial)

    def _initialize(self, core: _native.Rows, handle: TableHandle) -> None:
        self._core = core
        self.handle = handle
        self.name = handle.name
        self.optimizer = handle.optimizer
        self._parts = ("weight", *handle.optimizer.state_names)
        self.rows, self.width = core.rows, core.width
        self.dtype = next(dtype for dtype, number in DTYPES.items() if number == core.dtype)

    @classmethod
    def open(cls, handle: TableHandle) -> EmbeddingTable:
        """Open the table of another process of this host.

        The table exists as long as a process has it open.

        Raises:
            OSError: The table does not exist: its process has exited, or is on another host or in
                another pid namespace.
            UsageError: The table's state does not fit the optimizer in the handle.
        """
        core = _native.Rows.open(handle.pid, handle.descriptor, handle.nonce)
        if core.parts != 1 + len(handle.optimizer.state_names):
            raise UsageError(
                f"table {handle.name!r}: a handle with {handle.optimizer} given, but the table has "
                f"{core.parts - 1} state tensors"
            )
        table = cls.__new__(cls)
        table._initialize(core, handle)
        return table

    @property
    def step(self) -> int:
        """The number of updates, which is the step count of the optimizer."""
        return self._core.step

    def view(self, part: int = 0) -> Tensor:
        """Return a view of all rows, of shape (rows, width), or of their state (part 1 and higher).

        Access is not synchronized: use it only while no other process uses the table.
        """
        flat = from_dlpack(self._core.view(part)).view(self.dtype)
        return flat.view(self.rows, -1)[:, : self.width]

    def gather(self, indices: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the rows of these indices, of shape `(*indices.shape, width)`.

        Args:
            indices: Row indices, int64 or int32, on the CPU.
            out: The output tensor, of the returned shape and the table's dtype, contiguous.

        Raises:
            UsageError: An index is out of range, or an argument is invalid.
            PhalanxError: A process that is writing one of the rows is stopped.
        """
        flat = prepare_indices(self.name, indices)
        shape = (*indices.shape, self.width)
        if out is None:
            out = torch.empty(shape, dtype=self.dtype, device="cpu")
        elif (
            out.shape != shape
            or out.dtype != self.dtype
            or not is_strided_cpu(out)
            or not out.is_contiguous()
        ):
            raise UsageError(
                f"table {self.name!r}: out of {tuple(out.shape)} and {out.dtype} on {out.device} "
                f"given, expected {shape} and {self.dtype}, contiguous, on the CPU"
            )
        parts = [out.data_ptr()] + [0] * len(self.optimizer.state_names)
        self._check_failure(
            self._core.gather(flat.data_ptr(), len(flat), parts, _ROW_TIMEOUT_SECONDS)
        )
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
            indices: Row indices: 1-D with `offsets`, or 2-D without, with one row for each bag.
            offsets: The position in `indices` at which each bag begins, the first at 0. An empty
                bag gives zeros.
            mode: "sum", "mean" or "max".
            per_sample_weights: A factor for each index, of the table's dtype; for "sum" only.
            include_last_offset: Whether the last element of `offsets` is the number of indices.

        Returns:
            A tensor of shape (bags, width).

        Raises:
            UsageError: An index or an offset is out of range, or an argument is invalid.
            PhalanxError: A process that is writing one of the rows is stopped.

        Example:
            >>> table = EmbeddingTable(4, 2, weight=torch.ones(4, 2))
            >>> table.pool(torch.tensor([[0, 1, 3]]), mode="sum")
            tensor([[3., 3.]])
        """
        flat = prepare_indices(self.name, indices)
        bag_offsets = prepare_offsets(self.name, indices, offsets, include_last_offset)
        weights = prepare_weights(self.name, indices, mode, per_sample_weights, self.dtype)
        return self.pool_batch(Batch(flat, bag_offsets, mode, weights))

    def pool_batch(self, batch: Batch) -> Tensor:
        """Combine the rows of a prepared batch; only the ranges of rows and offsets are checked."""
        offsets = (
            torch.arange(len(batch.rows), device="cpu") if batch.offsets is None else batch.offsets
        )
        out = torch.empty(len(offsets), self.width, dtype=self.dtype, device="cpu")
        failure = self._core.pool(
            batch.rows.data_ptr(),
            len(batch.rows),
            offsets.data_ptr(),
            len(offsets),
            MODES[batch.mode],
            0 if batch.weights is None else batch.weights.data_ptr(),
            out.data_ptr(),
            _ROW_TIMEOUT_SECONDS,
        )
        self._check_failure(failure, len(batch.rows))
        return out

    def update(self, indices: Tensor, gradients: Tensor) -> None:
        """Make one step of the optimizer with the gradients of these rows; others do not change.

        The gradients of a duplicate row are summed first. A call without rows counts as a step.

        Args:
            indices: Row indices, 1-D, int64 or int32.
            gradients: Gradients of shape (len(indices), width), of the table's dtype.

        Raises:
            UsageError: An index is out of range, or an argument is invalid. Nothing is updated.
            PhalanxError: A process that is writing one of the rows is stopped. Rows may have been
                updated.
        """
        flat = prepare_indices(self.name, indices)
        shape = len(flat), self.width
        summed = prepare_gradients(self.name, gradients, shape, self.dtype)
        self.update_batches([Batch(flat).addresses(summed)])

    def update_batches(
        self,
        batches: Sequence[BatchAddresses],
        divisor: float = 1.0,
        share: Share = WHOLE,
        step: int = 0,
    ) -> None:
        """Make one step with the gradients of several prepared batches, summed and divided.

        Args:
            batches: The addresses of the batches.
            divisor: The divisor of the sums.
            share: The share of the rows to update.
            step: The number of the step if this is a part of it; 0: the next step, which this call
                counts.
        """
        flat, summed = sum_gradients(batches, self.width, self.dtype, divisor, share)
        failure = self._core.update(
            flat.data_ptr(),
            len(flat),
            summed.data_ptr(),
            self.optimizer.kernel_number,
            self.optimizer.hyperparameters(),
            step,
            _ROW_TIMEOUT_SECONDS,
        )
        self._check_failure(failure)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all rows and of their optimizer's state, and the number of steps.

        Updates may continue meanwhile: each row is consistent with its own state.
        """
        state = {
            name: torch.empty(self.rows, self.width, dtype=self.dtype, device="cpu")
            for name in self._parts
        }
        for block in self._blocks():
            parts = [state[name][block[0] :].data_ptr() for name in self._parts]
            self._check_failure(
                self._core.gather(block.data_ptr(), len(block), parts, _ROW_TIMEOUT_SECONDS)
            )
        return {**state, "step": torch.tensor(self.step, device="cpu")}

    def describe_state(self) -> dict[str, Tensor]:
        """Return a result of `state_dict` without data: tensors on the device "meta"."""
        rows = torch.empty(self.rows, self.width, dtype=self.dtype, device="meta")
        step = torch.empty((), dtype=torch.int64, device="meta")
        return {**dict.fromkeys(self._parts, rows), "step": step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace all rows, their state and the number of steps by a result of `state_dict`.

        Raises:
            UsageError: The shape, the dtype or the optimizer differs. Nothing is replaced.
        """
        expected = dict.fromkeys(self._parts, ((self.rows, self.width), self.dtype))
        given = {name: (tuple(x.shape), x.dtype) for name, x in state.items() if name != "step"}
        if given != expected or "step" not in state:
            raise UsageError(
                f"table {self.name!r}: a state of {given} given, expected {expected} and step"
            )
        tensors = [cast("Tensor", state[name]).contiguous() for name in self._parts]
        for block in self._blocks():
            parts = [tensor[block[0] :].data_ptr() for tensor in tensors]
            self._check_failure(
                self._core.write(block.data_ptr(), len(block), parts, _ROW_TIMEOUT_SECONDS)
            )
        self._core.step = int(state["step"])

    def _blocks(self) -> Iterator[Tensor]:
        for begin in range(0, self.rows, _BLOCK_ROWS):
            yield torch.arange(begin, min(begin + _BLOCK_ROWS, self.rows), device="cpu")

    def _check_failure(self, failure: tuple[str, int, int, int] | None, count: int = 0) -> None:
        if failure is None:
            return
        kind, position, value, pid = failure
        if kind == "index":
            raise index_error(self.name, value, self.rows)
        if kind == "offset":
            raise offset_error(self.name, value, position, count)
        if kind == "full":
            raise PhalanxError(
                f"table {self.name!r}: too many processes were writing to it for more than "
                f"{_ROW_TIMEOUT_SECONDS:g} s"
            )
        if pid == 0:
            raise PhalanxError(
                f"table {self.name!r}: row {value} could not be read for "
                f"{_ROW_TIMEOUT_SECONDS:g} s, because it was written continuously"
            )
        raise PhalanxError(
            f"table {self.name!r}: row {value}, or a row with the same lock, is being written by "
            f"process {pid} for more than {_ROW_TIMEOUT_SECONDS:g} s: is that process stopped?"
        )
