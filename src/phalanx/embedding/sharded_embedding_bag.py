"""`ShardedEmbeddingBag`: a `torch.nn.EmbeddingBag` whose table is on servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional

from phalanx.embedding.arguments import (
    MODES,
    check_order,
    checked_begins,
    checked_indices,
    checked_weights,
)
from phalanx.embedding.collective_update import Together
from phalanx.embedding.gradients import Batch, added_up
from phalanx.embedding.lookup import Future, Memory, Plan, Reference, Rows, begin
from phalanx.embedding.server import Server
from phalanx.embedding.sharding import split_of
from phalanx.errors import UsageError
from phalanx.rpc.current_agent import agent_or_none

__all__ = ["ShardedEmbeddingBag"]


class ShardedEmbeddingBag(nn.Module):
    """Bags of embeddings from a table whose rows are split over servers.

    `forward` fetches each row of a batch once and combines the rows as `torch.nn.EmbeddingBag`
    does. Rows of a server on this host are read from its memory, without a call. After `backward`,
    `step` sends the gradients of those rows to the servers, which update the rows. A synchronous
    step blocks until all trainers have made theirs. With a staleness bound, `step` returns at once,
    and the next `forward` waits until no trainer is too far behind. The module has no parameters,
    so DDP and optimizers ignore it.

    Args:
        num_embeddings: The number of rows of the whole table.
        embedding_dim: The number of elements of a row.
        servers: For each part, a `Server` of this process or a reference to one (`RRef`).
        mode: "sum", "mean" or "max".
        shards: "range" places consecutive rows on the same server; "hash" places row r on server
            r modulo the number of servers.
        trainer: This process's number among the servers' trainers; by default its rank in `group`,
            or 0.
        group: The trainers' process group, in the order of their numbers. If given, all trainers
            must construct this module together. Synchronous trainers on the servers' host then
            step without a call: the group exchanges the gradients, and each trainer updates its
            share of the rows in memory.
        include_last_offset: As for `torch.nn.EmbeddingBag`.
        shared: Whether to read from memory if possible.

    Raises:
        UsageError: An argument is invalid, or the servers' parts have a different size.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        servers: Sequence[Server | Reference],
        *,
        mode: str = "mean",
        shards: str = "range",
        trainer: int | None = None,
        group: ProcessGroup | None = None,
        include_last_offset: bool = False,
        shared: bool = True,
    ) -> None:
        super().__init__()
        if mode not in MODES:
            raise UsageError(f"mode={mode!r} given, expected one of {[*MODES]}")
        split = split_of(shards, num_embeddings, len(servers))
        self.num_embeddings, self.embedding_dim, self.mode = num_embeddings, embedding_dim, mode
        trainer = dist.get_rank(group) if trainer is None and group is not None else trainer or 0
        self.trainer = trainer
        self.include_last_offset = include_last_offset
        self.rows = Rows(split, servers, shared)
        if self.rows.width != embedding_dim:
            raise UsageError(
                f"table {self.rows.name!r}: its servers have rows of {self.rows.width} elements, "
                f"embedding_dim={embedding_dim} given"
            )
        self.staleness = self.rows.terms.staleness
        own = agent_or_none()
        self._together = None if group is None else Together.of(group, self.rows, trainer)
        for each in [
            begin(server, "enrol", trainer, None if own is None else own.id) for server in servers
        ]:
            each.wait()
        # Batches with gradients since the last step.
        self._used: dict[int, tuple[Plan, Tensor]] = {}
        self._given: list[tuple[Batch, Tensor]] = []
        self._updates: list[Future] = []
        self._next: tuple[Tensor, Plan, Callable[[], Tensor] | None] | None = None

    def prefetch(self, input: Tensor) -> None:
        """Prepare the next batch while the current one is in use.

        Determines the rows of the batch. With a `staleness` of 1 or more it also starts to fetch
        them; they may then lack the step in progress. Synchronous trainers cannot fetch rows before
        that step is made.

        Args:
            input: The indices that the next call to `forward` will get.

        Raises:
            UsageError: An index is out of range.
        """
        plan = self.rows.plan(input)
        fetch = self.rows.begin(plan) if self.staleness else None
        self._next = input.detach().clone(), plan, fetch  # the caller may reuse the tensor

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Combine the rows of each bag, like `torch.nn.EmbeddingBag.forward`.

        Blocks until the updates that it must see are made and the rows have arrived.

        Args:
            input: Indices: 1-D with `offsets`, or 2-D, one row for each bag, without.
            offsets: The position in `input` at which each bag begins.
            per_sample_weights: A factor for each index, with mode "sum"; may require a gradient.

        Returns:
            A tensor of shape (bags, embedding_dim).

        Raises:
            UsageError: An index or an offset is out of range, or an argument is invalid.
            PeerLost: A server has exited.
        """
        name = self.rows.name
        begins = checked_begins(name, input, offsets, self.include_last_offset)
        weights = checked_weights(name, input, self.mode, per_sample_weights, self.rows.dtype)
        if (memory := self._memory_for(weights)) is not None:
            batch = Batch(checked_indices(name, input), begins, self.mode, weights)
            self._settle()
            return self._pooled_from(memory, batch)
        check_order(name, begins, input.numel())
        plan, fetch = self._prepared(input)
        self._settle()
        rows = (fetch or self.rows.begin(plan))()
        if torch.is_grad_enabled():
            self._watch(plan, rows)
        if plan.count == 0:  # no bag has a row, but PyTorch rejects an empty table
            rows = torch.cat([rows, rows.new_zeros(1, self.embedding_dim)])
        return functional.embedding_bag(
            plan.inverse.view(-1), rows, begins, mode=self.mode, per_sample_weights=weights
        )

    def _memory_for(self, weights: Tensor | None) -> Memory | None:
        """Return the memory from which this batch can be combined directly, or None."""
        prepared, memory = self._next, self.rows.alone
        if memory is None or (prepared is not None and prepared[2] is not None):
            return None
        self._next = None
        # The gradients of a maximum and of weights need the rows themselves.
        needs_rows = self.mode == "max" or (weights is not None and weights.requires_grad)
        return None if needs_rows and torch.is_grad_enabled() else memory

    def _pooled_from(self, memory: Memory, batch: Batch) -> Tensor:
        if not torch.is_grad_enabled():
            return memory.pooled(batch)
        batch = batch.kept()
        pooled: Tensor = _Pooled.apply(_ANCHOR, self, memory, batch)  # type: ignore[no-untyped-call]
        return pooled

    def note(self, batch: Batch, outputs: Tensor) -> None:
        """Keep the gradients of a batch's bags for `step`."""
        # Copy, because the gradient may be a buffer that the next backward pass overwrites.
        kept = outputs.clone(memory_format=torch.contiguous_format)
        self._given.append((batch, kept))

    def _watch(self, plan: Plan, rows: Tensor) -> None:
        def note(rows: Tensor) -> None:
            assert rows.grad is not None  # it was just accumulated
            gradient, rows.grad = rows.grad, None
            before = self._used.get(id(plan))
            self._used[id(plan)] = plan, gradient if before is None else before[1] + gradient

        # If there is no backward pass, the hook is freed with the graph.
        rows.requires_grad_().register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def _prepared(self, indices: Tensor) -> tuple[Plan, Callable[[], Tensor] | None]:
        prepared, self._next = self._next, None
        if prepared is not None and torch.equal(prepared[0], indices):
            return prepared[1:]
        return self.rows.plan(indices), None

    def _settle(self) -> None:
        updates, self._updates = self._updates, []
        for update in updates:
            update.wait()

    def step(self) -> None:
        """Update the rows with the gradients of all batches since the last step.

        Every trainer must call it once for each step, even without a batch. A synchronous step
        blocks until all trainers have called it. With a staleness bound it returns at once, and
        the next `forward` or `wait` raises its errors.

        Raises:
            CollectiveTimeout: A trainer did not call it in time; the message names the trainer.
            PeerLost: A server or a trainer has exited.
            PhalanxError: With a group: a trainer could not update a row.
        """
        used, given, self._used, self._given = self._used, self._given, {}, []
        if self._together is not None and not used and len(given) == 1:
            self._together.step([given[0]])
            return
        made = [_of_bags(batch, outputs) for batch, outputs in given]
        plan, gradients = _together([*used.values(), *made], self.rows)
        self._settle()
        if self._together is not None:
            parts = zip(plan.local, plan.places, strict=True)
            self._together.step([(Batch(rows), gradients[place]) for rows, place in parts])
            return
        self._updates = self.rows.update(plan, gradients, self.trainer)
        if self.staleness is None:
            self._settle()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients accumulated since the last step."""
        super().zero_grad(set_to_none)
        self._used, self._given = {}, []

    def wait(self) -> None:
        """Block until all updates of this trainer are made, and raise their errors."""
        self._settle()

    def extra_repr(self) -> str:
        """Return the text that `repr` shows in parentheses."""
        servers = len(self.rows.servers)
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}, {servers} servers, "
            f"{sum(self.rows.in_memory)} in memory"
        )


_ANCHOR = torch.empty(0, requires_grad=True)
"""An input of the node below: autograd makes no node without an input that requires gradients."""


class _Pooled(torch.autograd.Function):
    """Pooling of rows directly in memory; backward keeps the gradients of the bags for `step`."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, bag: ShardedEmbeddingBag, memory: Memory, batch: Batch
    ) -> Tensor:
        ctx.bag, ctx.batch = bag, batch
        return memory.pooled(batch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outputs: Tensor) -> tuple[None, None, None, None]:
        ctx.bag.note(ctx.batch, outputs)
        return None, None, None, None


def _of_bags(batch: Batch, outputs: Tensor) -> tuple[Plan, Tensor]:
    rows, gradients = added_up([batch.at(outputs)], outputs.shape[1], outputs.dtype)
    return Plan(torch.empty(0), len(rows), [slice(0, len(rows))], [rows]), gradients


def _together(made: list[tuple[Plan, Tensor]], rows: Rows) -> tuple[Plan, Tensor]:
    """Merge the rows of several batches by server; the servers sum gradients of duplicate rows."""
    if len(made) == 1:
        return made[0]
    servers = range(len(rows.servers))
    places: list[Tensor | slice] = []
    local, gradients = [], []
    count = 0
    for server in servers:
        parts = [gradient[plan.places[server]] for plan, gradient in made]
        numbers = [plan.local[server] for plan, _ in made]
        gradients += parts
        local.append(torch.cat(numbers) if numbers else torch.empty(0, dtype=torch.int64))
        places.append(slice(count, count + len(local[-1])))
        count += len(local[-1])
    empty = torch.empty(0, rows.width, dtype=rows.dtype)
    return Plan(torch.empty(0), count, places, local), torch.cat([empty, *gradients])
