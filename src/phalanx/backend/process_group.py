"""The process group of the backend, which `init_process_group("phalanx")` creates.

This module has the collectives on single tensors, which hold one part per rank, and the coalesced
ones, under the names that PyTorch calls from 2.11 on. The layers below have the rest.
"""

from __future__ import annotations

import operator
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from phalanx import topology
from phalanx._native import is_misplaced
from phalanx.backend import torch_patches
from phalanx.backend.collectives import Collectives, premultiply
from phalanx.backend.cuda import delegate_cuda
from phalanx.backend.execution import NativeCall, Pairs, divide_after, run_sequentially
from phalanx.backend.failure import describe_missing_rank
from phalanx.backend.membership import Membership
from phalanx.backend.operands import (
    check_pair,
    check_same_kind,
    dtype_code,
    find_reduction,
    format_tensor,
    prepare_input,
    prepare_output,
    warn_once,
)
from phalanx.backend.options import select_transport
from phalanx.backend.work import Tensors
from phalanx.errors import UsageError
from phalanx.observe import recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.backend.instrumentation import OperatorCall

on_create: Callable[[ProcessGroup], None] | None = None
"""A function that is called with each new group; fault injection wraps its methods there."""


def create(options: Any, backend_options: object = None) -> ProcessGroup:
    """Create a group; PyTorch calls this for "phalanx" with its `_DistributedBackendOptions`."""
    transport = select_transport(
        backend_options, dist.group.WORLD if dist.is_initialized() else None
    )
    rank, size, name = options.group_rank, options.group_size, options.group_id
    members, store = options.global_ranks_in_group, _attempt_store(options.store)
    recorder.open_for_group(store, rank, size)
    describe_missing = partial(_describe_missing, members)
    store, layout, rank_records, local = topology.join(
        store, rank, size, options.timeout, name, members, describe_missing, transport
    )
    native = local
    if len(layout.hosts) > 1:
        # Groups of one host, the common case, need neither this module nor those of `hierarchical`.
        from phalanx.backend.multihost import form_multihost_group

        native = form_multihost_group(
            local, layout, rank_records, store, transport, options.timeout
        )
    torch_patches.apply()
    if os.environ.get("TORCH_DIST_NAN_CHECK") == "1":
        warn_once("nan", "TORCH_DIST_NAN_CHECK has no effect: PyTorch checks its own groups only")
    group = ProcessGroup(native, store, rank, size, name, options.timeout)
    group.hosts = layout.hosts
    group.transport = transport
    group._nccl.required = transport == "nccl"
    if on_create is not None:
        on_create(group)
    return group


def _describe_missing(members: Sequence[int], rank: int, claimant: str) -> str:
    """Describe a missing rank of a group that is being formed."""
    default_group = dist.group.WORLD if dist.is_initialized() else None
    native = (
        default_group._native
        if isinstance(default_group, Membership) and not default_group._native.closed
        else None
    )
    return describe_missing_rank(native, members[rank] if members else rank, claimant)


def _attempt_store(store: dist.Store) -> dist.Store:  # type: ignore[name-defined]
    """Return a store in which ranks restarted by torchrun do not find keys of the previous ones."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return store if attempt == "0" else dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]


@delegate_cuda(
    "broadcast",
    "allreduce",
    "reduce",
    "allgather",
    "gather",
    "scatter",
    "reduce_scatter",
    "alltoall",
    "all_gather_single",
    "reduce_scatter_single",
    "all_to_all_single",
    "allreduce_coalesced",
    "all_gather_single_coalesced",
    "reduce_scatter_single_coalesced",
    "allgather_coalesced",
    "send",
    "recv",
    "recv_anysource",
)
class ProcessGroup(Collectives):
    """A group of ranks that exchange tensors in shared memory, and by a transport between hosts.

    Blocking calls run in the caller's thread without the GIL; asynchronous ones run in the group's
    thread, in order. `torch.distributed` creates groups; users do not.
    """

    # Collectives on single tensors.

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Collect the tensors of all ranks, one after another in rank order, in one tensor."""
        opts = opts or AllgatherOptions()
        call, pair, keep_alive = self._prepare_gather(output, input, "all_gather_single")
        operator = "all_gather_single", output, input, opts
        return self._run_collective(
            "all_gather_single", call, input, opts, [pair], operator, 0, -1, keep_alive
        )

    def gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Collect the tensors of all ranks, one after another in rank order, on the root."""
        opts = opts or dist.GatherOptions()
        outputs = []
        if opts.rootRank == self._rank:
            if output.numel() != self._size * input.numel():
                raise self._size_error(output, input, "gather_single", "output", "input")
            if not output.is_contiguous():
                raise UsageError(
                    f"gather_single: the output {format_tensor(output)} has strides "
                    f"{output.stride()}, expected a contiguous tensor"
                )
            outputs = [list(output.view(self._size, *input.shape))]
        return self.gather(outputs, [input], opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Combine the tensors of all ranks; every rank gets the part at its rank."""
        opts = opts or dist.ReduceScatterOptions()
        call, pair, op, keep_alive = self._prepare_reduce_scatter(
            output, input, opts.reduceOp, "reduce_scatter_single"
        )
        name, operator = "reduce_scatter_single", ("reduce_scatter_single", output, input, opts)
        return self._run_collective(name, call, input, opts, [pair], operator, op, -1, keep_alive)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """Send each rank its rows of a tensor, by the split sizes or, if empty, equally many."""
        opts = opts or dist.AllToAllOptions()
        name = "all_to_all_single"
        check_pair(output, input, name)
        flat_in = prepare_input(input, name)
        flat_out = prepare_output(output, name)
        offset = flat_out.data_ptr() - flat_in.data_ptr()
        if -flat_out.nbytes < offset < flat_in.nbytes:
            # Incoming data would overwrite parts that other ranks have not read yet.
            flat_in = flat_in.clone()
        code = dtype_code(input.dtype, name)
        count, remainder = divmod(flat_in.numel(), self._size)
        is_even = not (remainder or input_split_sizes or output_split_sizes)
        if (
            is_even
            and input.dim()
            and input.shape == output.shape
            and input.size(0) % self._size == 0
        ):
            addresses = flat_in.data_ptr(), flat_out.data_ptr()
            call: NativeCall = partial(self._native.all_to_all_single, *addresses, count, code)
        else:
            inputs = self._split_rows(flat_in, input_split_sizes, name, "input")
            outputs = self._split_rows(flat_out, output_split_sizes, name, "output")
            self._check_own_parts(inputs[1], outputs[1], name)
            call = partial(self._native.all_to_all, *inputs, *outputs, code)
        pairs = [(output, flat_out)]
        operator = name, output, input, output_split_sizes, input_split_sizes, opts
        return self._run_collective(name, call, input, opts, pairs, operator, 0, -1, flat_in)

    # Coalesced collectives: several operations with one work.

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Combine each tensor of the list with those of all ranks, in place."""
        opts = opts or dist.AllreduceCoalescedOptions()
        name, native = "all_reduce_coalesced", self._native
        calls, pairs, op = [], [], 0
        for tensor in tensors:
            reduction = find_reduction(opts.reduceOp, tensor, name)
            flat = prepare_output(tensor, name)
            if reduction.premultiplies:
                flat = premultiply(flat, opts.reduceOp)
            op = reduction.op
            call = partial(native.all_reduce, flat.data_ptr(), flat.numel(), reduction.dtype, op)
            calls.append(divide_after(call, flat, self._size) if reduction.divides else call)
            pairs.append((tensor, flat))
        operator = "allreduce_coalesced", tensors, opts
        return self._run_coalesced(name, calls, tensors, opts, pairs, op=op, operator=operator)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Do `all_gather_single` for each pair of an output and an input."""
        opts = opts or AllgatherOptions()
        name = "all_gather_single_coalesced"
        _check_same_length(outputs, inputs, name)
        prepared = [self._prepare_gather(*pair, name) for pair in zip(outputs, inputs, strict=True)]
        calls = [call for call, _, _ in prepared]
        pairs = [pair for _, pair, _ in prepared]
        operator = name, outputs, inputs, opts
        return self._run_coalesced(
            name, calls, inputs, opts, pairs, keep_alive=prepared, operator=operator
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Do `reduce_scatter_single` for each pair of an output and an input."""
        opts = opts or dist.ReduceScatterOptions()
        name = "reduce_scatter_single_coalesced"
        _check_same_length(outputs, inputs, name)
        prepared = [
            self._prepare_reduce_scatter(output, source, opts.reduceOp, name)
            for output, source in zip(outputs, inputs, strict=True)
        ]
        calls = [call for call, _, _, _ in prepared]
        pairs = [pair for _, pair, _, _ in prepared]
        op = prepared[0][2] if prepared else 0
        operator = name, outputs, inputs, opts
        return self._run_coalesced(
            name, calls, inputs, opts, pairs, op=op, keep_alive=prepared, operator=operator
        )

    def allgather_coalesced(
        self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Collect each tensor of the list from all ranks; `output_lists` has one list per rank."""
        opts = opts or AllgatherOptions()
        name = "all_gather_coalesced"
        if len(output_lists) != self._size:
            raise UsageError(
                f"{name}: got {len(output_lists)} lists of outputs, expected one per rank, "
                f"{self._size}"
            )
        calls: list[NativeCall] = []
        pairs: Pairs = []
        flats = [prepare_input(source, name) for source in inputs]
        for outputs in output_lists:
            _check_same_length(outputs, inputs, name)
        for index, source in enumerate(inputs):
            outputs = [each[index] for each in output_lists]
            check_same_kind(outputs, source, name)
            targets = [prepare_output(output, name) for output in outputs]
            code, addresses = dtype_code(source.dtype, name), [flat.data_ptr() for flat in targets]
            flat = flats[index]
            if is_misplaced(flat.data_ptr(), addresses, flat.numel(), code, self._rank):
                flat = flats[index] = flat.clone()
            calls.append(
                partial(self._native.all_gather, flat.data_ptr(), addresses, flat.numel(), code)
            )
            pairs.extend(zip(outputs, targets, strict=True))
        operator = "allgather_coalesced", output_lists, inputs, opts
        return self._run_coalesced(
            name, calls, inputs, opts, pairs, keep_alive=flats, operator=operator
        )

    # Former names in PyTorch, which libraries may still call.

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    gather_into_tensor = gather_single
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    # Helpers.

    def _run_coalesced(
        self,
        name: str,
        calls: Sequence[NativeCall],
        subjects: Tensors,
        opts: Any,
        pairs: Pairs,
        *,
        op: int = 0,
        keep_alive: object = None,
        operator: OperatorCall,
    ) -> dist.Work:
        subject = subjects[0] if subjects else None
        call = run_sequentially(calls)
        return self._run_collective(
            name, call, subject, opts, pairs, operator, op, -1, keep_alive, subjects
        )

    def _prepare_gather(
        self, output: torch.Tensor, source: torch.Tensor, name: str
    ) -> tuple[NativeCall, tuple[torch.Tensor, torch.Tensor], object]:
        check_pair(output, source, name)
        count = source.numel()
        if output.numel() != self._size * count:
            raise self._size_error(output, source, name, "output", "input")
        flat = prepare_input(source, name)
        target = prepare_output(output, name)
        addresses = flat.data_ptr(), target.data_ptr()
        if self._is_misplaced(*addresses, flat.nbytes):
            flat = flat.clone()
            addresses = flat.data_ptr(), addresses[1]
        code = dtype_code(source.dtype, name)
        call = partial(self._native.all_gather_single, *addresses, count, code)
        return call, (output, target), flat

    def _prepare_reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, reduce_op: Any, name: str
    ) -> tuple[NativeCall, tuple[torch.Tensor, torch.Tensor], int, object]:
        check_pair(output, source, name)
        count = output.numel()
        if source.numel() != self._size * count:
            raise self._size_error(source, output, name, "input", "output")
        reduction = find_reduction(reduce_op, output, name)
        flat = prepare_input(source, name)
        if reduction.premultiplies:
            flat = premultiply(flat, reduce_op)
        target = prepare_output(output, name)
        addresses = flat.data_ptr(), target.data_ptr()
        if self._is_misplaced(addresses[1], addresses[0], target.nbytes):
            target = torch.empty_like(target)
            addresses = addresses[0], target.data_ptr()
        call: NativeCall = partial(
            self._native.reduce_scatter_single, *addresses, count, reduction.dtype, reduction.op
        )
        if reduction.divides:
            call = divide_after(call, target, self._size)
        return call, (output, target), reduction.op, flat

    def _is_misplaced(self, part: int, whole: int, size: int) -> bool:
        """Return whether a part overlaps the whole without being exactly this rank's part of it.

        Args:
            part: The address of the part.
            whole: The address of the tensor with the parts of all ranks.
            size: The size of a part in bytes.
        """
        offset = part - whole
        return -size < offset < self._size * size and offset != self._rank * size

    def _part_addresses(self, whole: torch.Tensor) -> list[int]:
        """Return the addresses of the equally sized parts of a contiguous tensor, one per rank."""
        start = whole.data_ptr()
        step = whole.numel() // self._size * whole.element_size()
        return [start + rank * step for rank in range(self._size)]

    def _size_error(
        self, whole: torch.Tensor, part: torch.Tensor, name: str, whole_role: str, part_role: str
    ) -> UsageError:
        return UsageError(
            f"{name}: the {whole_role} {format_tensor(whole)} has {whole.numel()} elements, "
            f"expected {self._size * part.numel()}: {self._size} times those of the {part_role} "
            f"{format_tensor(part)}"
        )

    def _split_rows(
        self, flat: torch.Tensor, splits: Sequence[int], name: str, role: str
    ) -> tuple[list[int], list[int]]:
        """Return the addresses and the element counts of the rows for each rank."""
        rows = flat.size(0) if flat.dim() else 1
        if not splits:
            if rows % self._size:
                raise UsageError(
                    f"{name}: the {role} {format_tensor(flat)} has {rows} rows, which {self._size} "
                    f"ranks cannot share equally: give {role}_split_sizes"
                )
            return self._part_addresses(flat), [flat.numel() // self._size] * self._size
        try:
            sizes = list(map(operator.index, splits))
        except TypeError:
            sizes = []  # fails the check of the length below
        if len(sizes) != self._size or sum(sizes) != rows or min(sizes) < 0:
            raise UsageError(
                f"{name}: {role}_split_sizes are {list(splits)}, expected {self._size} integers, "
                f"one per rank, that sum up to the {rows} rows of the {role} {format_tensor(flat)}"
            )
        row = flat.numel() // rows if rows else 0
        counts = [size * row for size in sizes]
        addresses, start = [], flat.data_ptr()
        for count in counts:
            addresses.append(start)
            start += count * flat.element_size()
        return addresses, counts

    def _check_own_parts(
        self, input_counts: list[int], output_counts: list[int], name: str
    ) -> None:
        if input_counts[self._rank] != output_counts[self._rank]:
            raise UsageError(
                f"{name}: rank {self._rank} sends itself {input_counts[self._rank]} elements and "
                f"receives {output_counts[self._rank]}: the split sizes of input and output must "
                "agree"
            )


def _check_same_length(outputs: Sequence[object], inputs: Sequence[object], name: str) -> None:
    if len(outputs) != len(inputs):
        raise UsageError(f"{name}: got {len(outputs)} outputs for {len(inputs)} inputs")
