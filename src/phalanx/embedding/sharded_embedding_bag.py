"""`ShardedEmbeddingBag`: a module like `torch.nn.EmbeddingBag` with its table on servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional

from phalanx.embedding.batch import (
    MODES,
    Batch,
    check_offsets,
    prepare_indices,
    prepare_offsets,
    prepare_weights,
    sum_gradients,
)
from phalanx.embedding.replicated_server import ReplicatedServer
from phalanx.embedding.server import EmbeddingServer
from phalanx.embedding.sharded_table import (
    CollectiveUpdate,
    Future,
    LookupPlan,
    ServerReference,
    ShardedTable,
    start_call,
)
from phalanx.embedding.sharding import make_sharding
from phalanx.embedding.table import EmbeddingTable
from phalanx.errors import UsageError
from phalanx.rpc.agent import agent_or_none


class ShardedEmbeddingBag(nn.Module):
    """Bags of embeddings from a table whose rows are split over servers.

    `forward` fetches each row of a batch once and combines the rows as `torch.nn.EmbeddingBag`
    does. Rows of a server on this host are read from its memory, without a call. After `backward`,
    `step` sends the gradients of those rows to the servers, which update the rows. A synchronous
    step blocks until all trainers have made it. With a staleness bound, `step` returns at once,
    and the next `forward` waits until no trainer is too far behind. The module has no parameters,
    so DDP and optimizers ignore it.

    Args:
        num_embeddings: The number of rows of the whole table.
        embedding_dim: The number of elements of a row.
        servers: For each part, an `EmbeddingServer` of this process or a reference to one (`RRef`).
        mode: "sum", "mean" or "max".
        sharding: "range" places consecutive rows on the same server; "hash" places row r on server
            r modulo the number of servers.
        trainer: This process's number among the servers' trainers; by default its rank in `group`,
            or 0.
        group: The trainers' process group, in the order of their numbers. If given, all trainers
            must construct this module together. Synchronous trainers on the servers' host then
            step without a call: the group exchanges the gradients, and each trainer updates its
            share of the rows in memory.
        include_last_offset: As for `torch.nn.EmbeddingBag`.
        use_shared_memory: Whether to read from memory if possible.

    Raises:
        UsageError: An argument is invalid, or does not match the servers' parts.

    Example:
        >>> servers = embedding.deploy(["ps"], 1000, 8)
        >>> bag = ShardedEmbeddingBag(1000, 8, servers, mode="sum")
        >>> bag(torch.tensor([[1, 2, 3], [2, 5, 5]])).sum().backward()
        >>> bag.step()
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        servers: Sequence[EmbeddingServer | ServerReference | ReplicatedServer],
        *,
        mode: str = "mean",
        sharding: str = "range",
        trainer: int | None = None,
        group: ProcessGroup | None = None,
        include_last_offset: bool = False,
        use_shared_memory: bool = True,
    ) -> None:
        super().__init__()
        if mode not in MODES:
            raise UsageError(f"mode={mode!r} given, expected one of {[*MODES]}")
        layout = make_sharding(sharding, num_embeddings, len(servers))
        self.num_embeddings, self.embedding_dim, self.mode = num_embeddings, embedding_dim, mode
        trainer = dist.get_rank(group) if trainer is None and group is not None else trainer or 0
        self.trainer = trainer
        self.include_last_offset = include_last_offset
        self.table = ShardedTable(layout, servers, use_shared_memory)
        if self.table.width != embedding_dim:
            raise UsageError(
                f"table {self.table.name!r}: embedding_dim={embedding_dim} given, but its servers "
                f"have rows of {self.table.width} elements"
            )
        self.staleness = self.table.spec.staleness
        own = agent_or_none()
        self._collective_update = (
            None if group is None else CollectiveUpdate.create(group, self.table, trainer)
        )
        for each in [
            start_call(server, "register_trainer", trainer, None if own is None else own.id)
            for server in servers
        ]:
            each.wait()
        # Batches with gradients since the last step.
        self._row_gradients: dict[int, tuple[LookupPlan, Tensor]] = {}
        self._bag_gradients: list[tuple[Batch, Tensor]] = []
        self._updates: list[Future] = []
        self._prefetched: tuple[Tensor, LookupPlan, Callable[[], Tensor] | None] | None = None

    def prefetch(self, input: Tensor) -> None:
        """Prepare the next batch while the current one is in use.

        Determines the rows of the batch. With a `staleness` of 1 or more it also starts to fetch
        them; they may then lack the step in progress. Synchronous trainers cannot fetch rows before
        that step is complete.

        Args:
            input: The indices that the next call to `forward` will get.

        Raises:
            UsageError: An index is out of range.
        """
        plan = self.table.plan(input)
        fetch = self.table.start_fetch(plan) if self.staleness else None
        self._prefetched = input.detach().clone(), plan, fetch  # the caller may reuse the tensor

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Combine the rows of each bag, like `torch.nn.EmbeddingBag.forward`.

        Blocks until the updates that it must include are complete and the rows have arrived.

        Args:
            input: Indices: 1-D with `offsets`, or 2-D without, with one row for each bag.
            offsets: The position in `input` at which each bag begins.
            per_sample_weights: A factor for each index, with mode "sum"; may require a gradient.

        Returns:
            A tensor of shape (bags, embedding_dim).

        Raises:
            UsageError: An index or an offset is out of range, or an argument is invalid.
            PeerLost: A server has exited.
        """
        name = self.table.name
        bag_offsets = prepare_offsets(name, input, offsets, self.include_last_offset)
        weights = prepare_weights(name, input, self.mode, per_sample_weights, self.table.dtype)
        if (local_table := self._table_for_pooling(weights)) is not None:
            batch = Batch(prepare_indices(name, input), bag_offsets, self.mode, weights)
            self.wait()
            return self._pool(local_table, batch)
        check_offsets(name, bag_offsets, input.numel())
        plan, fetch = self._take_prefetched(input)
        self.wait()
        rows = (fetch or self.table.start_fetch(plan))()
        if torch.is_grad_enabled():
            self._collect_row_gradients(plan, rows)
        if plan.count == 0:  # all bags are empty, but PyTorch rejects an empty table
            rows = torch.cat([rows, rows.new_zeros(1, self.embedding_dim)])
        return functional.embedding_bag(
            plan.inverse.view(-1), rows, bag_offsets, mode=self.mode, per_sample_weights=weights
        )

    def _table_for_pooling(self, weights: Tensor | None) -> EmbeddingTable | None:
        """Return the table in memory if this batch can be pooled from it directly, else None."""
        prefetched, local_table = self._prefetched, self.table.only_local_table
        if local_table is None or (prefetched is not None and prefetched[2] is not None):
            return None
        self._prefetched = None
        # The gradients of a maximum and of weights need the rows themselves.
        needs_rows = self.mode == "max" or (weights is not None and weights.requires_grad)
        return None if needs_rows and torch.is_grad_enabled() else local_table

    def _pool(self, local_table: EmbeddingTable, batch: Batch) -> Tensor:
        if not torch.is_grad_enabled():
            return local_table.pool_batch(batch)
        batch = batch.clone()
        pooled: Tensor = _LocalPooling.apply(_ANCHOR, self, local_table, batch)  # type: ignore[no-untyped-call]
        return pooled

    def add_bag_gradients(self, batch: Batch, bag_gradients: Tensor) -> None:
        """Keep the gradients of a batch's bags for `step`."""
        # Copy, because the gradient may be a buffer that the next backward pass overwrites.
        kept = bag_gradients.clone(memory_format=torch.contiguous_format)
        self._bag_gradients.append((batch, kept))

    def _collect_row_gradients(self, plan: LookupPlan, rows: Tensor) -> None:
        def collect(rows: Tensor) -> None:
            assert rows.grad is not None  # it was just accumulated
            gradient, rows.grad = rows.grad, None
            before = self._row_gradients.get(id(plan))
            self._row_gradients[id(plan)] = (
                plan,
                gradient if before is None else before[1] + gradient,
            )

        # If there is no backward pass, the hook is freed with the graph.
        rows.requires_grad_().register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]

    def _take_prefetched(self, indices: Tensor) -> tuple[LookupPlan, Callable[[], Tensor] | None]:
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and torch.equal(prefetched[0], indices):
            return prefetched[1:]
        return self.table.plan(indices), None

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
        row_gradients, self._row_gradients = self._row_gradients, {}
        bag_gradients, self._bag_gradients = self._bag_gradients, []
        if self._collective_update is not None and not row_gradients and len(bag_gradients) == 1:
            self._collective_update.step([bag_gradients[0]])
            return
        plans_and_gradients = [_expand_bags(batch, gradients) for batch, gradients in bag_gradients]
        plan, gradients = _merge([*row_gradients.values(), *plans_and_gradients], self.table)
        self.wait()
        if self._collective_update is not None:
            parts = zip(plan.local_indices, plan.positions, strict=True)
            self._collective_update.step(
                [(Batch(rows), gradients[position]) for rows, position in parts]
            )
            return
        self._updates = self.table.update(plan, gradients, self.trainer)
        if self.staleness is None:
            self.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients accumulated since the last step."""
        super().zero_grad(set_to_none)
        self._row_gradients, self._bag_gradients = {}, []

    def wait(self) -> None:
        """Block until all updates of this trainer are complete, and raise their errors."""
        updates, self._updates = self._updates, []
        for update in updates:
            update.wait()

    def leave(self) -> None:
        """Be no trainer any more; the others go on without this one.

        Raises:
            UsageError: The number of trainers is fixed.
            PeerLost: A server has exited.
        """
        self.wait()
        for server in self.table.servers:
            start_call(server, "remove_trainer", self.trainer).wait()

    def extra_repr(self) -> str:
        """Return the text that `repr` shows in parentheses."""
        servers = len(self.table.servers)
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}, {servers} servers, "
            f"{sum(self.table.is_local)} in memory"
        )


_ANCHOR = torch.empty(0, requires_grad=True, dtype=torch.float32, device="cpu")
"""An input of the node below: autograd creates no node unless an input requires gradients."""


class _LocalPooling(torch.autograd.Function):
    """Pooling of rows directly in memory; backward keeps the gradients of the bags for `step`."""

    @staticmethod
    def forward(
        ctx: Any,
        _anchor: Tensor,
        bag: ShardedEmbeddingBag,
        table: EmbeddingTable,
        batch: Batch,
    ) -> Tensor:
        ctx.bag, ctx.batch = bag, batch
        return table.pool_batch(batch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, bag_gradients: Tensor) -> tuple[None, None, None, None]:
        ctx.bag.add_bag_gradients(ctx.batch, bag_gradients)
        return None, None, None, None


def _expand_bags(batch: Batch, bag_gradients: Tensor) -> tuple[LookupPlan, Tensor]:
    rows, gradients = sum_gradients(
        [batch.addresses(bag_gradients)], bag_gradients.shape[1], bag_gradients.dtype
    )
    return LookupPlan(
        torch.empty(0, dtype=torch.float32, device="cpu"), len(rows), [slice(0, len(rows))], [rows]
    ), gradients


def _merge(
    plans_and_gradients: list[tuple[LookupPlan, Tensor]], table: ShardedTable
) -> tuple[LookupPlan, Tensor]:
    """Merge the rows of several batches by server; the servers sum gradients of duplicate rows."""
    if len(plans_and_gradients) == 1:
        return plans_and_gradients[0]
    servers = range(len(table.servers))
    positions: list[Tensor | slice] = []
    local, gradients = [], []
    count = 0
    for server in servers:
        parts = [gradient[plan.positions[server]] for plan, gradient in plans_and_gradients]
        numbers = [plan.local_indices[server] for plan, _ in plans_and_gradients]
        gradients += parts
        local.append(
            torch.cat(numbers) if numbers else torch.empty(0, dtype=torch.int64, device="cpu")
        )
        positions.append(slice(count, count + len(local[-1])))
        count += len(local[-1])
    empty = torch.empty(0, table.width, dtype=table.dtype, device="cpu")
    return LookupPlan(
        torch.empty(0, dtype=torch.float32, device="cpu"), count, positions, local
    ), torch.cat([empty, *gradients])
