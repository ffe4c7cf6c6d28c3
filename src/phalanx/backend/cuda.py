"""CUDA tensors: through NCCL if each rank has a device of its own, else through host memory.

NCCL rejects two ranks on one device. This cannot be checked when the group is formed, since scripts
choose their device later. Therefore each rank publishes the device of its first CUDA tensor in the
group's store, and ranks compare devices when they communicate. A build of torch without CUDA has no
overhead, since the methods are wrapped only in builds with CUDA. If the group's transport is
"nccl", host memory is never used; its use is an error.

The operations that NCCL carries out are in PyTorch's record, which `recorder.torch_recorder` keeps.

The tests run without a GPU, with stand-ins for devices and for NCCL. On one H200 the module ran
with NCCL at one rank, and through host memory with two; NCCL with several ranks has not run.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from phalanx.backend.instrumentation import FORMER_NAMES, find_method
from phalanx.backend.operands import warn_once
from phalanx.backend.work import CompositeWork
from phalanx.errors import PeerLost, UsageError
from phalanx.recorder import torch_recorder
from phalanx.system.polling import attempts

_log = logging.getLogger("phalanx")
_T = TypeVar("_T")


class NcclChild:
    """The NCCL group inside of a Phalanx group, created at the first CUDA tensor.

    Args:
        store: The group's store. Keys begin with "phalanx/cuda/".
        rank: This process's rank in the group.
        name: The name of the NCCL group in PyTorch's record.
        members: The group's ranks, by their numbers in the job.
        timeout: The timeout of NCCL's operations, and of the wait for the peers' devices.
        make_group: Creates the NCCL group; replaced in tests.
        has_gone: Returns whether a rank has ended.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        name: str,
        members: Sequence[int],
        timeout: timedelta,
        make_group: Callable[[NcclChild], Any] | None = None,
        has_gone: Callable[[int], bool] = lambda _rank: False,
    ) -> None:
        self.store = store
        self.rank = rank
        self.name = name
        self.members = members
        self.timeout = timeout
        self._make_group = make_group or _make_nccl
        self._has_gone = has_gone
        self._lock = threading.Lock()
        self._published: str | None = None
        self._devices: dict[int, str] = {}
        self._group: Any = None
        self.required = False
        """True if the group's transport is "nccl": CUDA tensors must not go through host memory."""

    def group_for(self, device: torch.device, peer: int | None = None) -> Any:
        """Return the NCCL group, or None if tensors go through host memory.

        Blocks at the first use until the peers have used a CUDA tensor too. They must, since an
        operation has the same kind of device on all its ranks.

        Args:
            device: The device of this rank's tensor.
            peer: The other rank of a message; None for a collective.

        Raises:
            torch.distributed.DistStoreError: A peer's device was not published in time.
            PeerLost: A peer has ended before it published its device.
            UsageError: The group's transport is "nccl", and ranks share a device or have no NCCL.
        """
        with self._lock:
            self._publish(device_id(device))
            others = range(len(self.members)) if peer is None else (self.rank, peer)
            if not self._have_own_devices(others):
                if self.required:
                    raise UsageError(self._describe_conflict(others))
                return None
            if self._group is None:
                self._group = self._make_group(self)
                torch_recorder.add_group(self.name, self.members)
            return self._group

    def check_any_source(self, device: torch.device) -> None:
        """Reject a recv from any rank, unless all ranks send to this one through host memory.

        NCCL has no such recv, and a message from a rank on another device goes through NCCL. Blocks
        as `group_for` does, for all ranks.

        Raises:
            torch.distributed.DistStoreError: A rank's device was not published in time.
            PeerLost: A rank has ended before it published its device.
            UsageError: Messages of some rank go through NCCL; the message names that rank.
        """
        with self._lock:
            self._publish(device_id(device))
            for peer in range(len(self.members)):
                if peer != self.rank and self._have_own_devices((self.rank, peer)):
                    raise UsageError(
                        f"{self._label}: recv of a CUDA tensor from any rank, but "
                        f"messages of rank {peer} go through NCCL, which has no such recv: name "
                        "the rank (src=...), or receive into a tensor on the CPU"
                    )

    def shutdown(self) -> None:
        """Leave the NCCL group, if there is one."""
        if self._group is not None:
            torch_recorder.remove_group(self.name)
            self._group.shutdown()

    def abort(self) -> None:
        """Abort the NCCL group, if there is one, and wake its waiting callers."""
        if self._group is not None:
            self._group.abort()

    def _publish(self, device: str) -> None:
        if self._published is None:
            self._published = device
            self.store.set(f"phalanx/cuda/{self.rank}", device)

    def _describe_conflict(self, ranks: Iterable[int]) -> str:
        by_device: dict[str, list[int]] = {}
        for rank in ranks:
            by_device.setdefault(self._devices[rank], []).append(rank)
        if ranks_without_nccl := by_device.get(""):
            conflict = (
                f"rank {ranks_without_nccl[0]} has no NCCL: install a build of torch for CUDA there"
            )
        else:
            device, sharing_ranks = max(by_device.items(), key=lambda item: len(item[1]))
            conflict = (
                f"ranks {', '.join(map(str, sharing_ranks))} use one GPU ({device}): give each "
                "rank one of its own, `tensor.to(f'cuda:{local_rank}')`"
            )
        return f"{self._label}: transport is 'nccl', but {conflict}; or choose 'gloo'"

    @property
    def _label(self) -> str:
        return f"rank {self.rank}/{len(self.members)}"

    def _have_own_devices(self, ranks: Iterable[int]) -> bool:
        """Return whether these ranks each have a device of their own, and NCCL."""
        for rank in ranks:
            if rank not in self._devices:
                self._devices[rank] = self._wait_for_device(rank)
        devices = [self._devices[rank] for rank in ranks]
        return "" not in devices and len(set(devices)) == len(devices)

    def _wait_for_device(self, rank: int) -> str:
        key, seconds = f"phalanx/cuda/{rank}", self.timeout.total_seconds()
        for _ in attempts(time.monotonic() + seconds):
            if self.store.check([key]):
                device: str = self.store.get(key).decode()
                return device
            if self._has_gone(rank):
                raise PeerLost(
                    f"{self._label}: rank {rank} has ended before its first operation on a CUDA "
                    "tensor",
                    ranks=[rank],
                )
        raise dist.DistStoreError(
            f"{self._label}: rank {rank} has called no operation on a CUDA tensor within "
            f"{seconds:g} s: the tensors of an operation must be on the same kind of device on all "
            "ranks"
        )


def device_id(device: torch.device) -> str:
    """Return an identifier of a device, unique over all hosts; empty if there is no NCCL."""
    if not dist.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def _make_nccl(child: NcclChild) -> Any:
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = child.timeout
    options.group_name = child.name
    options.global_ranks_in_group = [*child.members]
    _log.info("every rank has a device of its own: CUDA tensors go to NCCL")
    store = PrefixStore("phalanx/nccl/", child.store)
    return dist.ProcessGroupNCCL(store, child.rank, len(child.members), options)


def find_cuda_tensor(arguments: Iterable[Any]) -> torch.Tensor | None:
    """Return the first CUDA tensor among an operation's arguments, which may be nested lists."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            if argument.is_cuda:
                return argument
        elif isinstance(argument, list):
            tensor = find_cuda_tensor(argument)
            if tensor is not None:
                return tensor
    return None


def delegate_cuda(*names: str) -> Callable[[type[_T]], type[_T]]:
    """Make a class delegate operations on CUDA tensors to the NCCL group of its `_nccl`, if any.

    Args:
        names: The names of the methods. "send" and "recv" have the peer as second argument.
    """

    def decorate(cls: type[_T]) -> type[_T]:
        if torch.version.cuda is not None:
            for name in names:
                method = getattr(cls, name)
                delegating = _delegate_to_nccl(name, method)
                for alias in {name, *(key for key, value in vars(cls).items() if value is method)}:
                    setattr(cls, alias, delegating)
        return cls

    return decorate


def _delegate_to_nccl(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        tensor = find_cuda_tensor(arguments)
        if tensor is not None and name == "recv_anysource":
            self._nccl.check_any_source(tensor.device)
        elif tensor is not None:
            peer = arguments[1] if name in ("send", "recv") else None
            group = self._nccl.group_for(tensor.device, peer)
            if group is not None:
                if self.link.compress or self.link.connections > 1:
                    warn_once(
                        "nccl link",
                        f"NCCL sends float32, by its own connections: {self.link} is for tensors "
                        "on the CPU, or on GPUs that ranks share",
                    )
                return _run_on_nccl(group, name, arguments, options)
        return method(self, *arguments, **options)

    return call


def _run_on_nccl(group: Any, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    single = name.removesuffix("_coalesced")
    if single == name or single not in FORMER_NAMES:
        return find_method(group, name)(*arguments, **options)
    # PyTorch's backends have these only in C++.
    outputs, inputs, *rest = arguments
    run = find_method(group, single)
    works = [run(*pair, *rest, **options) for pair in zip(outputs, inputs, strict=True)]
    return CompositeWork(works)
