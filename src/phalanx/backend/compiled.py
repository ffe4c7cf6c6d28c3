"""Runs of prepared operations in functions that `torch.compile` compiles.

Dynamo, which traces such a function, cannot trace a native call. It traces `__call__` of the base
class `PreparedOperation` instead, and finds one operator there, `phalanx::run_prepared`. The
arguments of the operator are the tensors that the operation writes and reads, so the compiler keeps
their reads and writes in order. Every run also writes to one more tensor, `_ORDER`: the compiler
therefore keeps all runs, and their order.

In a compiled function, the values of a tensor may stand in other memory than that of the tensor for
a time. The operator then runs the same operation on that memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from phalanx import _native
from phalanx.errors import UsageError

_LIBRARY = torch.library.Library("phalanx", "FRAGMENT")  # type: ignore[no-untyped-call]
# From a SymInt on, an operation with another handle costs one more compilation, not one for each.
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "run_prepared(SymInt handle, Tensor(a!)[] written, Tensor[] read) -> ()"
)
_run_prepared = torch.ops.phalanx.run_prepared.default

_ORDER = torch.empty(0, dtype=torch.float32, device="cpu")
_operations: WeakValueDictionary[int, PreparedOperation] = WeakValueDictionary()
_handles = itertools.count()


class PreparedOperation:
    """An operation whose arguments were read once, to run many times.

    Results of `phalanx.prepare` and `phalanx.plan`, which say what a run does. It can run once at a
    time, in any thread.

    Example:
        >>> average = phalanx.prepare(dist.all_reduce, torch.ones(1000))
        >>> average()
        >>> average.start()
        >>> average.wait()
    """

    # The native class, which all operations have, overrides everything but `__call__`: it has a
    # call of its own that does not look for this one.
    __slots__ = ()
    plain: Any
    """The general ways of the operation, see `phalanx.backend.prepared`."""
    is_native: bool
    """True if runs go to the core; False if they call the plain function."""

    def __call__(self) -> None:
        """Run the operation, and block until it has ended.

        Raises:
            UsageError: A tensor has changed since the preparation; the operation is running in
                another thread, or was started.
            ArgumentTypeError: Arguments were given.
            DistBackendError: As the plain call raises it.
        """
        plain = self.plain
        # Runs are invisible to autograd, as plain calls are. Tensors are not detached for that:
        # without their bases, the compiler would not know which of them share memory.
        with torch.no_grad():
            _run_prepared(plain.handle, [_ORDER, *plain.written], plain.read)

    def start(self) -> None:
        """Start the operation; `wait` ends it. The tensors must not be used in between.

        Started operations of a group run in the order of their starts. Does not block. Raises what
        a call raises at once.
        """
        raise NotImplementedError

    def wait(self) -> None:
        """Block until the operation that was started has ended.

        Raises what a call raises; UsageError if the operation was not started.
        """
        raise NotImplementedError

    def run_queued(self, seconds: float) -> _native.Status | None:
        """Run the operation in the group's thread; return its failure. For `plan`."""
        raise NotImplementedError


_native.make_operation_class(PreparedOperation)


def register(operation: PreparedOperation) -> int:
    """Return the handle of an operation in compiled functions, which does not keep it alive."""
    handle = next(_handles)
    _operations[handle] = operation
    return handle


def _run(handle: int, written: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> None:
    operation = _operations.get(handle)
    if operation is None:
        raise UsageError(
            f"A compiled function runs the prepared operation {handle}, which does not exist: keep "
            "the operation as long as the function, and compile in the process that runs it"
        )
    plain = operation.plain
    given, own = [*written[1:], *read], [*plain.written, *plain.read]
    pairs = list(zip(given, own, strict=True))
    if all(one is other or one.data_ptr() == other.data_ptr() for one, other in pairs):
        operation()
    else:
        plain.check()
        plain.with_tensors({id(other): one for one, other in pairs}).prepare()()


_LIBRARY.impl("run_prepared", _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("phalanx::run_prepared", lambda *_arguments: None, lib=_LIBRARY)
