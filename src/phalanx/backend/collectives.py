"""Collectives on lists of tensors.

Each method checks its arguments, so that a mistake raises before any communication, and passes the
native call to `_run_collective`, which runs it.
"""

from __future__ import annotations

import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from phalanx._native import is_misplaced, overlap
from phalanx.backend.call_site import call_site
from phalanx.backend.execution import (
    CollectiveExecutor,
    NativeCall,
    divide_after,
    run_sequentially,
)
from phalanx.backend.operands import (
    check_same_kind,
    copy_back,
    dtype_code,
    find_reduction,
    format_tensor,
    premul_factor,
    prepare_input,
    prepare_output,
    single_tensor,
)
from phalanx.backend.options import options_factory
from phalanx.backend.work import Tensors
from phalanx.errors import CollectiveMismatch, CollectiveTimeout, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from phalanx import _native


_broadcast = options_factory(dist.BroadcastOptions, "rootRank")
_allreduce = options_factory(dist.AllreduceOptions, "reduceOp")
_reduce = options_factory(dist.ReduceOptions, "rootRank")
_allgather = options_factory(AllgatherOptions)
_gather = options_factory(dist.GatherOptions, "rootRank")
_scatter = options_factory(dist.ScatterOptions, "rootRank")
_reduce_scatter = options_factory(dist.ReduceScatterOptions, "reduceOp")
_alltoall = options_factory(dist.AllToAllOptions)
_barrier = options_factory(dist.BarrierOptions)


class Collectives(CollectiveExecutor):
    """A group whose ranks call the same operations in the same order.

    As in PyTorch's own groups, each method takes an options object, or its main option (root or
    operator), and a timeout. A tensor may stand for a list of one tensor.
    """

    # The collectives are in the order of PyTorch's documentation.

    def broadcast(
        self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Overwrite the tensor of every rank with the root's."""
        opts = _broadcast(opts, timeout)
        tensor = single_tensor(tensors, "broadcast")
        root = self._check_root(opts.rootRank, "broadcast")
        code = dtype_code(tensor.dtype, "broadcast")
        flat = (prepare_input if root == self._rank else prepare_output)(tensor, "broadcast")
        call = partial(self._native.broadcast, flat.data_ptr(), flat.numel(), code, root)
        outputs = [] if root == self._rank else [(tensor, flat)]
        operator = "broadcast", [tensor], opts
        return self._run_collective(
            "broadcast", call, tensor, opts, outputs, operator, 0, root, flat
        )

    def allreduce(
        self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Combine the tensors of all ranks; every rank gets the result, in place."""
        opts = _allreduce(opts, timeout)
        tensor = single_tensor(tensors, "all_reduce")
        operator = "allreduce", [tensor], opts
        if tensor.is_sparse:
            call: NativeCall = _sparse_sum(self._native, tensor, opts.reduceOp, self._size)
            return self._run_collective("all_reduce", call, tensor, opts, [], operator)
        op = opts.reduceOp
        reduction = find_reduction(op, tensor, "all_reduce")
        flat = prepare_output(tensor, "all_reduce")
        if reduction.premultiplies:
            flat = premultiply(flat, op)
        call = partial(
            self._native.all_reduce, flat.data_ptr(), flat.numel(), reduction.dtype, reduction.op
        )
        if reduction.divides:
            call = divide_after(call, flat, self._size)
        return self._run_collective(
            "all_reduce", call, tensor, opts, [(tensor, flat)], operator, reduction.op
        )

    def reduce(
        self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Combine the tensors of all ranks; the root gets the result, in place."""
        opts = _reduce(opts, timeout)
        tensor = single_tensor(tensors, "reduce")
        root = self._check_root(opts.rootRank, "reduce")
        is_root = root == self._rank
        op = opts.reduceOp
        reduction = find_reduction(op, tensor, "reduce")
        flat = (prepare_output if is_root else prepare_input)(tensor, "reduce")
        if reduction.premultiplies:
            flat = premultiply(flat, op)
        call: NativeCall = partial(
            self._native.reduce, flat.data_ptr(), flat.numel(), reduction.dtype, reduction.op, root
        )
        if reduction.divides and is_root:
            call = divide_after(call, flat, self._size)
        outputs = [(tensor, flat)] if is_root else []
        operator = "reduce", [tensor], opts
        return self._run_collective(
            "reduce", call, tensor, opts, outputs, operator, reduction.op, root, flat
        )

    def allgather(
        self,
        output_tensors: list[Tensors],
        input_tensors: Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Collect the tensors of all ranks, in rank order, on every rank."""
        opts = _allgather(opts, timeout)
        tensor = single_tensor(input_tensors, "all_gather")
        outputs = self._tensors_per_rank(output_tensors, "all_gather", "outputs")
        check_same_kind(outputs, tensor, "all_gather", sized_indices=(self._rank,))
        flat = prepare_input(tensor, "all_gather")
        pairs = [(output, prepare_output(output, "all_gather")) for output in outputs]
        flats = [output for _, output in pairs]
        code = dtype_code(tensor.dtype, "all_gather")
        native = self._native
        if [output.numel() for output in flats] == [flat.numel()] * self._size:
            addresses = [output.data_ptr() for output in flats]
            if is_misplaced(flat.data_ptr(), addresses, flat.numel(), code, self._rank):
                flat = flat.clone()
            call: NativeCall = partial(
                native.all_gather, flat.data_ptr(), addresses, flat.numel(), code
            )
        else:
            if _overlaps(flat, [flats[self._rank]], code):
                flat = flat.clone()
            copy_back(flats[self._rank].view(-1), flat.view(-1))
            call = run_sequentially(
                partial(native.broadcast, output.data_ptr(), output.numel(), code, root)
                for root, output in enumerate(flats)
            )
        operator = "allgather", [outputs], [tensor], opts
        return self._run_collective("all_gather", call, tensor, opts, pairs, operator, 0, -1, flat)

    def gather(
        self,
        output_tensors: list[Tensors],
        input_tensors: Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Collect the tensors of all ranks, in rank order, on the root."""
        opts = _gather(opts, timeout)
        tensor = single_tensor(input_tensors, "gather")
        root = self._check_root(opts.rootRank, "gather")
        outputs: Sequence[torch.Tensor] = ()
        if root == self._rank:
            outputs = self._tensors_per_rank(output_tensors, "gather", "outputs")
            check_same_kind(outputs, tensor, "gather")
        flat = prepare_input(tensor, "gather")
        flats = [prepare_output(output, "gather") for output in outputs]
        code = dtype_code(tensor.dtype, "gather")
        addresses = [output.data_ptr() for output in flats]
        if is_misplaced(flat.data_ptr(), addresses, flat.numel(), code, self._rank):
            flat = flat.clone()
        call = partial(self._native.gather, flat.data_ptr(), addresses, flat.numel(), code, root)
        pairs = list(zip(outputs, flats, strict=True))
        operator = "gather", [outputs] if outputs else [], [tensor], opts
        return self._run_collective("gather", call, tensor, opts, pairs, operator, 0, root, flat)

    def scatter(
        self,
        output_tensors: Tensors,
        input_tensors: list[Tensors],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Send each rank its tensor from the root's list."""
        opts = _scatter(opts, timeout)
        tensor = single_tensor(output_tensors, "scatter")
        root = self._check_root(opts.rootRank, "scatter")
        inputs: Sequence[torch.Tensor] = ()
        if root == self._rank:
            inputs = self._tensors_per_rank(input_tensors, "scatter", "inputs")
            check_same_kind(inputs, tensor, "scatter")
        flat = prepare_output(tensor, "scatter")
        flats = [prepare_input(item, "scatter") for item in inputs]
        code = dtype_code(tensor.dtype, "scatter")
        addresses = [item.data_ptr() for item in flats]
        if is_misplaced(flat.data_ptr(), addresses, flat.numel(), code, self._rank):
            flat = torch.empty_like(flat)
        call = partial(self._native.scatter, addresses, flat.data_ptr(), flat.numel(), code, root)
        pairs = [(tensor, flat)]
        operator = "scatter", [tensor], [inputs] if inputs else [], opts
        return self._run_collective(
            "scatter", call, tensor, opts, pairs, operator, 0, root, flats, inputs
        )

    def reduce_scatter(
        self,
        output_tensors: Tensors,
        input_tensors: list[Tensors],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Combine the lists of all ranks; every rank gets the entry at its rank."""
        opts = _reduce_scatter(opts, timeout)
        tensor = single_tensor(output_tensors, "reduce_scatter")
        inputs = self._tensors_per_rank(input_tensors, "reduce_scatter", "inputs")
        check_same_kind(inputs, tensor, "reduce_scatter", sized_indices=(self._rank,))
        flat = prepare_output(tensor, "reduce_scatter")
        op = opts.reduceOp
        reduction = find_reduction(op, tensor, "reduce_scatter")
        sources = [prepare_input(item, "reduce_scatter") for item in inputs]
        if reduction.premultiplies:
            sources = [premultiply(source, op) for source in sources]
        native = self._native
        if [source.numel() for source in sources] == [flat.numel()] * self._size:
            addresses = [source.data_ptr() for source in sources]
            if is_misplaced(flat.data_ptr(), addresses, flat.numel(), reduction.dtype, self._rank):
                flat = torch.empty_like(flat)
            call: NativeCall = partial(
                native.reduce_scatter,
                addresses,
                flat.data_ptr(),
                flat.numel(),
                reduction.dtype,
                reduction.op,
            )
        else:
            if _overlaps(flat, sources, reduction.dtype):
                flat = torch.empty_like(flat)
            copy_back(flat.view(-1), sources[self._rank].view(-1))
            sources[self._rank] = flat
            call = run_sequentially(
                partial(
                    native.reduce,
                    source.data_ptr(),
                    source.numel(),
                    reduction.dtype,
                    reduction.op,
                    root,
                )
                for root, source in enumerate(sources)
            )
        if reduction.divides:
            call = divide_after(call, flat, self._size)
        pairs, operator = [(tensor, flat)], ("reduce_scatter", [tensor], [inputs], opts)
        return self._run_collective(
            "reduce_scatter", call, tensor, opts, pairs, operator, reduction.op, -1, sources
        )

    def alltoall(
        self,
        output_tensors: Tensors,
        input_tensors: Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Send each rank its tensor from the list; sizes may differ between pairs of ranks."""
        opts = _alltoall(opts, timeout)
        outputs = self._tensors_per_rank(output_tensors, "all_to_all", "outputs")
        inputs = self._tensors_per_rank(input_tensors, "all_to_all", "inputs")
        check_same_kind(inputs, inputs[0], "all_to_all", sized_indices=())
        check_same_kind(outputs, inputs[self._rank], "all_to_all", sized_indices=(self._rank,))
        sources = [prepare_input(item, "all_to_all") for item in inputs]
        flats = [prepare_output(output, "all_to_all") for output in outputs]
        code = dtype_code(inputs[0].dtype, "all_to_all")
        counts = [source.numel() for source in sources], [flat.numel() for flat in flats]
        starts = [source.data_ptr() for source in sources], [flat.data_ptr() for flat in flats]
        if overlap(starts[0], counts[0], starts[1], counts[1], code):
            # Incoming data would overwrite parts that other ranks have not read yet.
            sources = [source.clone() for source in sources]
            starts = [source.data_ptr() for source in sources], starts[1]
        call = partial(
            self._native.all_to_all,
            starts[0],
            counts[0],
            starts[1],
            counts[1],
            code,
        )
        pairs = list(zip(outputs, flats, strict=True))
        operator = "alltoall", outputs, inputs, opts
        return self._run_collective(
            "all_to_all", call, inputs[0], opts, pairs, operator, 0, -1, sources
        )

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Block until all ranks have entered the barrier."""
        opts = _barrier(opts, timeout)
        return self._run_collective(
            "barrier", self._native.barrier, None, opts, [], ("barrier", opts)
        )

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Block until all ranks have entered; on a timeout, name the missing ranks on every rank.

        Args:
            timeout: The maximum time to wait; the group's timeout if None. If it is zero or less,
                the call raises without waiting.
            wait_all_ranks: Whether the part of the message in PyTorch's wording, at its end, names
                all missing ranks, not only the first. The beginning names all in either case.

        Raises:
            CollectiveTimeout: Some ranks did not arrive in time; the message has their numbers and
                pids. The group is then broken, as after every timeout, unless `timeout` was zero
                or less.
        """
        opts = dist.BarrierOptions()
        opts.asyncOp = False
        if timeout is not None:
            opts.timeout = timeout
            if timeout.total_seconds() <= 0:
                raise CollectiveTimeout(
                    f"[{self._rank_label} on {socket.gethostname()}] monitored_barrier at "
                    f"{call_site()}: Rank {self._rank} timed out in monitoredBarrier, with a "
                    f"timeout of {timeout}"
                )
        native = self._native
        try:
            operator = "monitored_barrier", opts.timeout, wait_all_ranks
            self._run_collective("monitored_barrier", native.barrier, None, opts, [], operator)
        except CollectiveTimeout as error:
            missing = [] if native.closed else native.ranks_behind(0)
            gloo_message = _gloo_message(self._rank, missing if wait_all_ranks else missing[:1])
            raise CollectiveTimeout(f"{error}. {gloo_message}") from None

    # Checks.

    def _tensors_per_rank(self, lists: list[Tensors] | Tensors, name: str, role: str) -> Tensors:
        """Check and return the list of one tensor per rank, possibly nested in a list of one."""
        is_nested = len(lists) == 1 and not isinstance(lists[0], torch.Tensor)
        tensors: Any = lists[0] if is_nested else lists
        if len(tensors) != self._size:
            raise UsageError(
                f"{name}: got {len(tensors)} {role}, expected one per rank, {self._size}"
            )
        return list(tensors)

    def _check_root(self, root: int, name: str) -> int:
        if not 0 <= root < self._size:
            raise UsageError(f"{name}: root {root}, expected a rank from 0 to {self._size - 1}")
        return root


def premultiply(flat: torch.Tensor, op: Any) -> torch.Tensor:
    """Return a contiguous tensor multiplied by the factor of an operator."""
    factor = premul_factor(op)
    # Never in place, since `flat` may be the user's tensor, which keeps its values if it is not the
    # result.
    return flat * (factor.to("cpu") if isinstance(factor, torch.Tensor) else factor)


def _overlaps(tensor: torch.Tensor, tensors: Tensors, dtype: int) -> bool:
    """Return whether a contiguous tensor overlaps any of several that do not overlap each other."""
    starts, counts = [each.data_ptr() for each in tensors], [each.numel() for each in tensors]
    return overlap([tensor.data_ptr()], [tensor.numel()], starts, counts, dtype)


def _gloo_message(rank: int, missing: Sequence[int]) -> str:
    """Return the message of Gloo's monitored_barrier, for programs that search for it."""
    if rank != 0:
        return (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting "
            "for send/recv from rank 0"
        )
    ranks = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    return f"{ranks} failed to pass monitoredBarrier"


def _sparse_sum(
    native: _native.Group, tensor: torch.Tensor, op: dist.ReduceOp, size: int
) -> NativeCall:
    """Return a call that sums a sparse COO tensor over `size` ranks, in place.

    The ranks exchange their numbers of entries, then gather all entries on every rank, which adds
    up entries with the same indices. This is the algorithm of PyTorch's ProcessGroupGloo. The call
    raises `CollectiveMismatch` on all ranks if their tensors differ in shape.

    Raises:
        UsageError: The operator is not SUM, or the device is not the CPU.
    """
    if hash(op) != hash(dist.ReduceOp.SUM):
        raise UsageError(f"all_reduce: sparse tensors can only be summed, got {op}")
    if tensor.device.type != "cpu":
        raise UsageError(
            f"all_reduce: got {format_tensor(tensor)} on {tensor.device}, expected the CPU"
        )
    dtype_code(tensor.dtype, "all_reduce")

    def run(timeout: float) -> _native.Status | None:
        local = tensor.coalesce()
        shape = torch.tensor([local.sparse_dim(), *local.shape, local._nnz()])
        shapes = shape.new_empty(size, shape.numel())
        addresses = [row.data_ptr() for row in shapes]
        code = dtype_code(shape.dtype, "all_reduce")
        status = native.all_gather(shape.data_ptr(), addresses, shape.numel(), code, timeout)
        if status is not None:
            return status
        if not bool((shapes[:, :-1] == shape[:-1]).all()):
            raise CollectiveMismatch(
                "all_reduce of sparse tensors that differ from rank to rank; sparse dimensions "
                f"and shape, from rank 0 on: {shapes[:, :-1].tolist()}"
            )
        counts = shapes[:, -1].tolist()
        parts = []
        for part in (local.indices().t(), local.values()):
            whole, status = _gather_rows(native, part.contiguous(), counts, timeout)
            if status is not None:
                return status
            parts.append(whole)
        total = torch.sparse_coo_tensor(
            parts[0].t(), parts[1], tensor.shape, check_invariants=False
        )
        tensor.copy_(total.coalesce())
        return None

    return run


def _gather_rows(
    native: _native.Group, rows: torch.Tensor, counts: list[int], timeout: float
) -> tuple[torch.Tensor, _native.Status | None]:
    """Gather and concatenate the rows of all ranks; `counts` has the number of rows per rank."""
    whole = rows.new_empty(sum(counts), *rows.shape[1:])
    parts = torch.split(whole, counts)
    status = native.all_to_all(
        [rows.data_ptr()] * len(counts),
        [rows.numel()] * len(counts),
        [part.data_ptr() for part in parts],
        [part.numel() for part in parts],
        dtype_code(rows.dtype, "all_reduce"),
        timeout,
    )
    return whole, status
