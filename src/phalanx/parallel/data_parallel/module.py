"""`DataParallel`: a module of which every rank computes the gradients of its own batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from phalanx.errors import CollectiveMismatch, UsageError
from phalanx.parallel.data_parallel import clipping, parameters
from phalanx.parallel.data_parallel.copies import PlainCopy
from phalanx.parallel.data_parallel.gradients import Gradients
from phalanx.parallel.data_parallel.layout import lay_out
from phalanx.parallel.data_parallel.linear import StraightLinear, accumulator, by_rows
from phalanx.parallel.data_parallel.optimizer import ShardedOptimizer
from phalanx.parallel.data_parallel.passes import Passes
from phalanx.parallel.data_parallel.places import find_places
from phalanx.parallel.sync_batch_norm import SyncBatchNorm

__all__ = ["CHUNK_BYTES", "DataParallel"]

#: What is reduced at once, in bytes.
CHUNK_BYTES = 4 * 2**20

# Layers whose backward is a collective.
_COLLECTIVE = (SyncBatchNorm, nn.SyncBatchNorm)


class DataParallel(nn.Module):
    """Data parallelism for ranks that share memory: what DDP does, with one copy for all of them.

    Every rank runs forward and backward on its own batch; after `backward()` each parameter's
    `grad` is the average over all ranks. It is used as `DistributedDataParallel` is, and differs
    in where things are. Parameters and averaged gradients are in memory that the ranks of a host
    share, once; gradients go there as backward makes them, and are averaged meanwhile, in rank
    order. An optimizer made by `optimizer` updates on each rank only a slice of all parameters,
    with that slice's state. The result is bitwise that of every rank updating all (ZeRO-1,
    Rajbhandari et al. 2020, without its all-gather).

    Each rank still sees parameters and gradients of its own: what it writes to them in place
    (clips, clamps, loads) it alone sees, as in DDP, at the price of the pages that it writes (copy
    on write). An ordinary optimizer works too, and then each rank has its own parameters.

    `copy.deepcopy` and what uses it, such as `torch.optim.swa_utils.AveragedModel`, make a plain
    module of the same names, with memory of its own; so does `torch.save` of it all. A process that
    is forked (a DataLoader's worker) sees the parameters change as long as training goes on: what
    has to stay as it is it copies first.

    Between hosts only the slices of gradients travel. On other backends than "phalanx", each rank
    counts as a host, and nothing is shared.

    Expected of users, as by DDP: all ranks have the same model, run the same number of backward
    passes, and forward goes through the wrapper: a backward pass of what `model.module` returned by
    itself only accumulates, on this rank. A gradient that is kept from one backward to the next is
    overwritten, as with `gradient_as_bucket_view=True`.

    Args:
        module: Its parameters are dense and on the CPU. Those that are trained are float16,
            bfloat16, float32, float64, complex64 or complex128; frozen ones may be of any dtype.
            They and its buffers take the values of the group's rank 0.
        group: The ranks; the default group if None.
        broadcast_buffers: Give all ranks the buffers of rank 0 (the running statistics of
            BatchNorm) before every forward pass in training mode.
        chunk_bytes: How much is averaged at once, above 0; a matrix of up to 32 MiB is one chunk.
            Each rank keeps one for gradients that are under way, or two where cores are to spare.
        collective_backward: The module's own backward communicates, as that of SyncBatchNorm does.
            Gradients then never wait for other ranks in the midst of it, so that ranks may leave
            out different parameters; they are reduced in a thread of their own, and those for which
            there is no room yet stay in `grad`. If None: whether the module has a SyncBatchNorm,
            PyTorch's or `phalanx.parallel`'s.

    Blocks until all ranks have made theirs.

    Raises:
        UsageError: No process group; nothing to train; a parameter that isn't dense or isn't on the
            CPU, or is trained in another dtype; different models on two ranks (on all of them,
            naming the first difference).
        PhalanxError: There is not so much memory.

    Example:
        >>> model = phalanx.parallel.DataParallel(model)
        >>> optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3, fused=True)
        >>> for inputs, targets in batches:
        ...     optimizer.zero_grad()
        ...     loss(model(inputs), targets).backward()
        ...     model.clip_grad_norm_(1.0)
        ...     optimizer.step()
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        broadcast_buffers: bool = True,
        chunk_bytes: int = CHUNK_BYTES,
        collective_backward: bool | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise UsageError(
                "DataParallel: no process group, expected one: call phalanx.init() or "
                "torch.distributed.init_process_group() first"
            )
        if chunk_bytes < 1:
            raise UsageError(f"DataParallel: chunk_bytes {chunk_bytes} given, expected above 0")
        parameters.check(module)
        super().__init__()
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = True
        self._places = find_places(group)
        parameters.check_same(module, self._places)
        every = list(module.parameters())
        self._trained = [parameter for parameter in every if parameter.requires_grad]
        self._layout = lay_out(self._trained, self._places.owners, chunk_bytes)
        self._memory = parameters.move(self._trained, self._layout, self._places)
        if frozen := [parameter for parameter in every if not parameter.requires_grad]:
            parameters.move(frozen, lay_out(frozen, 1, chunk_bytes), self._places)
        self._views = parameters.Views(every)
        if collective_backward is None:
            collective_backward = any(isinstance(part, _COLLECTIVE) for part in module.modules())
        self._gradients = Gradients(
            self._trained, self._layout, self._places, patient=collective_backward
        )
        self._passes = Passes()
        self._share_buffers()
        self._linear = StraightLinear(
            [(n, weight) for n, weight in enumerate(self._trained) if by_rows(weight)],
            self._gradients.put_off,
        )
        # Not what comes after accumulation alone: that isn't called where a gradient is put off.
        self._nodes = [accumulator(parameter) for parameter in self._trained]
        for number, node in enumerate(self._nodes):
            node.register_hook(self._taker(number))

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Run the module; in training, the next backward pass averages the gradients."""
        if torch.is_grad_enabled():
            if self._gradients.under_way:
                raise UsageError(
                    "DataParallel: the last backward pass was cut short by an exception, so ranks "
                    "are no longer in step: end the job, and start again from a snapshot"
                )
            self._views.restore()
            return self._forward(self.require_backward_grad_sync, *inputs, **keywords)
        return self.module(*inputs, **keywords)

    def _forward(self, synchronize: bool, *inputs: Any, **keywords: Any) -> Any:
        self._passes.begin(synchronize)
        if self.training and self.broadcast_buffers and synchronize:
            self._share_buffers()
        with self._linear if synchronize else contextlib.nullcontext():
            outputs = self.module(*inputs, **keywords)
        self._passes.follow(outputs, synchronize)
        return outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, forward and backward only accumulate gradients on each rank.

        The next backward pass whose forward is outside averages all that was accumulated.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def optimizer(
        self,
        kind: Callable[..., torch.optim.Optimizer],
        params: Iterable[Any] | None = None,
        *,
        elementwise: bool = False,
        **options: Any,
    ) -> ShardedOptimizer:
        """Make an optimizer whose work and state is divided among the ranks of the host.

        Args:
            kind: A class of `torch.optim`; SGD, Adam, AdamW and all others that treat each element
                by itself.
            params: Some of the parameters, or groups of them, as for any optimizer; all if None.
            elementwise: Say so of a class that isn't PyTorch's: what becomes of an element depends
                on its own gradients and state alone, never on a norm or the shape of a parameter.
            options: For the class: `lr` and the like. With `fused=True`, where the class has it, a
                step is fastest.

        Raises:
            UsageError: The class isn't known to treat each element by itself, or a parameter isn't
                one of this model that requires a gradient.
        """
        return ShardedOptimizer(self, kind, params, elementwise=elementwise, **options)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; returns what it was.

        Like `torch.nn.utils.clip_grad_norm_(model.parameters(), ...)`, which works too, but each
        rank scales its slices only. All ranks call it, after backward and before the step.

        Args:
            max_norm: Above 0.
            norm_type: 1, 2 or any other p, or infinity.

        Returns:
            The norm before, a scalar of float64, the same on all ranks.
        """
        return clipping.clip(self._layout, self._gradients, self._places, max_norm, norm_type)

    def register_comm_hook(self, *_: object) -> None:
        """Not here: DDP's communication hooks change how buckets travel, and there are none.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "DataParallel.register_comm_hook: gradients are combined in shared memory, there is no "
            "bucket to compress: use DistributedDataParallel for such hooks"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return PlainCopy, (self.module, self.training)

    def _taker(self, number: int) -> Callable[..., None]:
        def take(*_: object) -> None:
            if not self._gradients.under_way:
                if not self._passes.synchronizes():
                    self._gradients.settle(number)
                    return
                Variable._execution_engine.queue_callback(self._finish)
            try:
                self._gradients.take(number)
            except CollectiveMismatch as error:
                raise CollectiveMismatch(
                    f"{error} (DataParallel, averaging gradients: if the module's own backward "
                    "communicates, and ranks leave out parameters, give collective_backward=True)"
                ) from error

        return take

    def _finish(self) -> None:
        with torch.no_grad():
            self._gradients.finish()
        self._passes.averaged()

    @torch.no_grad()
    def _share_buffers(self) -> None:
        """Give all ranks the buffers of rank 0, one message for each dtype."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self.module.buffers():
            if buffer.numel():
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_dtype.values():
            packed = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.broadcast(packed, group=self._places.group, group_src=0)
            parts = torch.split(packed, [buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))
