"""Collection of the gradients of a backward pass, and their averages, held once per host.

Gradients are written to the memory that the host shares as they are computed, chunk by chunk in the
order of the layout. A full chunk is reduced while the backward pass continues.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from phalanx.errors import UsageError
from phalanx.parallel.shared_data_parallel.deferred_linear import Product
from phalanx.parallel.shared_data_parallel.layout import Layout
from phalanx.parallel.shared_data_parallel.memory import HostMemory
from phalanx.parallel.shared_data_parallel.reducer import reducer
from phalanx.parallel.shared_data_parallel.slice_owners import Places
from phalanx.parallel.shared_data_parallel.views import flat, shaped_like

__all__ = ["Gradients"]

_AS_IT_IS = contextlib.nullcontext()


class _Cut(NamedTuple):
    """Elements `start` to `end` of a parameter, with their chunk and their memory in it."""

    chunk: int
    start: int
    end: int
    room: Tensor


class Gradients:
    """The gradients of a model's parameters.

    Args:
        parameters: The parameters, with the same dtypes, shapes and strides on all ranks.
        layout: The layout of the parameters, which is also that of their gradients.
        places: The ranks and hosts.
        patient: Whether to wait for other ranks only in `finish`; until then, gradients for which
            there is no room stay in `grad`.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], layout: Layout, places: Places, *, patient: bool
    ) -> None:
        self.memory = HostMemory(layout.bytes, places)
        self._parameters = parameters
        self._layout = layout
        self._reducer = reducer(layout, self.memory, places, beside=patient)
        self._patient = patient
        self._cuts = _cuts(layout, self._reducer.room)
        averages = [
            self.memory.own(spot.start, spot.end, layout.dtypes[number])
            for number, spot in enumerate(layout.spots)
        ]
        self._averaged_marks = averages.pop()
        self._averages = [
            shaped_like(memory, parameter)
            for memory, parameter in zip(averages, parameters, strict=True)
        ]
        self._begin()

    def has(self, number: int) -> bool:
        """Return whether a parameter has a gradient."""
        return self._parameters[number].grad is not None

    def adopt(self) -> None:
        """Copy gradients that the user has assigned to `grad` into the memory of the averages."""
        for number, parameter in enumerate(self._parameters):
            if parameter.grad is not None and not self.is_average(parameter.grad, number):
                self._averages[number].copy_(parameter.grad)
                parameter.grad = self._averages[number]

    def is_average(self, gradient: Tensor, number: int) -> bool:
        """Return whether a gradient is the tensor of a parameter's averages, even if modified."""
        return gradient.data_ptr() == self._averages[number].data_ptr()

    def average(self, start: int, end: int, number: int) -> Tensor:
        """Return this rank's replica of a parameter's averages at bytes `start` to `end`."""
        return self.memory.own(start, end, self._layout.dtypes[number])

    def _begin(self) -> None:
        self.under_way = False
        self._ready = [False] * len(self._parameters)
        self._written = [False] * len(self._parameters)
        self._present = [False] * len(self._parameters)
        self._products: dict[int, list[Product]] = {}
        self._open = -1  # the chunk that is being written
        self._ending = False
        self._writing = self._writes()

    def put_off(self, number: int, product: Product) -> None:
        """Defer a product that is part of a parameter's gradient until that is taken."""
        self._products.setdefault(number, []).append(product)

    def take(self, number: int) -> None:
        """Take a parameter's gradient, which is complete on this rank, out of its `grad`.

        Raises:
            UsageError: The gradient was taken before in this backward pass, or is not dense.
        """
        if self._written[number]:
            shape = list(self._parameters[number].shape)
            raise UsageError(
                f"SharedDataParallel: another part of the gradient of parameter {number} {shape} came "
                "when it had been averaged: checkpoint a module that is used several times with "
                "use_reentrant=False"
            )
        self.under_way = True
        self._ready[number] = True
        with torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS:  # `create_graph` enables it
            next(self._writing, None)

    def finish(self) -> None:
        """Reduce the remaining gradients, and set the parameters' `grad` to the averages.

        A gradient missing on this rank counts as zeros; one missing on all ranks stays None.
        """
        self._ending = True
        self._ready = [True] * len(self._parameters)
        next(self._writing, None)
        self._launch_open()
        self._reducer.finish()
        self.memory.drop()
        marks = self._averaged_marks.tolist()
        for parameter, average, mark in zip(self._parameters, self._averages, marks, strict=True):
            if mark:
                parameter.grad = average
        self._begin()

    def _writes(self) -> Iterator[None]:
        """Write gradients, in the layout's order, and then the marks.

        Yields when the next gradient is not computed yet, or there is no room for it.
        """
        for number in self._layout.order[:-1]:
            cuts = self._cuts[number]
            while not self._ready[number] or (cuts and not self._enter(cuts[0].chunk)):
                yield
            yield from self._put(number, self._taken(number))
        marks = torch.tensor(self._present, dtype=self._averaged_marks.dtype)
        yield from self._put(self._layout.order[-1], marks)

    def _taken(self, number: int) -> Tensor | Product | None:
        """Take a parameter's gradient out of its `grad`, or return its single deferred product."""
        self._written[number] = True
        parameter = self._parameters[number]
        whole = len(self._cuts[number]) == 1
        if whole and parameter.grad is None and len(self._products.get(number, ())) == 1:
            self._present[number] = True
            return self._products.pop(number)[0]
        self.settle(number)
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

    def settle(self, number: int) -> None:
        """Add a parameter's deferred products to its `grad`."""
        parameter = self._parameters[number]
        for product in self._products.pop(number, ()):
            if parameter.grad is None:
                parameter.grad = product.make()
            else:
                parameter.grad.view(product.output.shape[1], -1).addmm_(
                    product.output.t(), product.input
                )

    def _put(self, number: int, elements: Tensor | Product | None) -> Iterator[None]:
        for cut in self._cuts[number]:
            while not self._enter(cut.chunk):
                yield
            if elements is None:
                cut.room.zero_()
            elif isinstance(elements, Product):
                elements.write(cut.room)
            else:
                cut.room.copy_(elements[cut.start : cut.end])

    def _enter(self, chunk: int) -> bool:
        """Return whether a chunk may be written; launch the one before it, which is complete."""
        if chunk != self._open:
            self._launch_open()
            if not self._reducer.has_room(chunk, wait=self._ending or not self._patient):
                return False
            self._open = chunk
        return True

    def _launch_open(self) -> None:
        if self._open >= 0:
            self._reducer.launch(self._open)
            self._open = -1


def _cuts(layout: Layout, room: Callable[[int], Tensor]) -> list[list[_Cut]]:
    """Return the cuts of each parameter by chunks."""
    cuts: list[list[_Cut]] = [[] for _ in layout.spots]
    chunk = 0
    for number in layout.order:
        spot, size = layout.spots[number], layout.dtypes[number].itemsize
        while chunk + 1 < len(layout.chunks) and layout.chunks[chunk].end <= spot.start:
            chunk += 1
        for at in range(chunk, len(layout.chunks)):
            start, end = layout.chunks[at].start, layout.chunks[at].end
            first, last = max(start, spot.start), min(end, spot.end)
            if first >= last:
                break
            part = room(at)[(first - start) // size : (last - start) // size]
            place = (first - spot.start) // size, (last - spot.start) // size
            cuts[number].append(_Cut(at, *place, part))
    return cuts
