"""Differences between the supported versions of PyTorch.

No other module compares versions, checks if PyTorch has a name, or uses a private name of
PyTorch. The methods that PyTorch calls on a group are exempt: a group implements the names of all
versions at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch._C import _autograd, _distributed_c10d
from torch.distributed import distributed_c10d as c10d
from torch.utils import _python_dispatch, _pytree

from phalanx import torch_layouts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

SUPPORTED = (2, 11), (2, 14)
"""The oldest and the newest release that Phalanx is tested with."""

# Renamed in 2.13, which warns on every call of the old names.
all_gather_single: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)

tensor_use_count: Callable[[torch.Tensor], int] | None = getattr(torch.Tensor, "_use_count", None)
"""Return the number of C++ references to a tensor, including its Python object's.

None if PyTorch has no such method.
"""

TENSOR_TABLE: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
"""PyTorch's table of C functions for its tensors, a capsule; None if it has none."""

_major, _minor = torch.__version__.split(".")[:2]
TENSOR_LAYOUT = torch_layouts.TENSORS.get((int(_major), int(_minor)))
"""The layout of tensors in memory; None if it is unknown for this version."""

OBSERVER_FLAGS: list[tuple[Any, str]] = [
    (module, name)
    for module, name in (
        (torch.autograd.profiler, "_is_profiler_enabled"),
        (_python_dispatch, "_is_in_torch_dispatch_mode"),
    )
    if hasattr(module, name)
]
"""Names in modules that are False while no profiler and no dispatch mode is active in the process.

PyTorch has them for quick checks. Empty unless it has both.
"""
if len(OBSERVER_FLAGS) < 2:
    OBSERVER_FLAGS = []

GROUPS_SET_TIMEOUT = hasattr(dist, "set_timeout")
"""True if PyTorch sets the timeout of any group through the group's method, as from 2.14 on."""

FACTORY = "_new_process_group_helper"
"""The private function of PyTorch that forms every group."""

# Larger than the numbers in the names of other groups.
_LOCAL_GROUPS = 1 << 32

_FACTORY_PARAMETERS = frozenset(
    "group_size group_rank global_ranks_in_group backend store group_name timeout".split()
)


def is_tested(version: str) -> bool:
    """Return whether a PyTorch version, such as "2.13.0+cpu", is in the tested range."""
    oldest, newest = SUPPORTED
    return oldest <= _release(version) <= newest


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def group_factory() -> Callable[..., Any]:
    """Return the private function of PyTorch that forms every group.

    Raises:
        ValueError: PyTorch has no such function, or has changed its parameters.
    """
    factory: Callable[..., Any] | None = getattr(c10d, FACTORY, None)
    if factory is None or not _FACTORY_PARAMETERS.issubset(inspect.signature(factory).parameters):
        raise ValueError(
            f"PHALANX_REPLACE: torch {torch.__version__} forms groups in a way that this version "
            "of Phalanx does not know, so it cannot replace another backend: unset the "
            'variable (or omit --replace) and name the backend "phalanx" in the script'
        )
    return factory


def form_local_group(ranks: list[int], **options: Any) -> dist.ProcessGroup:
    """Form a group with only its members, as `new_group(use_local_synchronization=True)` does.

    The members must agree on the number of groups that each is in, since PyTorch puts that number
    in the name of the group. From 2.14 on, PyTorch instead counts the groups that a rank has
    formed, and names all later groups by that count. After a local group, its members could then
    form no group with ranks outside it. This function therefore restores the count.
    """
    world: Any = c10d._world
    formed = world.group_count
    if _release(torch.__version__) >= (2, 14):
        world.group_count = _LOCAL_GROUPS + len(world.pg_names)
    try:
        group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True, **options)
    finally:
        world.group_count = formed
    return group


def has_functional_op(name: str) -> bool:
    """Return whether PyTorch has a functional collective of this name."""
    return hasattr(torch.ops._c10d_functional, name)


@contextlib.contextmanager
def start_processes_by(start: Callable[..., Any] | None) -> Iterator[None]:
    """Have PyTorch's agent start processes by another function.

    Args:
        start: A function with the keyword arguments of `get_subprocess_handler`; None for that.
    """
    from torch.distributed.elastic.multiprocessing import api  # for launchers only

    names = cast("Any", api)
    former = names.get_subprocess_handler
    names.get_subprocess_handler = start or former
    try:
        yield
    finally:
        names.get_subprocess_handler = former


# ---- private names: groups ----

ErrorType = _distributed_c10d.ErrorType
"""The kinds of failures that a group reports."""

resolve_group: Any = _distributed_c10d._resolve_process_group
"""Return the group of a name."""

register_work: Any = _distributed_c10d._register_work
"""Let `wait_tensor` of a tensor wait for a work."""


def world() -> Any:
    """Return PyTorch's tables of the groups of this process."""
    return c10d._world


def default_store() -> Any:
    """Return the store of the default group."""
    return c10d._get_default_store()


def foreign_groups() -> dict[str, list[int]]:
    """Return the ranks of each group that is not of Phalanx, in their order, by its name."""
    known: Any = c10d._world
    found = {}
    for group, (backend, _) in list(known.pg_map.items()):
        # Another thread may destroy the group meanwhile.
        name, ranks = known.pg_names.get(group), known.pg_group_ranks.get(group)
        if name is not None and ranks and "phalanx" not in backend:
            found[str(name)] = sorted(ranks, key=ranks.__getitem__)
    return found


def is_foreign(group: Any) -> bool:
    """Return whether a group is not of Phalanx; anything but a group stands for the default one."""
    known: Any = c10d._world
    found = group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
    backend, _ = known.pg_map.get(found, ("", None))
    return "phalanx" not in backend


def collective_count(group: Any) -> int:
    """Return how many collectives a group has begun; 0 if its backend does not count them.

    Args:
        group: The group; anything else stands for the default one, which need not be there yet.
    """
    found = group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
    try:
        return 0 if found is None else int(cast("Any", found)._get_sequence_number_for_group())
    except RuntimeError:  # MPI
        return 0


def group_name(group: Any) -> str:
    """Return PyTorch's name of a group, of the default one for None."""
    return str(c10d._world.pg_names.get(group or c10d._get_default_group(), ""))


def describe_new_group(arguments: Mapping[str, Any]) -> tuple[str, list[int]]:
    """Return the name of a group that is being formed, and the ranks that must come.

    For most groups, these are all ranks of the job. A group of Phalanx has none: it is recorded
    elsewhere.

    Args:
        arguments: Those of `init_process_group` or `new_group`.
    """
    is_first = not dist.is_initialized()
    backend = arguments.get("backend") or ("" if is_first else dist.get_backend())
    name = str(max(0, c10d._world.group_count - 1))
    if "phalanx" in str(backend):
        return name, []
    if arguments.get("use_local_synchronization"):
        return name, sorted(arguments.get("ranks") or ())
    size = arguments.get("world_size") if is_first else dist.get_world_size()
    if not isinstance(size, int) or size < 1:
        size = int(os.environ.get("WORLD_SIZE") or 0)
    return name, list(range(size))


def global_rank(group: Any, rank: int) -> int:
    """Return the rank in the job of a rank of a group, of the default one for None."""
    return int(dist.get_global_rank(group or c10d._get_default_group(), rank))


def dump_flight_recorders() -> list[bytes]:
    """Return PyTorch's records of the last collectives, each as a pickle without their stacks.

    NCCL has a record of its own, which asks CUDA what has completed.
    """
    dump: Any = getattr(_distributed_c10d, "_dump_fr_trace", None)
    found = [] if dump is None else [bytes(dump(True, False, False))]
    dump = getattr(_distributed_c10d, "_dump_nccl_trace", None)
    cuda: Any = torch.cuda
    if dump is not None and torch.version.cuda is not None and cuda.is_initialized():
        with _relax_stream_capture():
            found.append(bytes(dump(True, False, False)))
    return found


@contextlib.contextmanager
def _relax_stream_capture() -> Iterator[None]:
    """Let this thread ask CUDA while another one captures a graph, which would break the graph.

    This is `CUDAStreamCaptureModeGuard` of PyTorch's C++.
    """
    exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def debug_server_frontend() -> Any:
    """Return the module of PyTorch's debug server that has its pages.

    Raises:
        ImportError: This version of PyTorch has none, or a package that it needs is missing.
    """
    from torch.distributed.debug import _frontend  # since 2.10

    return _frontend


def start_debug_server(page: Any, options: Mapping[str, Any]) -> None:
    """Start PyTorch's debug server on this rank with one more page.

    Raises:
        ImportError: A package that it needs is missing.
        NotImplementedError: This version of PyTorch has none to which a page can be added.
    """
    from torch.distributed import debug

    if "handlers" not in inspect.signature(debug.start_debug_server).parameters:
        raise NotImplementedError(f"no page can be added to that of PyTorch {torch.__version__}")
    from torch.distributed.debug._debug_handlers import default_handlers

    given = options.get("handlers")
    handlers = [*(default_handlers() if given is None else given), page]
    debug.start_debug_server(**{**options, "handlers": handlers})


def pretend_mpi() -> None:
    """Have PyTorch accept the backend "mpi", with which it was not built."""
    c10d._MPI_AVAILABLE = True


def imported_rpc() -> Any:
    """Return the C++ part of PyTorch's RPC if it has been imported, else None."""
    return vars(torch._C).get("_distributed_rpc")


def is_own_hostname(host: str) -> bool:
    """Return whether a name or address belongs to this machine, as PyTorch's rendezvous decides."""
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

    return _matches_machine_hostname(host)


# ---- private names: observers ----

TorchDispatchMode = _python_dispatch.TorchDispatchMode
active_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return the number of dispatch modes that are active in the calling thread."""

push_mode: Callable[[Any], None] = torch._C._push_on_torch_dispatch_stack
"""Activate a dispatch mode."""

is_profiling: Callable[[], bool] = _autograd._profiler_enabled
"""Return whether a profiler records in the calling thread."""

enter_event: Callable[..., Any] = _autograd._record_function_with_args_enter
"""Begin an event of the profiler with a name and tensors; return its handle."""

exit_event: Callable[[Any], None] = _autograd._record_function_with_args_exit
"""End an event."""


def pop_mode() -> Any:
    """Deactivate the dispatch mode that was activated last, and return it."""
    return torch._C._pop_torch_dispatch_stack(None)


def top_mode() -> Any:
    """Return the dispatch mode that was activated last."""
    return torch._C._get_dispatch_stack_at(active_mode_count() - 1)


def exit_event_with(handle: Any, future: torch.futures.Future[None]) -> None:
    """Let an event end with a future."""
    torch.ops.profiler._call_end_callbacks_on_jit_fut(handle, future)


# ---- private names: tensors and trees of them ----

tree_flatten = _pytree.tree_flatten
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_map_only = _pytree.tree_map_only
tree_unflatten = _pytree.tree_unflatten

foreach_add_: Callable[..., None] = torch._foreach_add_
"""Add a list of tensors to another, in place."""

foreach_copy_: Callable[..., None] = torch._foreach_copy_
"""Copy a list of tensors to another."""

neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
"""Return a view that negates."""

conj_view: Callable[[torch.Tensor], torch.Tensor] = torch._conj
"""Return a view that conjugates."""

BatchNormBase = torch.nn.modules.batchnorm._BatchNorm
FutureBase = torch._C.Future
"""The class in C++ of futures."""

is_cuda_unusable: Callable[[], bool] = torch.cuda._is_in_bad_fork
"""Return whether this process was forked from one that had initialized CUDA."""


def can_pickle(tensor: torch.Tensor) -> bool:
    """Return whether PyTorch can pickle a tensor; it fails for CPU tensors of newer dtypes."""
    is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return not is_plain or tensor.dtype in torch.storage._dtype_to_storage_type_map()


def has_python_key(tensor: torch.Tensor) -> bool:
    """Return whether operators of a tensor go to Python, as those of a wrapper do."""
    return bool(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python))


def has_internal_overlap(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor are known to share memory."""
    return torch._debug_has_internal_overlap(tensor) == 1


def storage_use_count(tensor: torch.Tensor) -> int:
    """Return the number of references to a tensor's storage."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


# ---- private names: autograd ----

DelayedError: Any = torch._C._functions.DelayedError
"""A function that raises when its result is differentiated."""

backward_node: Callable[[], Any] = torch._C._current_autograd_node
"""Return the node that a backward pass executes in this thread; None if there is none."""

backward_id: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward pass in this thread; -1 if there is none."""

keeps_graph: Callable[[], bool] = _autograd._get_current_graph_task_keep_graph
"""Return whether the backward pass in this thread keeps the graph."""

will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Return whether the backward pass in this thread executes a node.

Raises RuntimeError within `torch.autograd.grad`.
"""


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass in this thread."""
    execution: Any = torch.autograd.Variable._execution_engine
    execution.queue_callback(callback)


def has_saved_tensor_hooks() -> bool:
    """Return whether hooks are active that get the tensors that autograd saves."""
    hooks: Any = _autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None


def is_transformed() -> bool:
    """Return whether a transform of `torch.func`, such as `vmap`, or forward mode is active."""
    is_forward_mode = torch.autograd.forward_ad._current_level >= 0
    return is_forward_mode or torch._C._functorch.peek_interpreter_stack() is not None
