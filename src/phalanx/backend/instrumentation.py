"""Operations as PyTorch's tools see them: operators for dispatch modes, events for the profiler.

PyTorch's own groups run each operation through an operator of the dispatcher, such as
`c10d.allreduce_`, which dispatch modes (such as `CommDebugMode`) and the profiler see. A group
written in Python is called without the dispatcher, which is faster. While a mode is active,
`run_through_operator` does what PyTorch's groups do. A base group without a backend calls the
operator, and the modes see it in their order. Beneath them, a mode of this module runs the
operation in place of PyTorch's kernel, which would require a registered backend.

A wrapper is a tensor without memory, whose class runs operators on the tensors that it holds. Its
operations always go through their operators: its class calls them again with the tensors that it
holds, and the mode of this module runs those. PyTorch does not look for a class in a list of lists,
in which `all_gather` has its outputs and `reduce_scatter` its inputs: a wrapper in one is an error
unless the other tensor of the operation is a wrapper too.

The profiler gets names and shapes as from PyTorch's own backends. Without a mode, it gets an event
with the operator's name. A second event is named "phalanx:all_reduce" (or "gloo:all_reduce", see
`replace`) and has the shapes of the tensors. It begins with the call and ends with the operation,
in another thread. The profiler thereby recognizes the event as asynchronous, and excludes its
duration from the caller's self time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from phalanx import _native, torch_versions
from phalanx.backend.operands import format_tensor
from phalanx.backend.work import CompositeWork
from phalanx.errors import UsageError
from phalanx.torch_versions import (
    TorchDispatchMode,
    active_mode_count,
    tree_leaves,
    tree_map_only,
)

OperatorCall = tuple[Any, ...]
"""A group, the name of a method of PyTorch's `ProcessGroup`, and its arguments."""

EVENT_NAMES = {
    method: f"c10d::{name}"
    for method, name in (
        ("all_gather_single", "_allgather_base_"),
        ("all_gather_single_coalesced", "allgather_into_tensor_coalesced_"),
        ("all_to_all_single", "alltoall_base_"),
        ("allgather", "allgather_"),
        ("allgather_coalesced", "allgather_coalesced_"),
        ("allreduce", "allreduce_"),
        ("allreduce_coalesced", "allreduce_coalesced_"),
        ("alltoall", "alltoall_"),
        ("barrier", "barrier"),
        ("broadcast", "broadcast_"),
        ("gather", "gather_"),
        ("monitored_barrier", "monitored_barrier_"),
        ("recv", "recv_"),
        ("recv_anysource", "recv_any_source_"),
        ("reduce", "reduce_"),
        ("reduce_scatter", "reduce_scatter_"),
        ("reduce_scatter_single", "_reduce_scatter_base_"),
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced_"),
        ("scatter", "scatter_"),
        ("send", "send"),
    )
}
"""The names of operators in the profiler, by the method of a group that calls them."""

FORMER_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "gather_single": "gather_into_tensor",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""The former names of methods in PyTorch. Its backends, such as NCCL's, still have them, and in
2.11 its groups too."""

_base_groups: dict[tuple[int, int], Any] = {}
"""Groups without a backend, by rank and size, which call operators as PyTorch's own groups do."""


def is_wrapper(tensor: torch.Tensor | None) -> bool:
    """Return whether a tensor is a wrapper, without memory of its own (see the module)."""
    return (
        isinstance(tensor, torch.Tensor)
        and torch_versions.has_python_key(tensor)
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and tensor.data_ptr() == 0
    )


def has_wrapper(operator: OperatorCall) -> bool:
    """Return whether a tensor of an operation, possibly in a list, is a wrapper."""
    return any(map(is_wrapper, tree_leaves(operator[2:])))


def run_observed(
    operator: OperatorCall, tensors: Sequence[torch.Tensor], run: Callable[[], dist.Work]
) -> dist.Work:
    """Run an operation in view of dispatch modes, wrappers or the profiler.

    Args:
        operator: The operation. Its group is the operator's argument that modes see.
        tensors: The tensors whose shapes the profiler records.
        run: Runs the operation. Not called if a mode does not pass the operator on, or if a tensor
            is a wrapper.

    Returns:
        The work of the operations that have run; the result of the operator if none has.
    """
    is_on_wrapper = has_wrapper(operator)
    if active_mode_count() or is_on_wrapper:
        return _run_through_operator(operator, run, is_on_wrapper)
    handle = torch_versions.enter_event(EVENT_NAMES[operator[1]], *tensors)
    try:
        return run()
    finally:
        torch_versions.exit_event(handle)


def _run_through_operator(
    operator: OperatorCall, run: Callable[[], dist.Work], is_on_wrapper: bool
) -> dist.Work:
    group, method, *arguments = operator
    rank_and_size = group.rank(), group.size()
    if rank_and_size not in _base_groups:
        _base_groups[rank_and_size] = dist.ProcessGroup(*rank_and_size)  # type: ignore[call-arg]
    execution = (
        _UnwrappingMode(group, method, arguments)
        if is_on_wrapper
        else _ExecutionMode(lambda _arguments: run())
    )
    with _insert_modes(execution, _GroupSubstitutionMode(group)):
        result: dist.Work = find_method(_base_groups[rank_and_size], method)(*arguments)
    works = execution.works
    if is_on_wrapper and len(works) > 1:
        return CompositeWork(works)
    return works[-1] if works else result


def find_method(group: Any, name: str) -> Callable[..., Any]:
    """Return a method of a group of PyTorch, which may have it under its former name.

    Args:
        group: A `ProcessGroup`, or one of its backends.
        name: The present name.

    Raises:
        AttributeError: The group has the method under neither name.
    """
    former = FORMER_NAMES.get(name, name)
    method: Callable[..., Any] = getattr(group, name if hasattr(group, name) else former)
    return method


class _ExecutionMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The lowest mode: runs the operation when the operator has passed all other modes."""

    def __init__(self, run: Callable[[Sequence[Any]], dist.Work]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run
        self.works: list[dist.Work] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        # A mode may call other operators, and modes of the compiler and of fake tensors are beneath
        # this one.
        if func.namespace != "c10d" or active_mode_count():
            return func(*args, **(kwargs or {}))
        work = self._run(args)
        self.works.append(work)
        boxed: Any = work.boxed()
        # By the number of returns: nothing, the work, or the written tensors and the work.
        returns = len(func._schema.returns)
        return (None, boxed, (args[0], boxed))[returns]


class _UnwrappingMode(_ExecutionMode):  # type: ignore[no-untyped-call]
    """The lowest mode for wrappers: runs the operation on the tensors that they hold."""

    def __init__(self, group: dist.ProcessGroup, method: str, arguments: list[Any]) -> None:
        def run(call_arguments: Sequence[Any]) -> dist.Work:
            tensors = [
                each for each in tree_leaves(call_arguments) if isinstance(each, torch.Tensor)
            ]
            for each in filter(is_wrapper, tensors):
                raise UsageError(_describe_unseen_wrapper(each, method))
            inner_tensors = iter(tensors)
            unwrapped = tree_map_only(torch.Tensor, lambda _wrapper: next(inner_tensors), arguments)
            work: dist.Work = getattr(group, method)(*unwrapped)
            return work

        super().__init__(run)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        # Leave the operator to the wrapper's class, which calls this mode again.
        if types:
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def _describe_unseen_wrapper(wrapper: torch.Tensor, method: str) -> str:
    # The dispatcher looks for classes in arguments and lists of them, not in lists of lists.
    return (
        f"{method.replace('allgather', 'all_gather')}: a tensor of the list of tensors per rank is "
        f"a wrapper without memory, {type(wrapper).__name__} {format_tensor(wrapper)}, and this "
        "rank's tensor is not: PyTorch then does not call the wrapper's class; expected "
        f"tensors that have memory, or this rank's tensor in a {type(wrapper).__name__} too"
    )


class _GroupSubstitutionMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The highest mode: replaces the base group that calls the operator by the actual group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._group = group.boxed()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            args = [self._group if _is_group(each) else each for each in args]
        return func(*args, **(kwargs or {}))


def _is_group(value: Any) -> bool:
    kind: Any = value._type() if isinstance(value, torch.ScriptObject) else None
    return kind is not None and kind.name() == "ProcessGroup"


@contextmanager
def _insert_modes(lowest: TorchDispatchMode, highest: TorchDispatchMode) -> Iterator[None]:
    """Activate one mode beneath all active modes, except those of the compiler, and one above.

    Modes of the compiler have a key, and PyTorch keeps them beneath the others.
    """
    suspended = []
    while active_mode_count() and not _is_top_mode_infra():
        suspended.append(torch_versions.pop_mode())
    activated = [lowest, *reversed(suspended), *([highest] if suspended else [])]
    try:
        for mode in activated:
            torch_versions.push_mode(mode)
        yield
    finally:
        for _ in activated:
            torch_versions.pop_mode()
        for mode in reversed(suspended):
            torch_versions.push_mode(mode)


def _is_top_mode_infra() -> bool:
    return getattr(torch_versions.top_mode(), "_mode_key", None) is not None


def record_call(
    name: str, tensors: Sequence[torch.Tensor], call: Callable[[float], _native.Status | None]
) -> Callable[[float], _native.Status | None]:
    """Begin an event now; return a wrapper of the native `call` that ends the event."""
    end = begin_event(name, tensors)

    def run(timeout: float) -> _native.Status | None:
        try:
            return call(timeout)
        finally:
            end()

    return run


def begin_event(name: str, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Begin an event in the calling thread; return a function that ends it, called once.

    The function may be called in any thread.

    Args:
        name: The name of the event, such as "phalanx:all_reduce".
        tensors: The tensors whose shapes the event has, if the profiler records shapes.
    """
    handle = torch_versions.enter_event(name, *tensors)
    # The future carries the profiler's state, which is per thread, to the thread that ends it.
    done: Future[None] = Future()
    torch_versions.exit_event_with(handle, done)

    def end() -> None:
        thread = threading.Thread(target=done.set_result, args=(None,))
        thread.start()
        thread.join()

    return end
