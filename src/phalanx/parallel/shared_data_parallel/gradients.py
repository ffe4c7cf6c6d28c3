"""Collection of the gradients of a backward pass, and their averages, held once per host.

Gradients are written to the memory that the host shares as they are computed, bucket by bucket in
the order of the layout. A full bucket is reduced while the backward pass continues.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.errors import UsageError
from phalanx.parallel.shared_data_parallel.deferred_linear import Product
from phalanx.parallel.shared_data_parallel.layout import Layout
from phalanx.parallel.shared_data_parallel.memory import HostMemory, RankTopology, flat, shaped_like
from phalanx.parallel.shared_data_parallel.parameters import SharedParameters
from phalanx.parallel.shared_data_parallel.reducer import make_reducer

_NO_CHANGE = contextlib.nullcontext()


class _BucketRange(NamedTuple):
    """A range of a parameter's elements, with their bucket and their memory in it."""

    bucket: int
    elements: slice
    buffer: Tensor


class Gradients:
    """The gradients of a model's parameters.

    Args:
        shared: The parameters. The layout of their gradients is the same.
        nonblocking: Whether to wait for other ranks only in `finish`; until then, gradients for
            which there is no free buffer stay in `grad`.
    """

    def __init__(self, shared: SharedParameters, *, nonblocking: bool) -> None:
        layout, topology = shared.layout, shared.topology
        self.memory = HostMemory(layout.bytes, topology)
        """The memory of the averages."""
        self._parameters = shared.trained
        self._layout, self._topology = layout, topology
        self._reducer = make_reducer(layout, self.memory, topology, concurrent=nonblocking)
        self._nonblocking = nonblocking
        self._ranges = _ranges(layout, self._reducer.buffer)
        averages = [
            self.memory.replica(slot.start, slot.end, layout.dtypes[number])
            for number, slot in enumerate(layout.slots)
        ]
        self._averaged_flags = averages.pop()
        self._averages = [
            shaped_like(memory, parameter)
            for memory, parameter in zip(averages, shared.trained, strict=True)
        ]
        self._reset()

    def is_average(self, gradient: Tensor, number: int) -> bool:
        """Return whether a gradient is the tensor of a parameter's averages, even if modified."""
        return gradient.data_ptr() == self._averages[number].data_ptr()

    def _reset(self) -> None:
        self.in_progress = False
        self._ready = [False] * len(self._parameters)
        self._written = [False] * len(self._parameters)
        self._present = [False] * len(self._parameters)
        self._products: dict[int, list[Product]] = {}
        self._current_bucket = -1  # the bucket that is being written
        self._is_finishing = False
        self._writer = self._write_gradients()

    def defer(self, number: int, product: Product) -> None:
        """Defer a product that is part of a parameter's gradient until that is taken."""
        self._products.setdefault(number, []).append(product)

    def collect(self, number: int) -> None:
        """Take a parameter's gradient, which is complete on this rank, out of its `grad`.

        Raises:
            UsageError: The gradient was taken before in this backward pass, or is not dense.
        """
        if self._written[number]:
            shape = list(self._parameters[number].shape)
            raise UsageError(
                f"SharedDataParallel: the gradient of parameter {number} {shape} changed after it "
                "was averaged: checkpoint a module that is used several times with "
                "use_reentrant=False"
            )
        self.in_progress = True
        self._ready[number] = True
        # `create_graph` enables gradients here.
        with torch.no_grad() if torch.is_grad_enabled() else _NO_CHANGE:
            next(self._writer, None)

    def finish(self) -> None:
        """Reduce the remaining gradients, and set the parameters' `grad` to the averages.

        A gradient missing on this rank counts as zeros; one missing on all ranks stays None.
        """
        self._is_finishing = True
        self._ready = [True] * len(self._parameters)
        next(self._writer, None)
        self._launch_bucket()
        self._reducer.finish()
        self.memory.discard()
        flags = self._averaged_flags.tolist()
        for parameter, average, flag in zip(self._parameters, self._averages, flags, strict=True):
            if flag:
                parameter.grad = average
        self._reset()

    @torch.no_grad()
    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        """Clip the gradients by their norm, as documented in `SharedDataParallel.clip_grad_norm_`.

        Each rank handles its own slices.
        """
        if not max_norm > 0 or not norm_type > 0:
            raise UsageError(
                f"clip_grad_norm_: max_norm {max_norm} and norm_type {norm_type} given, expected "
                "numbers above 0"
            )
        layout, topology = self._layout, self._topology
        self._copy_assigned()
        topology.barrier()  # no rank reads what others are about to publish
        # Gradients that this rank has changed itself.
        self.memory.publish(layout.slices(topology.local_rank))
        own_slices = [
            self.memory.shared(fragment.start, fragment.end, layout.dtypes[fragment.parameter])
            for fragment in layout.owned_fragments(topology.local_rank)
            if self._parameters[fragment.parameter].grad is not None
        ]
        norm = _norm(own_slices, topology, norm_type)
        # As in torch.nn.utils.clip_grad_norm_: a norm of NaN makes all gradients NaN.
        scale = min(max_norm / (float(norm) + 1e-6), 1.0) if not norm.isnan() else math.nan
        if scale != 1.0:
            for part in own_slices:
                part.mul_(scale)
        topology.barrier()
        self.memory.discard()
        return norm

    def _copy_assigned(self) -> None:
        """Copy gradients that the user has assigned to `grad` into the memory of the averages."""
        for number, parameter in enumerate(self._parameters):
            if parameter.grad is not None and not self.is_average(parameter.grad, number):
                self._averages[number].copy_(parameter.grad)
                parameter.grad = self._averages[number]

    def _write_gradients(self) -> Iterator[None]:
        """Write gradients, in the layout's order, and then the presence flags.

        Yields when the next gradient is not computed yet, or there is no free buffer for it.
        """
        for number in self._layout.order[:-1]:
            ranges = self._ranges[number]
            while not self._ready[number] or (ranges and not self._open_bucket(ranges[0].bucket)):
                yield
            yield from self._write(number, self._take_gradient(number))
        flags = torch.tensor(self._present, dtype=self._averaged_flags.dtype, device="cpu")
        yield from self._write(self._layout.order[-1], flags)

    def _take_gradient(self, number: int) -> Tensor | Product | None:
        """Take a parameter's gradient out of its `grad`, or return its single deferred product."""
        self._written[number] = True
        parameter = self._parameters[number]
        is_whole = len(self._ranges[number]) == 1
        if is_whole and parameter.grad is None and len(self._products.get(number, ())) == 1:
            self._present[number] = True
            return self._products.pop(number)[0]
        self.add_deferred(number)
        gradient = parameter.grad
        if gradient is None:
            return None
        if gradient.layout != torch.strided:
            raise UsageError(
                f"SharedDataParallel: parameter {number} {list(parameter.shape)} has a gradient of "
                f"layout {gradient.layout}, expected a dense one: use sparse=False in nn.Embedding"
            )
        self._present[number] = True
        parameter.grad = None  # its memory is free for the next gradient
        return flat(gradient, parameter)

    def add_deferred(self, number: int) -> None:
        """Add a parameter's deferred products to its `grad`."""
        parameter = self._parameters[number]
        for product in self._products.pop(number, ()):
            if parameter.grad is None:
                parameter.grad = product.compute()
            else:
                parameter.grad.view(product.output.shape[1], -1).addmm_(
                    product.output.t(), product.input
                )

    def _write(self, number: int, elements: Tensor | Product | None) -> Iterator[None]:
        for bucket_range in self._ranges[number]:
            while not self._open_bucket(bucket_range.bucket):
                yield
            if elements is None:
                bucket_range.buffer.zero_()
            elif isinstance(elements, Product):
                elements.write(bucket_range.buffer)
            else:
                bucket_range.buffer.copy_(elements[bucket_range.elements])

    def _open_bucket(self, bucket: int) -> bool:
        """Return whether a bucket may be written; launch the one before it, which is complete."""
        if bucket != self._current_bucket:
            self._launch_bucket()
            if not self._reducer.acquire_buffer(
                bucket, wait=self._is_finishing or not self._nonblocking
            ):
                return False
            self._current_bucket = bucket
        return True

    def _launch_bucket(self) -> None:
        if self._current_bucket >= 0:
            self._reducer.launch(self._current_bucket)
            self._current_bucket = -1


def _ranges(layout: Layout, buffer: Callable[[int], Tensor]) -> list[list[_BucketRange]]:
    """Return the ranges of each parameter in the buckets."""
    ranges: list[list[_BucketRange]] = [[] for _ in layout.slots]
    for fragment in layout.fragments(layout.buckets):
        bucket, size = layout.buckets[fragment.region], layout.dtypes[fragment.parameter].itemsize
        first, last = (offset - bucket.start for offset in (fragment.start, fragment.end))
        part = buffer(fragment.region)[first // size : last // size]
        ranges[fragment.parameter].append(
            _BucketRange(fragment.region, layout.elements(fragment), part)
        )
    return ranges


def _norm(own_slices: list[Tensor], topology: RankTopology, norm_type: float) -> Tensor:
    norms = [
        torch.linalg.vector_norm(
            part, norm_type, dtype=torch.complex128 if part.is_complex() else torch.float64
        )
        for part in own_slices
    ]
    stacked = torch.stack([*norms, torch.zeros((), dtype=torch.float64, device="cpu")])
    is_max_norm = math.isinf(norm_type)
    total = stacked.max() if is_max_norm else stacked.pow(norm_type).sum()
    if topology.host_group is not None:
        op = dist.ReduceOp.MAX if is_max_norm else dist.ReduceOp.SUM
        dist.all_reduce(total, op=op, group=topology.host_group)
    return total if is_max_norm else total.pow(1.0 / norm_type)
