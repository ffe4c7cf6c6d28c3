"""Collectives on lists of tensors.

Each method checks its arguments, so that a mistake raises here before a peer is touched, names the
native call, and lets `_collective` run it.
"""

from __future__ import annotations

import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from phalanx.backend.call_site import call_site
from phalanx.backend.dtypes import Reduction, code_of, factor_of, reduction
from phalanx.backend.operands import dense, only, same_kind, settle
from phalanx.backend.options import options_of
from phalanx.backend.running import NativeCall, Running, Tensors, divided, in_turn
from phalanx.backend.sparse import sparse_sum
from phalanx.errors import CollectiveTimeout, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta


_broadcast = options_of(dist.BroadcastOptions, "rootRank")
_allreduce = options_of(dist.AllreduceOptions, "reduceOp")
_reduce = options_of(dist.ReduceOptions, "rootRank")
_allgather = options_of(AllgatherOptions)
_gather = options_of(dist.GatherOptions, "rootRank")
_scatter = options_of(dist.ScatterOptions, "rootRank")
_reduce_scatter = options_of(dist.ReduceScatterOptions, "reduceOp")
_alltoall = options_of(dist.AllToAllOptions)
_barrier = options_of(dist.BarrierOptions)


class Collectives(Running):
    """A group whose ranks do the same operations in the same order.

    As with PyTorch's own groups, each method takes an options object, or the option that matters
    most (root or operator), and a timeout; and one tensor in the place of a list of one.
    """

    # Collectives, in the order of PyTorch's documentation.

    def broadcast(
        self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Overwrite the tensor of every rank with the root's."""
        opts = _broadcast(opts, timeout)
        tensor = only(tensors, "broadcast")
        root = self._check_root(opts.rootRank, "broadcast")
        code = code_of(tensor.dtype, "broadcast")
        flat = dense(tensor, "broadcast", written=root != self._rank)
        call = partial(self._native.broadcast, flat.data_ptr(), flat.numel(), code, root)
        outputs = [] if root == self._rank else [(tensor, flat)]
        return self._collective("broadcast", call, tensor, opts, outputs, 0, root, keep=flat)

    def allreduce(
        self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Combine the tensors of all ranks; every rank gets the result, in place."""
        opts = _allreduce(opts, timeout)
        tensor = only(tensors, "all_reduce")
        if tensor.is_sparse:
            call: NativeCall = sparse_sum(self._native, tensor, opts.reduceOp, self._size)
            return self._collective("all_reduce", call, tensor, opts, [])
        op = opts.reduceOp
        how = reduction(op, tensor, "all_reduce")
        flat = self._reducible(tensor, how, op, "all_reduce", written=True)
        call = partial(self._native.all_reduce, flat.data_ptr(), flat.numel(), how.dtype, how.op)
        if how.divided:
            call = divided(call, flat, self._size)
        return self._collective("all_reduce", call, tensor, opts, [(tensor, flat)], how.op)

    def reduce(
        self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Combine the tensors of all ranks; the root gets the result, in place."""
        opts = _reduce(opts, timeout)
        tensor = only(tensors, "reduce")
        root = self._check_root(opts.rootRank, "reduce")
        is_root = root == self._rank
        op = opts.reduceOp
        how = reduction(op, tensor, "reduce")
        flat = self._reducible(tensor, how, op, "reduce", written=is_root)
        call: NativeCall = partial(
            self._native.reduce, flat.data_ptr(), flat.numel(), how.dtype, how.op, root
        )
        if how.divided and is_root:
            call = divided(call, flat, self._size)
        outputs = [(tensor, flat)] if is_root else []
        return self._collective("reduce", call, tensor, opts, outputs, how.op, root, keep=flat)

    def allgather(
        self,
        output_tensors: list[Tensors],
        input_tensors: Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Collect the tensors of all ranks, in rank order, on every rank."""
        opts = _allgather(opts, timeout)
        tensor = only(input_tensors, "all_gather")
        outputs = self._per_rank(output_tensors, "all_gather", "outputs")
        same_kind(outputs, tensor, "all_gather", sized=(self._rank,))
        flat = dense(tensor, "all_gather", written=False)
        flats = [dense(output, "all_gather", written=True) for output in outputs]
        code = code_of(tensor.dtype, "all_gather")
        native = self._native
        if all(output.numel() == flat.numel() for output in flats):
            addresses = [output.data_ptr() for output in flats]
            call: NativeCall = partial(
                native.all_gather, flat.data_ptr(), addresses, flat.numel(), code
            )
        else:
            settle(flats[self._rank].view(-1), flat.view(-1))
            call = in_turn(
                partial(native.broadcast, output.data_ptr(), output.numel(), code, root)
                for root, output in enumerate(flats)
            )
        pairs = list(zip(outputs, flats, strict=True))
        return self._collective("all_gather", call, tensor, opts, pairs, keep=flat)

    def gather(
        self,
        output_tensors: list[Tensors],
        input_tensors: Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Collect the tensors of all ranks, in rank order, on the root."""
        opts = _gather(opts, timeout)
        tensor = only(input_tensors, "gather")
        root = self._check_root(opts.rootRank, "gather")
        outputs: Sequence[torch.Tensor] = ()
        if root == self._rank:
            outputs = self._per_rank(output_tensors, "gather", "outputs")
            same_kind(outputs, tensor, "gather")
        flat = dense(tensor, "gather", written=False)
        flats = [dense(output, "gather", written=True) for output in outputs]
        code = code_of(tensor.dtype, "gather")
        addresses = [output.data_ptr() for output in flats]
        call = partial(self._native.gather, flat.data_ptr(), addresses, flat.numel(), code, root)
        pairs = list(zip(outputs, flats, strict=True))
        return self._collective("gather", call, tensor, opts, pairs, root=root, keep=flat)

    def scatter(
        self,
        output_tensors: Tensors,
        input_tensors: list[Tensors],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Give every rank its tensor of the root's list."""
        opts = _scatter(opts, timeout)
        tensor = only(output_tensors, "scatter")
        root = self._check_root(opts.rootRank, "scatter")
        inputs: Sequence[torch.Tensor] = ()
        if root == self._rank:
            inputs = self._per_rank(input_tensors, "scatter", "inputs")
            same_kind(inputs, tensor, "scatter")
        flat = dense(tensor, "scatter", written=True)
        flats = [dense(item, "scatter", written=False) for item in inputs]
        code = code_of(tensor.dtype, "scatter")
        addresses = [item.data_ptr() for item in flats]
        call = partial(self._native.scatter, addresses, flat.data_ptr(), flat.numel(), code, root)
        return self._collective(
            "scatter",
            call,
            tensor,
            opts,
            [(tensor, flat)],
            root=root,
            keep=flats,
            inputs=inputs,
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
        tensor = only(output_tensors, "reduce_scatter")
        inputs = self._per_rank(input_tensors, "reduce_scatter", "inputs")
        same_kind(inputs, tensor, "reduce_scatter", sized=(self._rank,))
        flat = dense(tensor, "reduce_scatter", written=True)
        op = opts.reduceOp
        how = reduction(op, tensor, "reduce_scatter")
        sources = [self._reducible(item, how, op, "reduce_scatter") for item in inputs]
        native = self._native
        if all(source.numel() == flat.numel() for source in sources):
            addresses = [source.data_ptr() for source in sources]
            call: NativeCall = partial(
                native.reduce_scatter,
                addresses,
                flat.data_ptr(),
                flat.numel(),
                how.dtype,
                how.op,
            )
        else:
            settle(flat.view(-1), sources[self._rank].view(-1))
            sources[self._rank] = flat
            call = in_turn(
                partial(native.reduce, source.data_ptr(), source.numel(), how.dtype, how.op, root)
                for root, source in enumerate(sources)
            )
        if how.divided:
            call = divided(call, flat, self._size)
        return self._collective(
            "reduce_scatter", call, tensor, opts, [(tensor, flat)], how.op, keep=sources
        )

    def alltoall(
        self,
        output_tensors: Tensors,
        input_tensors: Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Give every rank its tensor of the list; sizes may differ from pair to pair."""
        opts = _alltoall(opts, timeout)
        outputs = self._per_rank(output_tensors, "all_to_all", "outputs")
        inputs = self._per_rank(input_tensors, "all_to_all", "inputs")
        same_kind(inputs, inputs[0], "all_to_all", sized=())
        same_kind(outputs, inputs[self._rank], "all_to_all", sized=(self._rank,))
        sources = [dense(item, "all_to_all", written=False) for item in inputs]
        flats = [dense(output, "all_to_all", written=True) for output in outputs]
        taken = {flat.data_ptr() for flat in flats}
        # In place: what comes would overwrite what others haven't got yet.
        sources = [item.clone() if item.data_ptr() in taken else item for item in sources]
        call = partial(
            self._native.all_to_all,
            [source.data_ptr() for source in sources],
            [source.numel() for source in sources],
            [flat.data_ptr() for flat in flats],
            [flat.numel() for flat in flats],
            code_of(inputs[0].dtype, "all_to_all"),
        )
        pairs = list(zip(outputs, flats, strict=True))
        return self._collective("all_to_all", call, inputs[0], opts, pairs, keep=sources)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Block until all ranks have come."""
        opts = _barrier(opts, timeout)
        return self._collective("barrier", self._native.barrier, None, opts, [])

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Block until all ranks have come; when the time is up, every rank learns who has not.

        Args:
            timeout: How long to wait; the group's timeout if None. Zero or less has passed already.
            wait_all_ranks: Name all missing ranks, not only the first, in PyTorch's own words at
                the end of the message. Its beginning names all of them either way.

        Raises:
            CollectiveTimeout: Ranks that did not come in time, by number and pid. The group is
                broken then, as after every timeout, unless the time had passed before the call.
        """
        opts = dist.BarrierOptions()
        opts.asyncOp = False
        if timeout is not None:
            opts.timeout = timeout
            if timeout.total_seconds() <= 0:
                raise CollectiveTimeout(
                    f"[{self._place} on {socket.gethostname()}] monitored_barrier at {call_site()}:"
                    f" Rank {self._rank} timed out in monitoredBarrier, with a timeout of {timeout}"
                )
        native = self._native
        try:
            self._collective("monitored_barrier", native.barrier, None, opts, [])
        except CollectiveTimeout as error:
            late = [] if native.closed else native.behind(0)
            words = _in_torchs_words(self._rank, late if wait_all_ranks else late[:1])
            raise CollectiveTimeout(f"{error}. {words}") from None

    # Checks and words.

    @staticmethod
    def _reducible(
        tensor: torch.Tensor, how: Reduction, op: Any, name: str, *, written: bool = False
    ) -> torch.Tensor:
        """The tensor as the core takes it; times the factor if the operator has one."""
        flat = dense(tensor, name, written=written)
        if not how.multiplied:
            return flat
        factor = factor_of(op)
        # Never in place: the user's own tensor keeps its values where it isn't the result.
        return flat * (factor.to("cpu") if isinstance(factor, torch.Tensor) else factor)

    def _per_rank(self, lists: list[Tensors] | Tensors, name: str, what: str) -> Tensors:
        """The list that holds one tensor for each rank, alone or in a list of one, checked."""
        nested = len(lists) == 1 and not isinstance(lists[0], torch.Tensor)
        tensors: Any = lists[0] if nested else lists
        if len(tensors) != self._size:
            raise UsageError(
                f"{name}: got {len(tensors)} {what}, expected one per rank, {self._size}"
            )
        return list(tensors)

    def _check_root(self, root: int, name: str) -> int:
        if not 0 <= root < self._size:
            raise UsageError(f"{name}: root {root}, expected a rank from 0 to {self._size - 1}")
        return root


def _in_torchs_words(rank: int, missing: Sequence[int]) -> str:
    """What Gloo's monitored_barrier says, for programs that look for it."""
    if rank != 0:
        return (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting "
            "for send/recv from rank 0"
        )
    ranks = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    return f"{ranks} failed to pass monitoredBarrier"
