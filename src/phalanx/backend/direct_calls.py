"""Direct calls: blocking operations that go from torch's function to the core in one native call.

The native methods take tensors and options as they are, and read tensors through the C table that
torch publishes for DLPack. They run the operations that need no preparation: plain tensors, torch's
own options, an operator that the core has, and no observer. They pass all others on to the general
methods of the same name, which also have the errors of wrong arguments.

What they read of torch's memory is not part of any interface. So they exist only with versions of
torch that Phalanx is tested with, and an operation whose options have an attribute that is unknown
here, and might mean something, has none.
"""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from phalanx import _native, env, torch_layouts, torch_versions
from phalanx.backend import known_failures
from phalanx.backend.call_site import call_site, short_site
from phalanx.backend.execution import DONE
from phalanx.backend.messages import check_unexpected
from phalanx.backend.operands import OP_NAMES, OPS
from phalanx.errors import UsageError
from phalanx.torch_versions import active_mode_count, conj_view, is_profiling, neg_view

# The options of each operation: their class, and whether they have a root and an operator.
_OPTIONS: dict[str, tuple[Any, bool, bool]] = {
    "barrier": (dist.BarrierOptions, False, False),
    "broadcast": (dist.BroadcastOptions, True, False),
    "all_reduce": (dist.AllreduceOptions, False, True),
    "reduce": (dist.ReduceOptions, True, True),
    "all_gather": (AllgatherOptions, False, False),
    "gather": (dist.GatherOptions, True, False),
    "scatter": (dist.ScatterOptions, True, False),
    "reduce_scatter": (dist.ReduceScatterOptions, False, True),
    "all_gather_single": (AllgatherOptions, False, False),
    "reduce_scatter_single": (dist.ReduceScatterOptions, False, True),
    "all_to_all": (dist.AllToAllOptions, False, False),
    "all_to_all_single": (dist.AllToAllOptions, False, False),
}
_KNOWN_ATTRIBUTES = {
    *("asyncOp", "timeout", "rootRank", "reduceOp"),
    "rootTensor",  # of several in a list, of which there is one
    *("device", "device_ids"),  # of a barrier, which needs none
}
_OPERATORS = [getattr(dist.ReduceOp, OP_NAMES[code]) for code in OPS.values()]
_installed: set[str] = set()
# Functions of torch.distributed that post a message and wait for it at once.
_BLOCKING = (dist.send, dist.recv)


def install(group_class: type[dist.ProcessGroup]) -> None:
    """Put direct methods before the general ones of the class of groups, unless `obstacle`.

    All operations use the general methods, too, if the table has a later version, or tensors look
    different in memory.
    """
    table, kinds = torch_versions.TENSOR_TABLE, (torch.Tensor, torch.nn.Parameter)
    is_known = (
        not obstacle()
        and _native.set_tensor_api(table, kinds, torch.is_grad_enabled)
        and torch_versions.TENSOR_LAYOUT is not None
        and _native.set_tensor_layout(torch_versions.TENSOR_LAYOUT, *_samples())
    )
    if not is_known:
        return
    _native.set_direct_call_environment(
        observer_flags=torch_versions.OBSERVER_FLAGS,
        observers=[active_mode_count, is_profiling],
        ops=[OPS.get(number, -1) for number in range(max(OPS) + 1)],
        done=DONE,
        blocking=[inspect.unwrap(function).__code__ for function in _BLOCKING],
        check_unexpected=check_unexpected,
        fail_collective=_fail_collective,
        fail_message=_fail_message,
    )
    layouts = {name: layout for name in _OPTIONS if (layout := _layout(name)) is not None}
    _native.install_direct_calls(group_class, layouts)
    _installed.update(layouts, ("send", "recv"))


def obstacle() -> str:
    """Return the reason why there are no direct calls in this process; empty if there are.

    Raises:
        UsageError: `PHALANX_DIRECT_CALLS` is malformed.
    """
    try:
        is_allowed = env.direct_calls()
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not is_allowed:
        return "PHALANX_DIRECT_CALLS=0 switches them off"
    if not torch_versions.is_tested(torch.__version__):
        return f"Phalanx is not tested with torch {torch.__version__}"
    if torch_versions.TENSOR_TABLE is None:
        return "this torch has no table of functions for its tensors"
    return ""


def is_installed(operation: str) -> bool:
    """Return whether an operation, by the core's name, has a direct method."""
    return operation in _installed


def _samples() -> list[list[torch.Tensor]]:
    """Return lists of tensors that differ in one property, by which it is found in memory.

    These are ordinary, negative and conjugate views, tensors that require gradients, and tensors
    that were changed from 1 to 32 times.
    """
    tensors = [torch.zeros(4, dtype=torch.complex64, device="cpu") for _ in range(32)]
    # Made in turns, so that unused bytes of their memory do not differ by list.
    views = [(each.view(4), neg_view(each), conj_view(each)) for each in tensors]
    graded = [each.detach().requires_grad_() for each in tensors]
    changed = [torch.zeros(4, dtype=torch.complex64, device="cpu") for _ in range(32)]
    for count, each in enumerate(changed, 1):
        for _ in range(count):
            torch.autograd.graph.increment_version(each)
    return [*(list(each) for each in zip(*views, strict=True)), graded, changed]


def _layout(name: str) -> tuple[type, int, int, int, int] | None:
    """Return the class of an operation's options, and the positions of their fields in memory.

    These are the timeout, whether it is asynchronous, the root and the operator; -1 for a field
    that the class lacks. None if objects do not have this layout, or have other attributes.
    """
    kind, has_root, has_op = _OPTIONS[name]
    attributes = {each for each in dir(kind) if not each.startswith("_")}
    if type(kind).__name__ != "pybind11_type" or attributes - _KNOWN_ATTRIBUTES:
        return None
    values = range(1_000_003, 9_000_000, 1_000_003)
    flags = (True, False, True, True, False, False, False, True, False, True)
    fields: list[tuple[int, str, str, list[tuple[Any, int]]]] = [
        (8, "timeout", "timeout", [(timedelta(milliseconds=value), value) for value in values]),
        (1, "asyncOp", "async_op", [(flag, int(flag)) for flag in flags]),
        (8, "rootRank", "root", [(value, value) for value in values] if has_root else []),
        (1, "reduceOp", "op", [(op, hash(op)) for op in _OPERATORS] if has_op else []),
    ]
    found = torch_layouts.OPTIONS[kind.__name__]
    positions = []
    for size, field, key, samples in fields:
        position = found.get(key, -1)
        if (position < 0) != (not samples):
            return None
        objects = [kind() for _ in samples]
        for each, (value, _) in zip(objects, samples, strict=True):
            setattr(each, field, value)
        numbers = [number for _, number in samples]
        if samples and not _native.has_field(objects, numbers, position, size):
            return None
        positions.append(position)
    return kind, *positions


def _fail_collective(
    group: Any,
    status: _native.Status,
    name: str,
    subject: torch.Tensor | None,
    op: int,
    root: int,
    timeout: float,
    site: int,
) -> NoReturn:
    """Raise the error of a collective that failed in the core."""
    operation = name, subject, op, root
    error = group._executor.error(status, operation, timeout, _format_site(site))
    raise known_failures.seen(error)


def _fail_message(
    group: Any,
    status: _native.Status,
    name: str,
    tensor: torch.Tensor,
    peer: int,
    tag: int,
    timeout: float,
    site: int,
) -> NoReturn:
    """Raise the error of a message that failed in the core."""
    native = group._membership.native
    site_text = _format_site(site)
    error = group._messages.error(native, name, tensor, peer, tag, timeout, site_text, status)
    raise known_failures.seen(error)


def _format_site(site: int) -> str:
    """Return the text of a call site by its number; 0 means the current one."""
    return short_site(_native.call_site_text(site)) if site else call_site()
