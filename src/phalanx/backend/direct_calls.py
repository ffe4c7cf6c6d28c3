"""Direct calls: blocking operations that go from torch's function to the core in one native call.

The native methods take tensors and options as they are, and read tensors through the C table that
torch publishes for DLPack. They run the operations that need no preparation: plain tensors, torch's
own options with the group's timeout, an operator that the core has, and no observer. They pass all
others on to the general methods of the same name, which also have the errors of wrong arguments.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from phalanx import _native
from phalanx.backend.call_site import call_site
from phalanx.backend.execution import DONE
from phalanx.backend.instrumentation import active_mode_count, is_profiling
from phalanx.backend.messages import UNEXPECTED_BYTES_LIMIT
from phalanx.backend.operands import OPS

if TYPE_CHECKING:
    from phalanx.backend.process_group import ProcessGroup

_OPTIONS = (
    AllgatherOptions,
    dist.AllreduceOptions,
    dist.AllToAllOptions,
    dist.BarrierOptions,
    dist.BroadcastOptions,
    dist.GatherOptions,
    dist.ReduceOptions,
    dist.ReduceScatterOptions,
    dist.ScatterOptions,
)
# Functions of torch.distributed that post a message and wait for it at once.
_BLOCKING = (dist.send, dist.recv)


def install(group_class: type[ProcessGroup]) -> None:
    """Put direct methods before the general ones of the class of groups.

    Without the table, or with one of a later version, all operations use the general methods.
    """
    table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    kinds = torch.Tensor, torch.nn.Parameter
    if table is None or not _native.set_tensor_api(
        table, kinds, torch.Tensor.is_neg, torch.Tensor.is_conj
    ):
        return
    _native.set_direct_call_environment(
        observers=[active_mode_count, is_profiling],
        defaults={kind: kind().timeout for kind in _OPTIONS},
        ops=[OPS.get(number, -1) for number in range(max(OPS) + 1)],
        done=DONE,
        blocking=[inspect.unwrap(function).__code__ for function in _BLOCKING],
        unexpected_limit=UNEXPECTED_BYTES_LIMIT,
        fail_collective=_fail_collective,
        fail_message=_fail_message,
    )
    _native.install_direct_calls(group_class)


def _fail_collective(
    group: ProcessGroup,
    status: _native.Status,
    name: str,
    subject: torch.Tensor | None,
    op: int,
    root: int,
    timeout: float,
) -> NoReturn:
    """Raise the error of a collective that failed in the core."""
    raise group._executor.error(status, (name, subject, op, root), timeout, call_site())


def _fail_message(
    group: ProcessGroup,
    status: _native.Status,
    name: str,
    tensor: torch.Tensor,
    peer: int,
    tag: int,
    timeout: float,
) -> NoReturn:
    """Raise the error of a message that failed in the core."""
    native = group._membership.native
    raise group._messages.error(native, name, tensor, peer, tag, timeout, call_site(), status)
