"""The process group of the backend, which `init_process_group("phalanx")` creates.

The class has the methods that PyTorch calls from Python and from C++, under the names of 2.11 and
later. Each collective checks its arguments, so that a mistake raises before any communication, and
passes the core's call to the group's executor. The module also has the two public functions
`phalanx.abort` and `phalanx.host_ranks`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from phalanx import env, torch_versions
from phalanx._native import is_misplaced, overlap
from phalanx.backend import (
    direct_calls,
    formation,
    known_failures,
    leaving,
    newcomers,
    torch_patches,
)
from phalanx.backend.call_site import call_site
from phalanx.backend.collectives import (
    NativeCall,
    addresses_of,
    check_disjoint,
    check_root,
    check_same_length,
    counts_of,
    divide_after,
    overlaps_any,
    run_sequentially,
    size_error,
    split_rows,
    sum_sparse,
    tensors_per_rank,
)
from phalanx.backend.cuda import NcclChild, delegate_cuda
from phalanx.backend.execution import DONE, CollectiveExecutor, Pairs
from phalanx.backend.failure import describe_missing_rank, find_loss
from phalanx.backend.instrumentation import (
    EVENT_NAMES,
    OperatorCall,
)
from phalanx.backend.membership import Membership, fail_all_groups
from phalanx.backend.messages import ANY_SOURCE, Messages, check_peer, is_blocking
from phalanx.backend.operands import (
    check_pair,
    check_same_kind,
    copy_back,
    dtype_code,
    find_reduction,
    format_tensor,
    premultiply,
    prepare_input,
    prepare_output,
    single_tensor,
    warn_once,
)
from phalanx.backend.options import options_factory, select_link
from phalanx.backend.reconfiguration import Reconfiguration
from phalanx.backend.work import CompositeWork, Tensors
from phalanx.errors import CollectiveTimeout, PhalanxError, UsageError
from phalanx.recorder import flight_recorder
from phalanx.system.escape import encodable
from phalanx.topology import HostLink
from phalanx.torch_versions import ErrorType, active_mode_count, is_profiling
from phalanx.transports.store_query import StoreLost, query_store

on_create: Callable[[ProcessGroup], None] | None = None
"""A function that is called with each new group; fault injection wraps its methods there."""


_broadcast = options_factory(dist.BroadcastOptions, "rootRank")
_allreduce = options_factory(dist.AllreduceOptions, "reduceOp")
_reduce = options_factory(dist.ReduceOptions, "rootRank")
_allgather = options_factory(AllgatherOptions)
_gather = options_factory(dist.GatherOptions, "rootRank")
_scatter = options_factory(dist.ScatterOptions, "rootRank")
_reduce_scatter = options_factory(dist.ReduceScatterOptions, "reduceOp")
_alltoall = options_factory(dist.AllToAllOptions)
_barrier = options_factory(dist.BarrierOptions)

_PreparedCall = tuple[NativeCall, Pairs, int, object]
"""A native call, its outputs, the core's code of its operator, and an object to keep alive."""

_NO_WINDOW = "Phalanx has no one-sided operations: exchange tensors with isend() and irecv()"
_NO_HOOKS = (
    "PyTorch calls these hooks for its own groups only: `phalanx watch`, `phalanx trace` and "
    "PyTorch's profiler show the operations of a group of Phalanx"
)


def create(options: Any, backend_options: object = None) -> ProcessGroup:
    """Create a group; PyTorch calls this for "phalanx" with its `_DistributedBackendOptions`."""
    link = select_link(backend_options, dist.group.WORLD if dist.is_initialized() else None)
    rank, size, name = options.group_rank, options.group_size, options.group_id
    members, store = options.global_ranks_in_group, _attempt_store(options.store)
    flight_recorder.open_for_group(store, rank, size)
    torch_patches.apply(ProcessGroup)
    if os.environ.get("TORCH_DIST_NAN_CHECK") == "1":
        warn_once("nan", "TORCH_DIST_NAN_CHECK has no effect: PyTorch checks its own groups only")
    form = partial(formation.form, name=name, link=link)
    group: ProcessGroup | None = None
    if env.is_newcomer() and not members:
        group = _join_as_newcomer(form, store, rank, size, name, options.timeout, link)
    else:
        formed = (
            formation.unformed(store, size, members)
            if getattr(options, "enable_reconfigure", False)
            else form(
                store, rank, size, options.timeout, members, partial(_describe_missing, members)
            )
        )
        group = ProcessGroup(formed, rank, size, name, options.timeout, members, link, form, store)
    if on_create is not None:
        on_create(group)
    return group


def _join_as_newcomer(
    form: formation.Form,
    store: Store,
    job_rank: int,
    full_size: int,
    name: str,
    timeout: timedelta,
    link: HostLink,
) -> ProcessGroup:
    """Join the default group, in which this process takes the place of a lost rank.

    Blocks until the other ranks call `phalanx.replace`. If they take no more newcomers, the process
    ends with exit code 0.
    """
    while True:
        newcomer = newcomers.announce(store, job_rank, link.transport)
        plan = newcomers.wait_for_plan(store, newcomer, full_size, timeout.total_seconds())
        rank, size = plan.job_ranks.index(job_rank), len(plan.job_ranks)
        check = partial(newcomers.check_plan, store, plan)
        try:
            plan_store = PrefixStore(plan.name, store)
            formed = form(
                plan_store, rank, size, timeout, plan.job_ranks, check=check, reference=plan.root
            )
        except (CollectiveTimeout, newcomers.PlanAbandoned):
            continue
        except PhalanxError as error:
            if job_rank in error.ranks:
                raise
            continue
        group = ProcessGroup(formed, rank, size, name, timeout, (), link, form, store)
        group.full_size = max(size, full_size)
        try:
            # See `rank_changes`: the first collective says that the group is complete.
            values = torch.zeros(2, dtype=torch.int64, device="cpu")
            group.broadcast([values], plan.root).wait()
        except PhalanxError:
            group.shutdown()
            continue
        torch_versions.world().group_count = int(values[1])
        return group


def _describe_missing(members: Sequence[int], rank: int, claimant: str) -> str:
    """Describe a missing rank of a group that is being formed."""
    default_group = dist.group.WORLD if dist.is_initialized() else None
    native = default_group._membership.native if isinstance(default_group, ProcessGroup) else None
    if native is not None and native.closed:
        native = None
    return describe_missing_rank(native, members[rank] if members else rank, claimant)


def _attempt_store(store: Store) -> Store:
    """Return a store in which ranks restarted by torchrun do not find keys of the previous ones."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return store if attempt == "0" else dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]


def _unsupported_method(method: str, advice: str) -> Any:
    """Return a method that raises `NotImplementedError` on every call."""

    def refuse(self: Any, *_arguments: object, **_options: object) -> NoReturn:
        label = self._membership.rank_label
        raise NotImplementedError(f"[{label}] {method} is not supported: {advice}")

    return refuse


@functools.cache
def _device_types() -> tuple[torch.device, ...]:
    # PyTorch asks in each barrier, and with CUDA the question alone takes as long as the barrier.
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return tuple(map(torch.device, kinds))


@delegate_cuda(*EVENT_NAMES.keys() - {"barrier", "monitored_barrier"})  # which have no tensors
class ProcessGroup(dist.ProcessGroup):
    """A group of ranks that exchange tensors in shared memory, and by a transport between hosts.

    Blocking calls run in the caller's thread without the GIL; asynchronous ones run in the group's
    thread, in order. `torch.distributed` creates groups; users do not.

    As in PyTorch's own groups, most collectives take an options object, or their main option (root
    or operator), and a timeout. A tensor may stand for a list of one tensor.
    """

    # PyTorch queries these on a group's backend. This group is its own backend.
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False
    supports_reconfigure = True
    supports_window = False

    def __init__(
        self,
        formed: formation.Formed,
        rank: int,
        size: int,
        name: str,
        timeout: timedelta,
        members: Sequence[int],
        link: HostLink,
        form: formation.Form,
        store: Store,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg] # the stub lacks this constructor
        self._name = name
        self._desc = ""
        self._backend_name = "phalanx"
        self.link, self.transport = link, link.transport
        """The name of the transport between hosts, if there are several."""
        self.form = form
        """Forms a native group for this group."""
        self.base_store = store
        """The store that PyTorch gave the group."""
        self.reconfiguration = Reconfiguration(self)
        self.full_size = size
        """World size of the group at its start."""
        self.accepts_newcomers = False
        """True if processes may wait to join the group."""
        self._enter(formed, rank, size, timeout, members)

    def _enter(
        self,
        formed: formation.Formed,
        rank: int,
        size: int,
        timeout: timedelta,
        members: Sequence[int],
    ) -> None:
        self._store = formed.store
        self._rank = rank
        self._size = size
        self.hosts = formed.hosts
        """The ranks of each host."""
        self.places = formed.places
        """The place of each rank in its machine (`topology.places`)."""
        self.job_ranks = formed.job_ranks
        """The rank in the job, as at its start, by rank in the group."""
        seconds = timeout.total_seconds()
        self._membership = Membership(formed.native, rank, size, self._name, seconds, members)
        self._executor = CollectiveExecutor(self._membership)
        self._messages = Messages(self._membership, size)
        self._nccl = NcclChild(
            formed.store,
            rank,
            f"{self._name} (NCCL)",
            self._membership.members,
            timeout,
            has_gone=self._has_gone,
        )
        self._nccl.required = self.transport == "nccl"

    def _has_gone(self, rank: int) -> bool:
        return bool(self._membership.native.has_gone(rank))

    def change_ranks(self, formed: formation.Formed, rank: int, members: Sequence[int]) -> None:
        """Leave the native group, and continue in another one, with other ranks.

        Args:
            formed: The other native group.
            rank: This rank in it.
            members: Its ranks, as numbers in the default group.
        """
        timeout = timedelta(seconds=self._membership.timeout)
        self.shutdown()
        self._enter(formed, rank, len(members), timeout, members)

    def renumber_members(self, numbers: Mapping[int, int]) -> None:
        """Take over new numbers of the default group's ranks, by the old ones; -1 for lost ones."""
        membership = self._membership
        membership.members = tuple(numbers.get(each, -1) for each in membership.members)

    # Properties of the group.

    def rank(self) -> int:
        """Return this rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return the world size of the group."""
        return self._size

    # Called by PyTorch's C++.
    getRank = rank  # noqa: N815
    getSize = size  # noqa: N815

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        # Only PyTorch's C++ calls this. Given the name "gloo", it would use the Gloo backend.
        return "phalanx"

    def name(self) -> str:
        """Return the backend's name: "phalanx", or that of the backend that the group replaces."""
        return self._backend_name

    def set_backend_name(self, name: str) -> None:
        """Set the name of the backend that this group replaces (see `replace`)."""
        self._backend_name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    def get_group_store(self) -> Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return list(_device_types())

    def _get_backend(self, device: torch.device) -> Any:  # noqa: ARG002 - PyTorch's signature
        return self

    get_backend = _get_backend  # called by `dist.get_backend_impl`

    def _has_hooks(self) -> bool:
        return False

    def _get_sequence_number_for_group(self) -> int:
        return self._membership.native.sequence  # type: ignore[no-any-return]

    def _set_sequence_number_for_group(self) -> None:
        pass  # the core counts from the beginning

    # Methods of PyTorch 2.14 that Phalanx does not support.

    new_window = _unsupported_method("new_window", _NO_WINDOW)
    register_abort_hook = _unsupported_method("register_abort_hook", _NO_HOOKS)
    register_pre_hook = _unsupported_method("register_pre_hook", _NO_HOOKS)
    register_post_hook = _unsupported_method("register_post_hook", _NO_HOOKS)

    # Other ranks, by the methods of PyTorch 2.14.

    def get_reconfigure_handle(self) -> str:
        """Return the text by which this process is named in `reconfigure`."""
        return self.reconfiguration.handle

    def reconfigure(self, opts: Any) -> dist.Work:
        """Continue with the ranks of `opts.handles`; blocks until all of them have called it.

        See `reconfiguration.Reconfiguration.run`.
        """
        self.reconfiguration.run(opts)
        return DONE

    def get_error(self) -> Any:
        """Return the kind of failure that broke the group, as PyTorch's `ErrorType`."""
        native = self._membership.native
        status = None if native.closed else native.failure()
        if status is None:
            return ErrorType.SUCCESS
        return ErrorType.TIMEOUT if status.code == "timeout" else ErrorType.COMM_ERROR

    # Timeouts, and leaving the group.

    def _wait_for_pending_works(self) -> None:
        self._membership.collective_thread.drain()

    @property
    def timeout(self) -> timedelta:
        """The time that an operation may wait for its peers."""
        return timedelta(seconds=self._membership.timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time that an operation may wait for its peers, from the next operation on."""
        self._membership.timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Complete the operations under way, leave the group and notify its peers.

        Blocks until asynchronous collectives, sends, and receives whose message comes have ended,
        for at most the timeout of the group after the end of each (see `leaving`).
        `destroy_process_group` then raises the error of one that failed, unless the program has got
        an error of an operation, or has an exception in hand.
        """
        membership = self._membership
        if membership.native.closed:
            return
        if self.accepts_newcomers and membership.native.failure() is None:
            newcomers.close(self.base_store)
        try:
            leaving.complete(membership)
        except KeyboardInterrupt:
            known_failures.mark_known()
            raise
        finally:
            membership.stop_threads()
            self._nccl.shutdown()
            membership.leave()
            self._messages.abandon()

    def abort(self, reason: str = "") -> None:
        """Make every waiting rank of the group raise `Aborted`, and leave the group."""
        if not isinstance(reason, str):
            raise UsageError(f"abort: reason is {reason!r}, expected a str that states the reason")
        if not self._membership.native.closed:
            known_failures.mark_known()
            self._membership.native.abort(encodable(reason))
            self._nccl.abort()
            self.shutdown()

    def fail(self, error: BaseException) -> None:
        """Leave the group because of `error`, so that its peers raise `PeerLost`.

        The peers in all other groups of this process do so too; those groups become unusable.
        """
        if not self._membership.native.closed:
            known_failures.seen(error)
            fail_all_groups(error)
            self._nccl.abort()
            self.shutdown()

    # Losses and newcomers.

    def find_loss(self, error: BaseException) -> PhalanxError | None:
        """Return the loss of a rank that an exception reports; None if it reports something else.

        PyTorch's C++ code, such as DistributedDataParallel's, makes a RuntimeError of the error.
        """
        return find_loss(error, self._membership.native.failure(), self._name)

    def accept_newcomers(self) -> None:
        """Declare that the ranks of this group, the default one, call `replace` after each loss.

        Processes that wait to join then end when the ranks leave the group.
        """
        if not self.accepts_newcomers:
            self.accepts_newcomers = True
            with contextlib.suppress(StoreLost):  # then none can come
                query_store(lambda: newcomers.register_rank(self.base_store, self.transport))

    def has_newcomers(self) -> bool:
        """Return whether processes wait to join this group, the default one, which lacks ranks."""
        if self._size >= self.full_size:
            return False
        with newcomers.Newcomers(self.base_store) as waiting:
            return bool(waiting.find(self.job_ranks))

    # Messages.

    def send(self, tensors: Tensors, dst: int, tag: int) -> dist.Work:
        """Send a tensor to a rank of the group; complete when the tensor is in shared memory."""
        blocking = is_blocking()
        operator = self, "send", tensors, dst, tag
        if active_mode_count() or is_profiling():
            run = partial(self._messages.send, operator, dst, tag, blocking)
            return self._messages.run_observed("send", operator, run)
        return self._messages.send(operator, dst, tag, blocking)

    def recv(self, tensors: Tensors, src: int, tag: int) -> dist.Work:
        """Receive a tensor of exactly this dtype and element count from a rank of the group."""
        check_peer(src, self._size, "recv")
        blocking = is_blocking()
        operator = self, "recv", tensors, src, tag
        if active_mode_count() or is_profiling():
            run = partial(self._messages.recv, operator, src, tag, blocking)
            return self._messages.run_observed("recv", operator, run)
        return self._messages.recv(operator, src, tag, blocking)

    def recv_anysource(self, tensors: Tensors, tag: int) -> dist.Work:
        """Receive from any rank; `Work._source_rank()` returns the rank of the sender."""
        blocking = is_blocking()
        operator = self, "recv_anysource", tensors, tag
        run = partial(self._messages.recv, operator, ANY_SOURCE, tag, blocking)
        if active_mode_count() or is_profiling():
            return self._messages.run_observed("recvAnySource", operator, run)
        return run()

    # Collectives, in the order of PyTorch's documentation.

    def broadcast(
        self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Overwrite the tensor of every rank with the root's."""
        opts = _broadcast(opts, timeout)
        tensor = single_tensor(tensors, "broadcast")
        root = check_root(opts.rootRank, self._size, "broadcast")
        code = dtype_code(tensor.dtype, "broadcast")
        flat = (prepare_input if root == self._rank else prepare_output)(tensor, "broadcast")
        native = self._membership.native
        call = partial(native.broadcast, flat.data_ptr(), flat.numel(), code, root)
        outputs = [] if root == self._rank else [(tensor, flat)]
        operator = self, "broadcast", [tensor], opts
        return self._executor.run("broadcast", call, tensor, opts, outputs, operator, 0, root, flat)

    def allreduce(
        self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Combine the tensors of all ranks; every rank gets the result, in place."""
        opts = _allreduce(opts, timeout)
        tensor = single_tensor(tensors, "all_reduce")
        native, op = self._membership.native, opts.reduceOp
        operator = self, "allreduce", [tensor], opts
        if tensor.is_sparse:
            call: NativeCall = sum_sparse(native, tensor, op, self._size)
            return self._executor.run("all_reduce", call, tensor, opts, [], operator)
        reduction = find_reduction(op, tensor, "all_reduce")
        flat = prepare_output(tensor, "all_reduce")
        if reduction.premultiplies:
            flat = premultiply(flat, op)
        self._keep_residual(flat)
        call = partial(
            native.all_reduce, flat.data_ptr(), flat.numel(), reduction.dtype, reduction.op
        )
        if reduction.divides:
            call = divide_after(call, flat, self._size)
        return self._executor.run(
            "all_reduce", call, tensor, opts, [(tensor, flat)], operator, reduction.op
        )

    def reduce(
        self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Combine the tensors of all ranks; the root gets the result, in place."""
        opts = _reduce(opts, timeout)
        tensor = single_tensor(tensors, "reduce")
        root = check_root(opts.rootRank, self._size, "reduce")
        is_root, op = root == self._rank, opts.reduceOp
        reduction = find_reduction(op, tensor, "reduce")
        flat = (prepare_output if is_root else prepare_input)(tensor, "reduce")
        if reduction.premultiplies:
            flat = premultiply(flat, op)
        operands = flat.data_ptr(), flat.numel(), reduction.dtype, reduction.op
        call: NativeCall = partial(self._membership.native.reduce, *operands, root)
        if reduction.divides and is_root:
            call = divide_after(call, flat, self._size)
        outputs = [(tensor, flat)] if is_root else []
        operator = self, "reduce", [tensor], opts
        return self._executor.run(
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
        opts, name = _allgather(opts, timeout), "all_gather"
        tensor = single_tensor(input_tensors, name)
        outputs = tensors_per_rank(output_tensors, self._size, name, "outputs")
        check_same_kind(outputs, tensor, name, sized_indices=(self._rank,))
        flat = prepare_input(tensor, name)
        pairs = [(output, prepare_output(output, name)) for output in outputs]
        flats = [output for _, output in pairs]
        code = dtype_code(tensor.dtype, name)
        check_disjoint(outputs, flats, name)
        native = self._membership.native
        addresses = [output.data_ptr() for output in flats]
        counts = [output.numel() for output in flats]
        if counts == [flat.numel()] * self._size:
            if is_misplaced(flat.data_ptr(), addresses, flat.numel(), code, self._rank):
                flat = flat.clone()
            call: NativeCall = partial(
                native.all_gather, flat.data_ptr(), addresses, flat.numel(), code
            )
        else:
            if overlaps_any(flat, [flats[self._rank]], code):
                flat = flat.clone()
            copy_back(flats[self._rank].view(-1), flat.view(-1))
            call = run_sequentially(
                partial(native.broadcast, addresses[root], counts[root], code, root)
                for root in range(self._size)
            )
        operator = self, "allgather", [outputs], [tensor], opts
        return self._executor.run(name, call, tensor, opts, pairs, operator, 0, -1, flat)

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
        root = check_root(opts.rootRank, self._size, "gather")
        outputs: Tensors = []
        if root == self._rank:
            outputs = tensors_per_rank(output_tensors, self._size, "gather", "outputs")
            check_same_kind(outputs, tensor, "gather")
        flat = prepare_input(tensor, "gather")
        pairs = [(output, prepare_output(output, "gather")) for output in outputs]
        addresses = [output.data_ptr() for _, output in pairs]
        code = dtype_code(tensor.dtype, "gather")
        check_disjoint(outputs, [output for _, output in pairs], "gather")
        if outputs and is_misplaced(flat.data_ptr(), addresses, flat.numel(), code, root):
            flat = flat.clone()
        native = self._membership.native
        call = partial(native.gather, flat.data_ptr(), addresses, flat.numel(), code, root)
        operator = self, "gather", [outputs] if outputs else [], [tensor], opts
        return self._executor.run("gather", call, tensor, opts, pairs, operator, 0, root, flat)

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
        root = check_root(opts.rootRank, self._size, "scatter")
        inputs: Tensors = []
        if root == self._rank:
            inputs = tensors_per_rank(input_tensors, self._size, "scatter", "inputs")
            check_same_kind(inputs, tensor, "scatter")
        flat = prepare_output(tensor, "scatter")
        sources = [prepare_input(item, "scatter") for item in inputs]
        addresses = [source.data_ptr() for source in sources]
        code = dtype_code(tensor.dtype, "scatter")
        if inputs and is_misplaced(flat.data_ptr(), addresses, flat.numel(), code, root):
            flat = torch.empty_like(flat)
        native = self._membership.native
        call = partial(native.scatter, addresses, flat.data_ptr(), flat.numel(), code, root)
        operator = self, "scatter", [tensor], [inputs] if inputs else [], opts
        return self._executor.run(
            "scatter", call, tensor, opts, [(tensor, flat)], operator, 0, root, sources, inputs
        )

    def reduce_scatter(
        self,
        output_tensors: Tensors,
        input_tensors: list[Tensors],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Combine the lists of all ranks; every rank gets the entry at its rank."""
        opts, name = _reduce_scatter(opts, timeout), "reduce_scatter"
        tensor = single_tensor(output_tensors, name)
        inputs = tensors_per_rank(input_tensors, self._size, name, "inputs")
        check_same_kind(inputs, tensor, name, sized_indices=(self._rank,))
        flat = prepare_output(tensor, name)
        reduction = find_reduction(opts.reduceOp, tensor, name)
        sources = [prepare_input(item, name) for item in inputs]
        if reduction.premultiplies:
            sources = [premultiply(source, opts.reduceOp) for source in sources]
        for source in sources:
            self._keep_residual(source)
        native, code, op = self._membership.native, reduction.dtype, reduction.op
        count = flat.numel()
        if [source.numel() for source in sources] == [count] * self._size:
            addresses = [source.data_ptr() for source in sources]
            if is_misplaced(flat.data_ptr(), addresses, count, code, self._rank):
                flat = torch.empty_like(flat)
            call: NativeCall = partial(
                native.reduce_scatter, addresses, flat.data_ptr(), count, code, op
            )
        else:
            if overlaps_any(flat, sources, code):
                flat = torch.empty_like(flat)
            copy_back(flat.view(-1), sources[self._rank].view(-1))
            sources[self._rank] = flat
            call = run_sequentially(
                partial(native.reduce, source.data_ptr(), source.numel(), code, op, root)
                for root, source in enumerate(sources)
            )
        if reduction.divides:
            call = divide_after(call, flat, self._size)
        operator = self, "reduce_scatter", [tensor], [inputs], opts
        return self._executor.run(
            name, call, tensor, opts, [(tensor, flat)], operator, op, -1, sources
        )

    def alltoall(
        self,
        output_tensors: Tensors,
        input_tensors: Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Send each rank its tensor from the list; sizes may differ between pairs of ranks."""
        opts, name = _alltoall(opts, timeout), "all_to_all"
        outputs = tensors_per_rank(output_tensors, self._size, name, "outputs")
        inputs = tensors_per_rank(input_tensors, self._size, name, "inputs")
        check_same_kind(inputs, inputs[0], name, sized_indices=())
        check_same_kind(outputs, inputs[self._rank], name, sized_indices=(self._rank,))
        sources = [prepare_input(item, name) for item in inputs]
        flats = [prepare_output(output, name) for output in outputs]
        code = dtype_code(inputs[0].dtype, name)
        check_disjoint(outputs, flats, name)
        input_counts, output_counts = counts_of(sources), counts_of(flats)
        starts, targets = addresses_of(sources), addresses_of(flats)
        if overlap(starts, input_counts, targets, output_counts, code):
            # Incoming data would overwrite parts that other ranks have not read yet.
            sources = [source.clone() for source in sources]
            starts = addresses_of(sources)
        operands = starts, input_counts, targets, output_counts, code
        call = partial(self._membership.native.all_to_all, *operands)
        pairs = list(zip(outputs, flats, strict=True))
        operator = self, "alltoall", outputs, inputs, opts
        return self._executor.run(name, call, inputs[0], opts, pairs, operator, 0, -1, sources)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Block until all ranks have entered the barrier."""
        opts = _barrier(opts, timeout)
        call, operator = self._membership.native.barrier, (self, "barrier", opts)
        return self._executor.run("barrier", call, None, opts, [], operator)

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
                    f"[{self._membership.rank_label} on {socket.gethostname()}] monitored_barrier "
                    f"at {call_site()}: Rank {self._rank} timed out in monitoredBarrier, with a "
                    f"timeout of {timeout}",
                    ranks=self._membership.members[:1] if self._rank else (),
                    operation="monitored_barrier",
                    group=self._name,
                    seconds=timeout.total_seconds(),
                    job=flight_recorder.get_job_name(),
                )
        native = self._membership.native
        try:
            operator = self, "monitored_barrier", opts.timeout, wait_all_ranks
            self._executor.run("monitored_barrier", native.barrier, None, opts, [], operator)
        except CollectiveTimeout as error:
            missing = [] if native.closed else native.ranks_behind(0)
            gloo_message = _gloo_message(self._rank, missing if wait_all_ranks else missing[:1])
            raise error.replace(f"{error}. {gloo_message}") from None

    # Collectives on single tensors, which hold one part per rank.

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Collect the tensors of all ranks, one after another in rank order, in one tensor."""
        opts, name = opts or AllgatherOptions(), "all_gather_single"
        call, pairs, op, keep_alive = self._prepare_gather(output, input, name)
        operator = self, name, output, input, opts
        return self._executor.run(name, call, input, opts, pairs, operator, op, -1, keep_alive)

    def gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Collect the tensors of all ranks, one after another in rank order, on the root."""
        opts = opts or dist.GatherOptions()
        outputs = []
        if opts.rootRank == self._rank:
            if output.numel() != self._size * input.numel():
                raise size_error(output, input, self._size, "gather_single", ("output", "input"))
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
        opts, name = opts or dist.ReduceScatterOptions(), "reduce_scatter_single"
        call, pairs, op, keep_alive = self._prepare_reduce_scatter(
            output, input, opts.reduceOp, name
        )
        operator = self, name, output, input, opts
        return self._executor.run(name, call, input, opts, pairs, operator, op, -1, keep_alive)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """Send each rank its rows of a tensor, by the split sizes or, if empty, equally many."""
        opts, name = opts or dist.AllToAllOptions(), "all_to_all_single"
        check_pair(output, input, name)
        flat_in = prepare_input(input, name)
        flat_out = prepare_output(output, name)
        offset = flat_out.data_ptr() - flat_in.data_ptr()
        if -flat_out.nbytes < offset < flat_in.nbytes:
            # Incoming data would overwrite parts that other ranks have not read yet.
            flat_in = flat_in.clone()
        code, native = dtype_code(input.dtype, name), self._membership.native
        count, remainder = divmod(flat_in.numel(), self._size)
        is_even = not (remainder or input_split_sizes or output_split_sizes)
        if (
            is_even
            and input.dim()
            and input.shape == output.shape
            and input.size(0) % self._size == 0
        ):
            addresses = flat_in.data_ptr(), flat_out.data_ptr()
            call: NativeCall = partial(native.all_to_all_single, *addresses, count, code)
        else:
            starts, counts = split_rows(flat_in, input_split_sizes, self._size, name, "input")
            outputs = split_rows(flat_out, output_split_sizes, self._size, name, "output")
            sent, received = counts[self._rank], outputs[1][self._rank]
            if sent != received:
                raise UsageError(
                    f"{name}: rank {self._rank} sends itself {sent} elements and receives "
                    f"{received}: the split sizes of input and output must agree"
                )
            call = partial(native.all_to_all, starts, counts, *outputs, code)
        pairs = [(output, flat_out)]
        operator = self, name, output, input, output_split_sizes, input_split_sizes, opts
        return self._executor.run(name, call, input, opts, pairs, operator, 0, -1, flat_in)

    # Coalesced collectives: several operations with one work.

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Combine each tensor of the list with those of all ranks, in place."""
        opts, name = opts or dist.AllreduceCoalescedOptions(), "all_reduce_coalesced"
        prepared = [self._prepare_all_reduce(tensor, opts.reduceOp, name) for tensor in tensors]
        check_disjoint(tensors, [flat for _, [(_, flat)], _, _ in prepared], name)
        operator = self, "allreduce_coalesced", tensors, opts
        return self._run_coalesced(name, prepared, tensors, opts, operator)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Do `all_gather_single` for each pair of an output and an input."""
        opts, name = opts or AllgatherOptions(), "all_gather_single_coalesced"
        check_same_length(outputs, inputs, name)
        prepared = [self._prepare_gather(*pair, name) for pair in zip(outputs, inputs, strict=True)]
        operator = self, name, outputs, inputs, opts
        return self._run_coalesced(name, prepared, inputs, opts, operator)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Do `reduce_scatter_single` for each pair of an output and an input."""
        opts, name = opts or dist.ReduceScatterOptions(), "reduce_scatter_single_coalesced"
        check_same_length(outputs, inputs, name)
        prepared = [
            self._prepare_reduce_scatter(*pair, opts.reduceOp, name)
            for pair in zip(outputs, inputs, strict=True)
        ]
        operator = self, name, outputs, inputs, opts
        return self._run_coalesced(name, prepared, inputs, opts, operator)

    def allgather_coalesced(
        self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Collect each tensor of the list from all ranks; `output_lists` has one list per rank."""
        opts, name = opts or AllgatherOptions(), "all_gather_coalesced"
        if len(output_lists) != self._size:
            raise UsageError(
                f"{name}: got {len(output_lists)} lists of outputs, expected one per rank, "
                f"{self._size}"
            )
        flats = [prepare_input(source, name) for source in inputs]
        for outputs in output_lists:
            check_same_length(outputs, inputs, name)
        prepared: list[_PreparedCall] = []
        for source, prepared_input, *outputs in zip(inputs, flats, *output_lists, strict=True):
            check_same_kind(outputs, source, name)
            flat, targets = prepared_input, [prepare_output(output, name) for output in outputs]
            code, addresses = dtype_code(source.dtype, name), addresses_of(targets)
            check_disjoint(outputs, targets, name)
            if is_misplaced(flat.data_ptr(), addresses, flat.numel(), code, self._rank):
                flat = flat.clone()
            operands = flat.data_ptr(), addresses, flat.numel(), code
            call = partial(self._membership.native.all_gather, *operands)
            prepared.append((call, list(zip(outputs, targets, strict=True)), 0, flat))
        operator = self, "allgather_coalesced", output_lists, inputs, opts
        return self._run_coalesced(name, prepared, inputs, opts, operator)

    # Former names in PyTorch, which libraries may still call.

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    gather_into_tensor = gather_single
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    # Coalescing of any operations by PyTorch.

    def _start_coalescing(self, device: torch.device) -> None:  # noqa: ARG002 - PyTorch's signature
        self._membership.coalesced_works = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:  # noqa: ARG002
        works, self._membership.coalesced_works = self._membership.coalesced_works, None
        return CompositeWork(works or [])

    # The names that PyTorch's C++ calls from 2.14 on.
    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing

    # Helpers.

    def _run_coalesced(
        self,
        name: str,
        prepared: list[_PreparedCall],
        inputs: Tensors,
        opts: Any,
        operator: OperatorCall,
    ) -> dist.Work:
        call = run_sequentially(call for call, _, _, _ in prepared)
        pairs = [pair for _, pairs, _, _ in prepared for pair in pairs]
        subject, op = (inputs[0], prepared[0][2]) if inputs else (None, 0)
        return self._executor.run(
            name, call, subject, opts, pairs, operator, op, -1, prepared, inputs
        )

    def _prepare_all_reduce(self, tensor: torch.Tensor, op: Any, name: str) -> _PreparedCall:
        reduction = find_reduction(op, tensor, name)
        flat = prepare_output(tensor, name)
        if reduction.premultiplies:
            flat = premultiply(flat, op)
        self._keep_residual(flat)
        operands = flat.data_ptr(), flat.numel(), reduction.dtype, reduction.op
        call: NativeCall = partial(self._membership.native.all_reduce, *operands)
        if reduction.divides:
            call = divide_after(call, flat, self._size)
        return call, [(tensor, flat)], reduction.op, None

    def _prepare_gather(
        self, output: torch.Tensor, source: torch.Tensor, name: str
    ) -> _PreparedCall:
        check_pair(output, source, name)
        count = source.numel()
        if output.numel() != self._size * count:
            raise size_error(output, source, self._size, name, ("output", "input"))
        flat = prepare_input(source, name)
        target = prepare_output(output, name)
        address = target.data_ptr()
        if self._is_misplaced(flat.data_ptr(), address, flat.nbytes):
            flat = flat.clone()
        code, native = dtype_code(source.dtype, name), self._membership.native
        call = partial(native.all_gather_single, flat.data_ptr(), address, count, code)
        return call, [(output, target)], 0, flat

    def _prepare_reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, op: Any, name: str
    ) -> _PreparedCall:
        check_pair(output, source, name)
        count = output.numel()
        if source.numel() != self._size * count:
            raise size_error(source, output, self._size, name, ("input", "output"))
        reduction = find_reduction(op, output, name)
        flat = prepare_input(source, name)
        if reduction.premultiplies:
            flat = premultiply(flat, op)
        target = prepare_output(output, name)
        if self._is_misplaced(target.data_ptr(), flat.data_ptr(), target.nbytes):
            target = torch.empty_like(target)
        self._keep_residual(flat)
        operands = flat.data_ptr(), target.data_ptr(), count, reduction.dtype, reduction.op
        call: NativeCall = partial(self._membership.native.reduce_scatter_single, *operands)
        if reduction.divides:
            call = divide_after(call, target, self._size)
        return call, [(output, target)], reduction.op, flat

    def _keep_residual(self, flat: torch.Tensor) -> None:
        """Feed back what the compression between hosts, if there is one, loses of a tensor."""
        compression = getattr(self._membership.native, "compression", None)
        if compression is not None:
            compression.keep_residual(flat)

    def _is_misplaced(self, part: int, whole: int, size: int) -> bool:
        """Return whether a part overlaps the whole without being exactly this rank's part of it.

        Args:
            part: The address of the part.
            whole: The address of the tensor with the parts of all ranks.
            size: The size of a part in bytes.
        """
        offset = part - whole
        return -size < offset < self._size * size and offset != self._rank * size


direct_calls.install(ProcessGroup)


def _gloo_message(rank: int, missing: Sequence[int]) -> str:
    """Return the message of Gloo's monitored_barrier, for programs that search for it."""
    if rank != 0:
        return (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting "
            "for send/recv from rank 0"
        )
    ranks = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    return f"{ranks} failed to pass monitoredBarrier"


def abort(group: dist.ProcessGroup | None = None, reason: str = "") -> None:
    """Break a group: every rank that waits in it, or enters an operation, raises `Aborted` at once.

    This rank leaves the group; the others should too (`destroy_process_group`). The same processes,
    or the remaining ones, can then form another group. Blocks for at most the two seconds that this
    rank's own pending operations have to end.

    Args:
        group: The group; None for the default group.
        reason: The reason, in one line, for the exceptions of the other ranks and
            `phalanx explain`. Text beyond 639 bytes of UTF-8 is cut.

    Raises:
        UsageError: There is no such group, it is not a group of Phalanx, or `reason` is not a str.

    Example:
        >>> group = dist.new_group(backend="phalanx")
        >>> if torch.isnan(loss):
        ...     phalanx.abort(group, reason=f"the loss of rank {dist.get_rank()} is NaN")
    """
    if group is None:
        group = dist.group.WORLD if dist.is_initialized() else None
        if group is None:
            raise UsageError("abort: there is no default group; give one, or form it first")
    if not isinstance(group, ProcessGroup):
        raise UsageError(
            f"abort: group is {group!r}, expected a group of the backend 'phalanx'; for others "
            "see torch.distributed.ProcessGroup.abort"
        )
    group.abort(reason)


def host_ranks(group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Return the ranks of a group by host; the ranks in one list share memory. Never blocks.

    On the backend "phalanx", the ranks proved this to each other when the group was formed. On
    other backends it is unknown, and each rank counts as a host of its own.

    Args:
        group: The group; None for the default group.

    Returns:
        A list of ranks in ascending order for each host, numbered as in the default group. Hosts
        are in order of their lowest rank.

    Raises:
        UsageError: There is no process group, or this rank is not in `group`.

    Example:
        >>> local_ranks = next(ranks for ranks in phalanx.host_ranks() if dist.get_rank() in ranks)
        >>> print(f"{len(local_ranks)} of {dist.get_world_size()} ranks share my memory")
        1 of 1 ranks share my memory
    """
    if not dist.is_initialized():
        raise UsageError("host_ranks: no process group, expected one: call phalanx.init() first")
    if dist.get_rank(group) < 0:
        raise UsageError("host_ranks: this rank is not a member of the group given")
    ranks = dist.get_process_group_ranks(group)
    actual = group or dist.group.WORLD
    if not isinstance(actual, ProcessGroup):
        return [[rank] for rank in ranks]
    return [[ranks[member] for member in host] for host in actual.hosts]
