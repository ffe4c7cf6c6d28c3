"""Optimizer state in the memory of the host, which outlives the ranks, and a journal of updates.

A rank that is killed during an optimizer step leaves its slices half updated. The others complete
the step in their own views of the memory. For this, each owner of slices updates them chunk by
chunk, saves the old values of a chunk before it updates them, and counts what it has done.

The count of an owner is one number in shared memory, which only the owner writes: in step `t`, from
0, with `n` chunks, it is `2 * n * t + 2 * k` if the first `k` chunks are updated and the next one
has its old values, and one more if the next one may be half updated, with its old values saved. The
number is stored at once, and the stores of a process that is killed are visible to others in their
order, so no fence is needed.
"""

from __future__ import annotations

import dataclasses
import os
import select
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.errors import CollectiveTimeout, UsageError
from phalanx.parallel.shared_data_parallel.layout import ALIGNMENT, ParameterFragment, round_up
from phalanx.parallel.shared_data_parallel.memory import HostMemory, RankTopology, shaped_like
from phalanx.parallel.shared_data_parallel.parameters import SharedParameters
from phalanx.system.polling import attempts
from phalanx.torch_versions import foreach_copy_

CHUNK_BYTES = 4 * 2**20
"""The size of a chunk of parameters in bytes; smaller ones are slower."""

_LATE_SECONDS = 30.0
"""The time that a rank has to complete an update which others have completed, in seconds."""
_SCALAR_BYTES = 16


class StateEntry(NamedTuple):
    """An entry of the optimizer state of a parameter.

    Attributes:
        dtype: The dtype of the tensor.
        is_scalar: Whether it is one value, and not one for each element of the parameter.
    """

    dtype: torch.dtype
    is_scalar: bool


StateSpec = Mapping[str, StateEntry]
"""The entries of the optimizer state of a parameter, by key."""


def describe_state(state: Mapping[str, Any], name: str) -> StateSpec:
    """Return the entries of an optimizer's state of a parameter.

    Args:
        state: The state.
        name: The name of the optimizer, for messages.

    Raises:
        UsageError: An entry is not a tensor.
    """
    for key, value in state.items():
        if value is not None and not isinstance(value, Tensor):
            raise UsageError(
                f"SharedDataParallel.optimizer: {name} keeps {key!r} as {type(value).__name__}, "
                "expected tensors, as elastic=True needs them"
            )
    return {
        key: StateEntry(value.dtype, value.dim() == 0)
        for key, value in sorted(state.items())
        if value is not None
    }


def split(fragments: Sequence[ParameterFragment], size: int) -> list[list[ParameterFragment]]:
    """Split fragments into chunks of about this size in bytes, a multiple of `ALIGNMENT`."""
    chunks: list[list[ParameterFragment]] = [[]]
    room = size
    for fragment in fragments:
        start = fragment.start
        while start < fragment.end:
            if room <= 0:
                chunks.append([])
                room = size
            end = min(fragment.end, start + room)
            chunks[-1].append(dataclasses.replace(fragment, start=start, end=end))
            room -= round_up(end - start, ALIGNMENT)
            start = end
    return chunks if chunks[0] else []


class Position(NamedTuple):
    """The point that the owner of slices has reached in a step.

    Attributes:
        chunk: The number of chunks that are updated.
        is_saved: Whether the next one may be half updated; its old values are in the journal.
    """

    chunk: int
    is_saved: bool


class OldValues(NamedTuple):
    """A fragment that its owner has not updated, with copies of its values before the update.

    Attributes:
        fragment: The fragment.
        parameters: Its elements.
        state: The state of the optimizer; empty if there is none.
    """

    fragment: ParameterFragment
    parameters: Tensor
    state: dict[str, Tensor]


class Journal:
    """The optimizer state of all ranks of a host, with the old values of what they update.

    All ranks of the host must construct it together, and block until all have.

    Args:
        shared: The parameters.
        chunks: The fragments in each chunk of each owner.
        specs: The entries of the state of each parameter that the optimizer has, by number.
    """

    def __init__(
        self,
        shared: SharedParameters,
        chunks: Sequence[Sequence[Sequence[ParameterFragment]]],
        specs: Mapping[int, StateSpec],
    ) -> None:
        self._shared, self._specs, self.chunks = shared, specs, chunks
        self._size = 0
        self._counts = [self._reserve(8) for _ in chunks]
        self._arrays = {
            (number, key): self._reserve(shared.trained[number].numel() * entry.dtype.itemsize)
            for number, spec in specs.items()
            for key, entry in spec.items()
            if not entry.is_scalar
        }
        # A flag, which says that there is a state, and the scalars.
        self._records = [
            [
                [self._reserve(_SCALAR_BYTES * (1 + len(specs[each.parameter]))) for each in chunk]
                for chunk in owner
            ]
            for owner in chunks
        ]
        self._saved = [
            self._reserve(max((sum(self._piece_sizes(chunk)) for chunk in owner), default=0))
            for owner in chunks
        ]
        self._memory = HostMemory(self._size, shared.topology)
        self._places: dict[int, list[tuple[tuple[int, int, int], ParameterFragment]]] = {
            number: [] for number in specs
        }
        for owner, each in enumerate(chunks):
            for chunk, fragments in enumerate(each):
                for index, fragment in enumerate(fragments):
                    self._places[fragment.parameter].append(((owner, chunk, index), fragment))
        self._own_pieces: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._completed: dict[tuple[int, int, int], dict[str, Tensor]] = {}
        self._kept: set[tuple[int, int]] = set()
        self._own = shared.topology.local_rank
        self._own_count = self._count(self._own) if self._own < len(chunks) else None
        self._steps = 0
        self._processes = _watch_processes(shared.topology)
        weakref.finalize(self, _close_all, self._processes)

    def _reserve(self, size: int) -> int:
        start = self._size
        self._size = round_up(start + size, ALIGNMENT)
        return start

    # ---- the state in memory ----

    def state(self, owner: int, chunk: int, index: int) -> dict[str, Tensor]:
        """Return views of the state of a fragment, which has one or not."""
        fragment = self.chunks[owner][chunk][index]
        record = self._records[owner][chunk][index]
        elements = self._shared.layout.elements(fragment)
        views = {}
        for place, (key, entry) in enumerate(self._specs[fragment.parameter].items(), start=1):
            size = entry.dtype.itemsize
            if entry.is_scalar:
                start = record + place * _SCALAR_BYTES
                views[key] = self._memory.shared(start, start + size, entry.dtype).view(())
            else:
                start = self._arrays[fragment.parameter, key]
                bounds = start + elements.start * size, start + elements.stop * size
                views[key] = self._memory.shared(*bounds, entry.dtype)
        return views

    def has_state(self, owner: int, chunk: int, index: int) -> Tensor:
        """Return a view of the flag of a fragment: 1 if it has a state."""
        start = self._records[owner][chunk][index]
        return self._memory.shared(start, start + 8, torch.int64)

    def keep(self, chunk: int, index: int, state: dict[str, Any]) -> dict[str, Any]:
        """Copy the new state of a fragment of this rank to the memory, and return it from there.

        Raises:
            UsageError: The optimizer has another state than at first.
        """
        views = self.state(self._own, chunk, index)
        given = {key: value for key, value in state.items() if value is not None}
        if given.keys() != views.keys():
            raise UsageError(
                f"SharedDataParallel: the optimizer's state has the entries {sorted(given)}, "
                f"expected {sorted(views)}: with elastic=True, options that change the entries "
                "must stay as they were at first"
            )
        for key, value in given.items():
            views[key].copy_(value)
        self.has_state(self._own, chunk, index).fill_(1)
        self._kept.add((chunk, index))
        return {**state, **views}

    def is_kept(self, chunk: int, index: int) -> bool:
        """Return whether the state of a fragment of this rank is in the memory."""
        return (chunk, index) in self._kept

    def drop(self, chunk: int, index: int) -> None:
        """Forget the state of a fragment of this rank."""
        self._kept.discard((chunk, index))
        self.has_state(self._own, chunk, index).fill_(0)

    # ---- the updates of this rank ----

    def save(self, chunk: int) -> None:
        """Save the old values of a chunk of this rank, before its update."""
        if chunk not in self._own_pieces:
            self._own_pieces[chunk] = self._pieces(self._own, chunk)
        current, saved = self._own_pieces[chunk]
        foreach_copy_(saved, current)
        self._set_count(2 * chunk + 1)

    def mark_updated(self, chunk: int) -> None:
        """Record that a chunk of this rank is updated."""
        self._set_count(2 * chunk + 2)

    def end_step(self) -> None:
        """Record the end of the step: the next one begins."""
        self._steps += 1

    def _set_count(self, done: int) -> None:
        if self._own_count is not None:
            count = 2 * len(self.chunks[self._own]) * self._steps + done
            self._own_count.fill_(count)

    def _count(self, owner: int) -> Tensor:
        start = self._counts[owner]
        return self._memory.shared(start, start + 8, torch.int64)

    def _piece_sizes(self, chunk: Sequence[ParameterFragment]) -> Iterator[int]:
        """Yield the sizes of the pieces of a chunk, with padding, as `_pieces` returns them."""
        for fragment in chunk:
            elements = self._shared.layout.elements(fragment)
            count = elements.stop - elements.start
            spec = self._specs[fragment.parameter]
            yield round_up(fragment.end - fragment.start, ALIGNMENT)
            for entry in spec.values():
                if not entry.is_scalar:
                    yield round_up(count * entry.dtype.itemsize, ALIGNMENT)
            yield round_up(_SCALAR_BYTES * (1 + len(spec)), ALIGNMENT)

    def _pieces(self, owner: int, chunk: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of all values of a chunk, and of the memory for their old values."""
        current: list[Tensor] = []
        layout = self._shared.layout
        for index, fragment in enumerate(self.chunks[owner][chunk]):
            bounds = fragment.start, fragment.end
            current.append(self._shared.memory.shared(*bounds, layout.dtypes[fragment.parameter]))
            state = self.state(owner, chunk, index).values()
            current += [each for each in state if each.dim()]
            record = self._records[owner][chunk][index]
            size = _SCALAR_BYTES * (1 + len(self._specs[fragment.parameter]))
            current.append(self._memory.shared(record, record + size, torch.uint8))
        saved, start = [], self._saved[owner]
        for each in current:
            saved.append(self._memory.shared(start, start + each.nbytes, each.dtype))
            start += round_up(each.nbytes, ALIGNMENT)
        return current, saved

    # ---- the completion of a step of others ----

    def position(self, owner: int) -> Position:
        """Return the point that an owner has reached in the current step of this rank."""
        chunks = len(self.chunks[owner])
        done = int(self._count(owner)) - 2 * chunks * self._steps
        done = min(max(done, 0), 2 * chunks)
        return Position(done // 2, bool(done % 2))

    def has_completed(self, owner: int) -> bool:
        """Return whether an owner has completed the current step of this rank."""
        return self.position(owner).chunk == len(self.chunks[owner])

    def is_begun(self) -> bool:
        """Return whether a rank has begun to update its slices in the current step of this rank."""
        return any(self.position(owner) != (0, False) for owner in range(len(self.chunks)))

    def find_lost(self, error: Exception) -> list[int] | None:
        """Return the owners that have gone before they completed the current step of this rank.

        Blocks until all others have completed it, and returns None if one is late.

        Args:
            error: The error that ended the wait for them.
        """
        wait = 0.0 if isinstance(error, CollectiveTimeout) else _LATE_SECONDS
        end, lost = time.monotonic() + wait, []
        for owner in range(len(self.chunks)):
            for _ in attempts(end):
                has_gone = self._has_gone(owner)  # looked at before what it has done
                if self.has_completed(owner):
                    break
                if has_gone:
                    lost.append(owner)
                    break
            else:
                return None
        return lost

    def _has_gone(self, owner: int) -> bool:
        process = self._processes[owner]
        if process < 0:  # it had gone at the start
            return True
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(0))

    def old_values(self, owner: int, chunk: int) -> Iterator[OldValues]:
        """Yield the fragments of a chunk that its owner, a lost rank, has not updated."""
        reached = self.position(owner)
        current, saved = self._pieces(owner, chunk)
        source = saved if reached == (chunk, True) else current
        values = iter([each.clone() for each in source])
        for fragment in self.chunks[owner][chunk]:
            parameters = next(values)
            spec = self._specs[fragment.parameter]
            state = {key: next(values) for key, entry in spec.items() if not entry.is_scalar}
            record = next(values)
            for place, (key, entry) in enumerate(spec.items(), start=1):
                if entry.is_scalar:
                    start = place * _SCALAR_BYTES
                    scalar = record[start : start + entry.dtype.itemsize]
                    state[key] = scalar.clone().view(entry.dtype).view(())
            has_state = bool(record[:8].clone().view(torch.int64))
            yield OldValues(fragment, parameters, state if has_state else {})

    def set_completed(self, owner: int, chunk: int, index: int, state: Mapping[str, Any]) -> None:
        """Keep the state of a fragment of a lost rank, whose update this rank has completed."""
        given = {key: value for key, value in state.items() if value is not None}
        self._completed[owner, chunk, index] = given

    def assemble(self, number: int) -> dict[str, Tensor]:
        """Return a copy of the state of a whole parameter; empty if it has none.

        The ranks must have completed their steps, or this rank theirs.
        """
        parameter, layout = self._shared.trained[number], self._shared.layout
        whole: dict[str, Tensor] = {}
        for place, fragment in self._places[number]:
            completed = self._completed.get(place)
            if completed is None and not int(self.has_state(*place)):
                continue
            state = self.state(*place) if completed is None else completed
            for key, value in state.items():
                if value.dim() == 0:
                    whole[key] = value.clone()
                    continue
                array = whole.setdefault(
                    key, torch.empty(parameter.numel(), dtype=value.dtype, device=value.device)
                )
                array[layout.elements(fragment)] = value
        return {
            key: shaped_like(value, parameter) if value.dim() else value
            for key, value in whole.items()
        }


def _watch_processes(topology: RankTopology) -> list[int]:
    """Return a descriptor of the process of each rank of the host; -1 if it has gone."""
    pids: list[Any] = [os.getpid()]
    if topology.host_group is not None:
        pids = [None] * topology.local_size
        dist.all_gather_object(pids, os.getpid(), group=topology.host_group)
    descriptors = []
    for pid in pids:
        try:
            descriptors.append(os.pidfd_open(pid))
        except ProcessLookupError:
            descriptors.append(-1)
    return descriptors


def _close_all(descriptors: Sequence[int]) -> None:
    for each in descriptors:
        if each >= 0:
            os.close(each)
