"""Prepared operations: `prepare` reads the arguments of an operation once, `plan` merges several.

These are the persistent operations of MPI-4 (MPI_Allreduce_init), which PyTorch lacks. The function
of `torch.distributed` itself is called once, and the direct method that it calls keeps the
operation in place of running it (see `direct_calls`). A run then is one native call: it compares
the tensors with their state at the preparation, in a few words of memory, and goes to the core.

Runs that something observes (a profiler, a dispatch mode, fault injection), or that come after
operations queued in the group's thread, take the general way, by calling the function again.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from phalanx import _native
from phalanx.backend import compiled, direct_calls
from phalanx.backend.call_site import short_site
from phalanx.backend.compiled import PreparedOperation
from phalanx.backend.operands import DTYPE_CODES, format_tensor, warn_once
from phalanx.backend.process_group import ProcessGroup
from phalanx.errors import ArgumentTypeError, UsageError
from phalanx.torch_versions import is_profiling, tree_leaves, tree_map

_OPERATIONS = {
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather_single",
    "all_gather_single": "all_gather_single",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "irecv": "recv",
    "isend": "send",
    "recv": "recv",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "scatter": "scatter",
    "send": "send",
}
"""The operation of each function of `torch.distributed` that can be prepared."""
_INPUTS = {"input", "input_list", "input_tensor", "input_tensor_list", "scatter_list"}
"""The arguments of these functions that are only read, and `tensor` of those that follow."""
_READERS = {"all_gather", "gather", "send"}
_MODULE = "torch.distributed.distributed_c10d"
"""The module of these functions."""
_ASYNCHRONOUS = {"send": dist.isend, "recv": dist.irecv}


def prepare(function: Callable[..., Any], *arguments: Any, **options: Any) -> PreparedOperation:
    """Prepare an operation that runs many times on the same tensors.

    `op = phalanx.prepare(dist.all_reduce, tensor)` reads and checks the arguments, and communicates
    nothing. `op()` then does what `dist.all_reduce(tensor)` does, at a fraction of the cost of the
    call; `op.start()` and `op.wait()` split it in two. Prepared and plain operations match each
    other: some ranks may prepare an operation that others call plainly. The tensors may have other
    values in each run, but must keep their memory, shape and dtype, which every run checks. They
    and the group live at least as long as the operation.

    Two things differ from plain calls. A rank that only gives data (the root of a broadcast or
    scatter, the other ranks of a gather or reduce) returns as soon as the data are in shared
    memory, if there is room, and learns of a failure of its peers in a later operation. Records
    and errors name the call site of `prepare` in place of that of the run.

    If the ranks of the group are on several hosts, if its backend is another one, and for tensors
    that are not on the CPU, the result works in the same way, and calls `function`. That is logged
    once.

    Args:
        function: A collective of `torch.distributed` with a tensor or a list of tensors, `barrier`,
            or `send`, `recv`, `isend` or `irecv`; the last two are the same as `send` and `recv`.
        arguments: The arguments of the function; lists are copied.
        options: The same by name. `async_op` must be False.

    Returns:
        The operation. Calling it runs it, blocks, and returns None. It can run once at a time, in
        any thread; in a group, order and thread of runs count as those of plain calls.

    Raises:
        UsageError: The function cannot be prepared; or the arguments are wrong, or need work in
            each call that preparation would not save: tensors that are not contiguous, negative
            or conjugate views, other layouts, PREMUL_SUM, AVG of integers, input and output that
            overlap. Runs raise it if a tensor has changed, and if the operation is running already;
            all else as the plain call does.
        ArgumentTypeError: The arguments do not fit the function.

    Example:
        >>> gradient = torch.ones(1000)
        >>> average = phalanx.prepare(dist.all_reduce, gradient, op=dist.ReduceOp.AVG)
        >>> for step in range(3):
        ...     average()
    """
    return _PlainCall(function, arguments, options).register()


def plan(operations: Sequence[PreparedOperation]) -> PreparedOperation:
    """Combine prepared operations of one group, to run them in order by one call.

    Small collectives in a row that do not depend on each other meet once, which takes about as
    long as one of them alone: up to 128, with up to 16 KiB in all of the data that a rank gives,
    and 16 bytes for each.
    Messages in a row move at the same time, as with `batch_isend_irecv`. Everything else runs one
    after another.

    All ranks make the same plan of the collectives: the same operations in the same order, of
    which the same ones are independent (two operations depend on each other if they use the same
    memory). Otherwise the run raises `CollectiveMismatch` on all ranks. In the flight recorder,
    merged operations are one operation named plan.

    Args:
        operations: Results of `prepare`, all of one group, at least one.

    Returns:
        An operation like those of `prepare`. The timeout of the group counts for a whole run. If
        the operations run as plain calls (see `prepare`), so they do in the plan.

    Raises:
        UsageError: There are no operations, or they are of several groups.
        ArgumentTypeError: One of them is not a result of `prepare`.

    Example:
        >>> sums, largest = torch.ones(100), torch.ones(3)
        >>> add = phalanx.prepare(dist.all_reduce, sums)
        >>> compare = phalanx.prepare(dist.all_reduce, largest, op=dist.ReduceOp.MAX)
        >>> both = phalanx.plan([add, compare])
        >>> both()
    """
    return _PlainPlan(operations, _native.call_site()).register()


class _Plain:
    """The general ways of a prepared operation, which native runs use in special cases.

    Attributes:
        site: The number of the call site of the preparation.
        handle: The number of the operation in compiled functions.
        tensors: Its tensors.
        written: The tensors that a run may write, and all that share their memory.
        read: The other tensors.
    """

    handle: int
    tensors: tuple[torch.Tensor, ...]
    written: list[torch.Tensor]
    read: list[torch.Tensor]

    def __init__(self, site: int) -> None:
        self.site = site

    def prepare(self) -> PreparedOperation:
        """Prepare the operation."""
        raise NotImplementedError

    def find_written(self) -> Iterable[torch.Tensor]:
        """Return the tensors that the operation writes on some rank."""
        raise NotImplementedError

    def register(self) -> PreparedOperation:
        """Prepare the operation, and make it known to compiled functions."""
        operation = self.prepare()
        memory = set(map(_storage, self.find_written()))
        tensors = {id(each): each for each in self.tensors}.values()
        self.written = [each for each in tensors if _storage(each) in memory]
        self.read = [each for each in tensors if _storage(each) not in memory]
        self.handle = compiled.register(operation)
        return operation

    def describe(self) -> str:
        """Return a text that names the operation and its call site."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{self.describe()}>"

    def wait(self, work: Any) -> None:
        """Wait for an operation that was started."""
        if work is not None:  # this rank is in the group
            work.wait()

    def refuse(self, call: str, phase: str) -> NoReturn:
        """Raise the error of a call in the wrong phase: "idle", "running" or "started"."""
        advice = {
            "idle": "it has not been started: call start() first",
            "started": "it has been started: call wait() first",
            "running": "it is running in another thread: prepare an operation for each thread",
        }
        method = "" if call == "call" else f".{call}"
        raise UsageError(f"{self.describe()}{method}(): {advice[phase]}")

    def _at(self) -> str:
        return f"prepared at {short_site(_native.call_site_text(self.site))}"


class _PlainCall(_Plain):
    """The call of a function of `torch.distributed` that was prepared.

    Args:
        function: The function.
        arguments: Its arguments.
        options: Its arguments by name.

    Attributes:
        function: The function, or the blocking one for `isend` and `irecv`.
        bound: All arguments by name, with the group that they mean.
        group: That group.
    """

    def __init__(
        self, function: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]
    ) -> None:
        super().__init__(_native.call_site())
        name = getattr(function, "__name__", "")
        if name not in _OPERATIONS or getattr(function, "__module__", "") != _MODULE:
            raise UsageError(
                f"prepare: got {function!r}, expected one of the functions of torch.distributed "
                f"{', '.join(_OPERATIONS)}"
            )
        self._operation = _OPERATIONS[name]
        is_message = self._operation in _ASYNCHRONOUS
        self.function = getattr(dist, self._operation) if is_message else function
        self._name = self._operation if is_message else name
        # Lists are copied, since the user may change them.
        arguments, options = tree_map(lambda each: each, (list(arguments), options))
        self.bound = self._bind(arguments, options)
        self.group = self.bound.arguments["group"]
        self._membership = getattr(self.group, "_membership", None)
        self.tensors = tuple(
            each for each in tree_leaves(self.bound.arguments) if isinstance(each, torch.Tensor)
        )
        self._states = [_state(each) for each in self.tensors]
        # Kept as text: the tensors may have changed when an error names them.
        self._text = " ".join([self._name, *map(format_tensor, self.tensors[:1])])

    def _bind(self, arguments: Sequence[Any], options: dict[str, Any]) -> inspect.BoundArguments:
        try:
            bound = inspect.signature(self.function).bind(*arguments, **options)
        except TypeError as error:
            raise ArgumentTypeError(f"prepare({self._name}): {error}") from None
        given = bound.arguments
        if given.get("async_op"):
            raise UsageError(
                f"prepare({self._name}): async_op is True: prepare without it, and split the "
                "operation by start() and wait()"
            )
        if self._name == "recv" and given.get("src") is given.get("group_src") is None:
            raise UsageError("prepare(recv): got no source, expected the rank that sends: give src")
        if given.get("group") is None:
            # Named now: the default group may be another one later.
            given["group"] = dist.group.WORLD
        if given["group"] is None:
            raise UsageError(
                f"prepare({self._name}): there is no default group: form it first by "
                "phalanx.init() or init_process_group()"
            )
        return bound

    def find_obstacle(self) -> str:
        """Return the reason why runs must call the function; empty if there is none."""
        if not isinstance(self.group, ProcessGroup):
            return "their group is of another backend, or without this rank"
        membership = self.group._membership
        if membership.native.closed:
            raise UsageError(f"prepare({self._name}): this rank has left the process group")
        if len(self.group.hosts) > 1:
            return "the ranks of their group are on several hosts"
        if any(each.device.type != "cpu" for each in self.tensors):
            return "their tensors are not on the CPU"
        if not membership.is_direct or not direct_calls.is_installed(self._operation):
            return "the group has no direct calls"
        return ""

    def prepare(self) -> PreparedOperation:
        """Prepare the call for the core, or wrap it if there is an obstacle."""
        obstacle = self.find_obstacle()
        if obstacle:
            warn_once(f"prepare {obstacle}", f"prepared operations run as plain calls: {obstacle}")
            return _native.wrap_plain(self)
        prepared = _native.prepare(
            self, self.function, (), self.bound.arguments, self.tensors, self.site
        )
        if isinstance(prepared, PreparedOperation):
            return prepared
        raise self.refusal(prepared)

    def refusal(self, refused: _RefusedCall | None) -> UsageError:
        """Return, or raise, the error of a call that cannot be prepared.

        Args:
            refused: The call of a general method; None if the function has called none.
        """
        if refused is not None:
            general, (group, *arguments), options = refused
            with contextlib.suppress(_CheckedError):
                general(_CheckingGroup(group), *arguments, **options)  # raises if they are wrong
        faults = [fault for each in self.tensors if (fault := _find_fault(each))]
        fault = next(
            iter(faults), "the core lacks the operator for this dtype, or input and output overlap"
        )
        return UsageError(f"prepare({self._name}): {fault}: call {self._name} itself")

    def run(self) -> None:
        """Call the function."""
        self.check_ranks()
        self.function(*self.bound.args, **self.bound.kwargs)

    def with_tensors(self, tensors: dict[int, torch.Tensor]) -> _PlainCall:
        """Return the same call with other tensors, by the identity of its own."""

        def replace(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [replace(each) for each in value]
            return tensors.get(id(value), value)

        other = copy.copy(self)
        given = {name: replace(value) for name, value in self.bound.arguments.items()}
        other.bound = inspect.BoundArguments(self.bound.signature, given)
        other.tensors = tuple(tensors[id(each)] for each in self.tensors)
        other._states = [_state(each) for each in other.tensors]
        return other

    def find_written(self) -> Iterable[torch.Tensor]:
        for name, value in self.bound.arguments.items():
            if not (name in _INPUTS or (name == "tensor" and self._name in _READERS)):
                yield from (each for each in tree_leaves(value) if isinstance(each, torch.Tensor))

    def start(self) -> Any:
        """Call the function asynchronously; return its work."""
        self.check_ranks()
        given = self.bound.arguments
        if self._operation in _ASYNCHRONOUS:
            return _ASYNCHRONOUS[self._operation](**given)
        call = inspect.BoundArguments(self.bound.signature, {**given, "async_op": True})
        return self.function(*call.args, **call.kwargs)

    def start_progress(self) -> None:
        """Have the group's thread move a message that was started."""
        self.group._membership.message_thread.start()

    def check_ranks(self) -> None:
        """Raise if the group has other ranks than at the preparation (`phalanx.shrink`)."""
        if getattr(self.group, "_membership", None) is not self._membership:
            raise UsageError(
                f"{self.describe()}: the ranks of its group have changed since: prepare again"
            )

    def check(self) -> None:
        """Raise if a tensor has changed since the preparation."""
        for tensor, before in zip(self.tensors, self._states, strict=True):
            now = _state(tensor)
            if now != before:
                raise UsageError(f"{self.describe()}: {_format_change(before, now)}: prepare again")

    def describe(self) -> str:
        return f"{self._text} {self._at()}"


class _PlainPlan(_Plain):
    """The operations of a plan.

    Attributes:
        calls: The call of each operation.
        group: Their group.
        operation: The operation that runs them, if they run in the core.
        sizes: The number of operations in each step of the plan.
    """

    operation: PreparedOperation
    sizes: list[int]

    def __init__(self, operations: Sequence[PreparedOperation], site: int) -> None:
        super().__init__(site)
        self._operations = list(operations)
        if not self._operations:
            raise UsageError("plan: got no operations, expected at least one of prepare()")
        self.calls: list[_PlainCall] = []
        for index, each in enumerate(self._operations):
            call = getattr(each, "plain", None)
            if not isinstance(call, _PlainCall):
                raise ArgumentTypeError(
                    f"plan: operation {index} is {each!r}, expected a result of prepare()"
                )
            self.calls.append(call)
        self.group = self.calls[0].group
        for index, call in enumerate(self.calls):
            if call.group is not self.group:
                raise UsageError(
                    f"plan: operation {index}, {call.describe()}, is of another group than "
                    "operation 0: make a plan for each group"
                )
        self.is_native = all(each.is_native for each in self._operations)
        self.tensors = tuple(each for call in self.calls for each in call.tensors)

    def prepare(self) -> PreparedOperation:
        """Make the plan."""
        if not self.is_native:
            return _native.wrap_plain(self)
        self.operation, self.sizes = _native.make_plan(
            self,
            self.group,
            self.group._membership,
            self.group.size(),
            self._operations,
            self.tensors,
            self.site,
        )
        return self.operation

    def find_written(self) -> Iterable[torch.Tensor]:
        return (each for call in self.calls for each in call.written)

    def with_tensors(self, tensors: dict[int, torch.Tensor]) -> _PlainPlan:
        """Return the same plan with other tensors, by the identity of its own."""
        calls = [call.with_tensors(tensors) for call in self.calls]
        return _PlainPlan([call.prepare() for call in calls], self.site)

    def run(self) -> None:
        """Run the operations after those that are queued, or as plain calls."""
        if not self.is_native:
            for each in self._operations:
                each()
            return
        with record_function("phalanx:plan") if is_profiling() else contextlib.nullcontext():
            self._execute(is_async=False)

    def start(self) -> Any:
        """Run the operations in the thread of the group; return their work.

        Plain calls are started, each after those that use the same memory, and returned.
        """
        if self.is_native:
            return self._execute(is_async=True)
        started: list[PreparedOperation] = []
        used: set[int] = set()
        for call, operation in zip(self.calls, self._operations, strict=True):
            memory = {each.untyped_storage().data_ptr() for each in call.tensors}
            if memory & used:  # backends such as Gloo run operations at the same time
                _wait_all(started)
                used.clear()
            operation.start()
            started.append(operation)
            used |= memory
        return started

    def _execute(self, is_async: bool) -> Any:
        self.calls[0].check_ranks()
        if self.group._membership.native.closed:
            raise UsageError(f"{self.describe()}: this rank has left the process group")
        options = dist.BarrierOptions()
        options.asyncOp = is_async
        call = self.operation.run_queued
        return self.group._executor.run(
            "plan", call, None, options, [], None, keep_alive=self.operation
        )

    def wait(self, work: Any) -> None:
        if self.is_native:
            super().wait(work)
        else:
            _wait_all(work)

    def check(self) -> None:
        """Raise if a tensor has changed since the preparation."""
        for call in self.calls:
            call.check()

    def describe(self) -> str:
        return f"plan of {len(self.calls)} operations {self._at()}"


def _wait_all(started: list[PreparedOperation]) -> None:
    while started:
        started.pop(0).wait()


_RefusedCall = tuple[Callable[..., Any], list[Any], dict[str, Any]]
"""A method of a group, its arguments, and those by name."""


class _CheckedError(Exception):
    """A method has found its arguments right."""


class _CheckingGroup:
    """A group whose methods check their arguments, and run nothing."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._executor = self._messages = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def run(self, *_arguments: object, **_options: object) -> NoReturn:
        raise _CheckedError

    send = recv = run


def _storage(tensor: torch.Tensor) -> int:
    """Return a number that tensors with the same storage share."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


_State = tuple[int, int, list[int], tuple[int, ...], torch.dtype, torch.device, bool, bool]


def _state(tensor: torch.Tensor) -> _State:
    """Return all that must not change between runs: memory, its size, shape, dtype and kind."""
    is_dense = tensor.layout is torch.strided
    memory = (tensor.data_ptr(), tensor.untyped_storage().nbytes()) if is_dense else (0, 0)
    stride = tensor.stride() if is_dense else ()
    kind = tensor.dtype, tensor.device, tensor.is_neg(), tensor.is_conj()
    return (*memory, list(tensor.shape), stride, *kind)


def _format_change(before: _State, now: _State) -> str:
    """Describe the difference between two states of a tensor."""

    def describe(state: _State) -> str:
        _, _, shape, stride, dtype, device, _, _ = state
        text = f"{str(dtype).removeprefix('torch.')}{shape}"
        return f"{text} with strides {list(stride)} on {device}"

    if before[2:] != now[2:]:
        return f"its tensor was {describe(before)}, and is {describe(now)} now"
    if now[1] == 0 and before[1] != 0:
        return "the memory of its tensor was freed"
    return "the memory of its tensor was replaced"


def _find_fault(tensor: torch.Tensor) -> str:
    """Return the reason why a tensor cannot be prepared; empty if it can."""
    text = format_tensor(tensor)
    if tensor.layout is not torch.strided:
        return f"the tensor {text} has the layout {tensor.layout}, expected a dense one"
    if tensor.is_neg() or tensor.is_conj():
        return f"the tensor {text} is a negative or conjugate view, expected its resolve_*()"
    if not tensor.is_contiguous():
        return f"the tensor {text} has strides {list(tensor.stride())}, expected a contiguous one"
    if tensor.dtype not in DTYPE_CODES:
        return f"the tensor {text} has a dtype that the core lacks"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"the tensor {text} is of {type(tensor)}, expected torch.Tensor or Parameter"
    return ""
