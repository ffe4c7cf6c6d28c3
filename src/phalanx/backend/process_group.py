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
from phalanx.backend.collectives import Collectives, multiplied
from phalanx.backend.cuda import handing_over
from phalanx.backend.dtypes import code_of, reduction
from phalanx.backend.execution import NativeCall, Pairs, Tensors, divided, in_turn
from phalanx.backend.failure import absence
from phalanx.backend.membership import Membership
from phalanx.backend.operands import dense, label, same_kind, same_pair, tell_once, writable
from phalanx.backend.options import transport_of
from phalanx.errors import UsageError
from phalanx.observe import recorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.backend.operators import Operator


def create(options: Any, backend_options: object = None) -> ProcessGroup:
    """Create a group; PyTorch calls this for "phalanx" with its `_DistributedBackendOptions`."""
    transport = transport_of(backend_options, dist.group.WORLD if dist.is_initialized() else None)
    rank, size, name = options.group_rank, options.group_size, options.group_id
    members, store = options.global_ranks_in_group, _own_store(options.store)
    recorder.open_for_group(store, rank, size)
    where = partial(_known_of, members)
    store, layout, places, local = topology.join(
        store, rank, size, options.timeout, name, members, where, transport
    )
    native = local
    if len(layout.hosts) > 1:
        # Groups of one host, the common case, need neither these modules nor those of `hosts`.
        from phalanx.backend.multihost import spanning

        native = spanning(local, layout, places, store, transport, options.timeout)
    torch_patches.smooth()
    if os.environ.get("TORCH_DIST_NAN_CHECK") == "1":
        tell_once("nan", "TORCH_DIST_NAN_CHECK has no effect: PyTorch checks its own groups only")
    group = ProcessGroup(native, store, rank, size, name, options.timeout)
    group.hosts = layout.hosts
    group.transport = transport
    group._nccl.required = transport == "nccl"
    return group


def _known_of(members: Sequence[int], rank: int, holder: str) -> str:
    """Describe a missing rank of a group that is being formed (see `failure.absence`)."""
    world = dist.group.WORLD if dist.is_initialized() else None
    native = world._native if isinstance(world, Membership) and not world._native.closed else None
    return absence(native, members[rank] if members else rank, holder)


def _own_store(store: dist.Store) -> dist.Store:  # type: ignore[name-defined]
    """Return a store in which ranks restarted by torchrun do not find keys of the previous ones."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return store if attempt == "0" else dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]


@handing_over(
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
        call, pair, keep = self._gather_one(output, input, "all_gather_single")
        operator = "all_gather_single", output, input, opts
        return self._collective(
            "all_gather_single", call, input, opts, [pair], operator, 0, -1, keep
        )

    def gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Collect the tensors of all ranks, one after another in rank order, on the root."""
        opts = opts or dist.GatherOptions()
        outputs = []
        if opts.rootRank == self._rank:
            if output.numel() != self._size * input.numel():
                raise self._unfit(output, input, "gather_single", "output", "input")
            if not output.is_contiguous():
                raise UsageError(
                    f"gather_single: the output {label(output)} has strides {output.stride()}, "
                    "expected a contiguous tensor"
                )
            outputs = [list(output.view(self._size, *input.shape))]
        return self.gather(outputs, [input], opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Combine the tensors of all ranks; every rank gets the part at its rank."""
        opts = opts or dist.ReduceScatterOptions()
        call, pair, op, keep = self._reduce_scatter_one(
            output, input, opts.reduceOp, "reduce_scatter_single"
        )
        name, operator = "reduce_scatter_single", ("reduce_scatter_single", output, input, opts)
        return self._collective(name, call, input, opts, [pair], operator, op, -1, keep)

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
        same_pair(output, input, name)
        flat_in = dense(input, name)
        flat_out = writable(output, name)
        ahead = flat_out.data_ptr() - flat_in.data_ptr()
        if -flat_out.nbytes < ahead < flat_in.nbytes:
            # Incoming data would overwrite parts that other ranks have not read yet.
            flat_in = flat_in.clone()
        code = code_of(input.dtype, name)
        count, left = divmod(flat_in.numel(), self._size)
        even = not (left or input_split_sizes or output_split_sizes)
        if even and input.dim() and input.shape == output.shape and input.size(0) % self._size == 0:
            addresses = flat_in.data_ptr(), flat_out.data_ptr()
            call: NativeCall = partial(self._native.all_to_all_single, *addresses, count, code)
        else:
            inputs = self._parts(flat_in, input_split_sizes, name, "input")
            outputs = self._parts(flat_out, output_split_sizes, name, "output")
            self._check_own_parts(inputs[1], outputs[1], name)
            call = partial(self._native.all_to_all, *inputs, *outputs, code)
        pairs = [(output, flat_out)]
        operator = name, output, input, output_split_sizes, input_split_sizes, opts
        return self._collective(name, call, input, opts, pairs, operator, 0, -1, flat_in)

    # Coalesced collectives: several operations with one work.

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Combine each tensor of the list with those of all ranks, in place."""
        opts = opts or dist.AllreduceCoalescedOptions()
        name, native = "all_reduce_coalesced", self._native
        calls, pairs, op = [], [], 0
        for tensor in tensors:
            how = reduction(opts.reduceOp, tensor, name)
            flat = writable(tensor, name)
            if how.multiplied:
                flat = multiplied(flat, opts.reduceOp)
            op = how.op
            call = partial(native.all_reduce, flat.data_ptr(), flat.numel(), how.dtype, op)
            calls.append(divided(call, flat, self._size) if how.divided else call)
            pairs.append((tensor, flat))
        operator = "allreduce_coalesced", tensors, opts
        return self._coalesced(name, calls, tensors, opts, pairs, op=op, operator=operator)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Do `all_gather_single` for each pair of an output and an input."""
        opts = opts or AllgatherOptions()
        name = "all_gather_single_coalesced"
        _same_length(outputs, inputs, name)
        made = [self._gather_one(*pair, name) for pair in zip(outputs, inputs, strict=True)]
        calls = [call for call, _, _ in made]
        pairs = [pair for _, pair, _ in made]
        operator = name, outputs, inputs, opts
        return self._coalesced(name, calls, inputs, opts, pairs, keep=made, operator=operator)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Do `reduce_scatter_single` for each pair of an output and an input."""
        opts = opts or dist.ReduceScatterOptions()
        name = "reduce_scatter_single_coalesced"
        _same_length(outputs, inputs, name)
        made = [
            self._reduce_scatter_one(output, source, opts.reduceOp, name)
            for output, source in zip(outputs, inputs, strict=True)
        ]
        calls = [call for call, _, _, _ in made]
        pairs = [pair for _, pair, _, _ in made]
        op = made[0][2] if made else 0
        operator = name, outputs, inputs, opts
        return self._coalesced(
            name, calls, inputs, opts, pairs, op=op, keep=made, operator=operator
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
        flats = [dense(source, name) for source in inputs]
        for outputs in output_lists:
            _same_length(outputs, inputs, name)
        for index, source in enumerate(inputs):
            outputs = [each[index] for each in output_lists]
            same_kind(outputs, source, name)
            to = [writable(output, name) for output in outputs]
            code, addresses = code_of(source.dtype, name), [flat.data_ptr() for flat in to]
            flat = flats[index]
            if is_misplaced(flat.data_ptr(), addresses, flat.numel(), code, self._rank):
                flat = flats[index] = flat.clone()
            calls.append(
                partial(self._native.all_gather, flat.data_ptr(), addresses, flat.numel(), code)
            )
            pairs.extend(zip(outputs, to, strict=True))
        operator = "allgather_coalesced", output_lists, inputs, opts
        return self._coalesced(name, calls, inputs, opts, pairs, keep=flats, operator=operator)

    # Former names in PyTorch, which libraries may still call.

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    gather_into_tensor = gather_single
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    # Helpers.

    def _coalesced(
        self,
        name: str,
        calls: Sequence[NativeCall],
        subjects: Tensors,
        opts: Any,
        pairs: Pairs,
        *,
        op: int = 0,
        keep: object = None,
        operator: Operator,
    ) -> dist.Work:
        subject = subjects[0] if subjects else None
        call = in_turn(calls)
        return self._collective(name, call, subject, opts, pairs, operator, op, -1, keep, subjects)

    def _gather_one(
        self, output: torch.Tensor, source: torch.Tensor, name: str
    ) -> tuple[NativeCall, tuple[torch.Tensor, torch.Tensor], object]:
        same_pair(output, source, name)
        count = source.numel()
        if output.numel() != self._size * count:
            raise self._unfit(output, source, name, "output", "input")
        flat = dense(source, name)
        to = writable(output, name)
        addresses = flat.data_ptr(), to.data_ptr()
        if self._is_misplaced(*addresses, flat.nbytes):
            flat = flat.clone()
            addresses = flat.data_ptr(), addresses[1]
        code = code_of(source.dtype, name)
        call = partial(self._native.all_gather_single, *addresses, count, code)
        return call, (output, to), flat

    def _reduce_scatter_one(
        self, output: torch.Tensor, source: torch.Tensor, reduce_op: Any, name: str
    ) -> tuple[NativeCall, tuple[torch.Tensor, torch.Tensor], int, object]:
        same_pair(output, source, name)
        count = output.numel()
        if source.numel() != self._size * count:
            raise self._unfit(source, output, name, "input", "output")
        how = reduction(reduce_op, output, name)
        flat = dense(source, name)
        if how.multiplied:
            flat = multiplied(flat, reduce_op)
        to = writable(output, name)
        addresses = flat.data_ptr(), to.data_ptr()
        if self._is_misplaced(addresses[1], addresses[0], to.nbytes):
            to = torch.empty_like(to)
            addresses = addresses[0], to.data_ptr()
        call: NativeCall = partial(
            self._native.reduce_scatter_single, *addresses, count, how.dtype, how.op
        )
        if how.divided:
            call = divided(call, to, self._size)
        return call, (output, to), how.op, flat

    def _is_misplaced(self, part: int, whole: int, size: int) -> bool:
        """Return whether a part overlaps the whole without being exactly this rank's part of it.

        Args:
            part: The address of the part.
            whole: The address of the tensor with the parts of all ranks.
            size: The size of a part in bytes.
        """
        offset = part - whole
        return -size < offset < self._size * size and offset != self._rank * size

    def _addresses(self, whole: torch.Tensor) -> list[int]:
        """Return the addresses of the equally sized parts of a contiguous tensor, one per rank."""
        start = whole.data_ptr()
        step = whole.numel() // self._size * whole.element_size()
        return [start + rank * step for rank in range(self._size)]

    def _unfit(
        self, whole: torch.Tensor, part: torch.Tensor, name: str, whole_is: str, part_is: str
    ) -> UsageError:
        return UsageError(
            f"{name}: the {whole_is} {label(whole)} has {whole.numel()} elements, expected "
            f"{self._size * part.numel()}: {self._size} times those of the {part_is} {label(part)}"
        )

    def _parts(
        self, flat: torch.Tensor, splits: Sequence[int], name: str, what: str
    ) -> tuple[list[int], list[int]]:
        """Return the addresses and the element counts of the rows for each rank."""
        rows = flat.size(0) if flat.dim() else 1
        if not splits:
            if rows % self._size:
                raise UsageError(
                    f"{name}: the {what} {label(flat)} has {rows} rows, which {self._size} ranks "
                    f"can't share equally: give {what}_split_sizes"
                )
            return self._addresses(flat), [flat.numel() // self._size] * self._size
        try:
            sizes = list(map(operator.index, splits))
        except TypeError:
            sizes = []  # fails the check of the length below
        if len(sizes) != self._size or sum(sizes) != rows or min(sizes) < 0:
            raise UsageError(
                f"{name}: {what}_split_sizes are {list(splits)}, expected {self._size} integers, "
                f"one per rank, that sum up to the {rows} rows of the {what} {label(flat)}"
            )
        row = flat.numel() // rows if rows else 0
        counts = [size * row for size in sizes]
        addresses, start = [], flat.data_ptr()
        for count in counts:
            addresses.append(start)
            start += count * flat.element_size()
        return addresses, counts

    def _check_own_parts(self, given: list[int], taken: list[int], name: str) -> None:
        if given[self._rank] != taken[self._rank]:
            raise UsageError(
                f"{name}: rank {self._rank} gives itself {given[self._rank]} elements and takes "
                f"{taken[self._rank]}: the split sizes of input and output must agree"
            )


def _same_length(outputs: Sequence[object], inputs: Sequence[object], name: str) -> None:
    if len(outputs) != len(inputs):
        raise UsageError(f"{name}: got {len(outputs)} outputs for {len(inputs)} inputs")
