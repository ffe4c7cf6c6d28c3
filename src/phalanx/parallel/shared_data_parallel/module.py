"""`SharedDataParallel`: a module whose gradients are averaged over the batches of all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.errors import CollectiveMismatch, UsageError
from phalanx.parallel.gradients import run_packed
from phalanx.parallel.shared_data_parallel.deferred_linear import (
    DeferredLinearGrad,
    accumulation_node,
    is_row_major_matrix,
)
from phalanx.parallel.shared_data_parallel.gradients import Gradients
from phalanx.parallel.shared_data_parallel.optimizer import ShardedOptimizer
from phalanx.parallel.shared_data_parallel.parameters import (
    SharedParameters,
    check_supported,
    share_parameters,
)
from phalanx.parallel.sync_batch_norm import SyncBatchNorm
from phalanx.torch_versions import call_after_backward

#: The default size of a bucket, which is reduced at once, in bytes.
BUCKET_BYTES = 4 * 2**20

# Layers whose backward is a collective.
_COLLECTIVE = (SyncBatchNorm, nn.SyncBatchNorm)


class SharedDataParallel(nn.Module):
    """Data parallelism like DDP for ranks that share memory, with one copy of the model per host.

    Every rank runs forward and backward on its own batch; after `backward()` each parameter's
    `grad` is the average over all ranks. The usage is that of `DistributedDataParallel`; the
    difference is in memory. The ranks of a host share one copy of the parameters and of the
    averaged gradients. Gradients are written there while backward computes them, and are averaged
    meanwhile, in rank order. An optimizer made by `optimizer` updates on each rank only a slice of
    all parameters, with that slice's state. The result is bitwise the same as if every rank updated
    all parameters (ZeRO-1, Rajbhandari et al. 2020, without its all-gather).

    Each rank still has its own view of parameters and gradients, as in DDP: only the rank itself
    sees what it writes to them in place (clipping, clamping, loading). Each page that it writes
    costs it a copy (copy on write). An ordinary optimizer works too; each rank then has its own
    parameters.

    `copy.deepcopy` and its callers, such as `torch.optim.swa_utils.AveragedModel`, make a plain
    module with the same names and its own memory; so does `torch.save` of the whole module. A
    forked process (a DataLoader's worker) sees the parameters change as training continues, and
    must copy those that are to stay as they are.

    Between hosts, only the slices of gradients are sent. On backends other than "phalanx", each
    rank counts as a host, and nothing is shared.

    The requirements are those of DDP: all ranks have the same model and run the same number of
    backward passes, and forward goes through the wrapper. A backward pass from an output of
    `model.module` itself only accumulates gradients, on this rank. Averaged gradients are in the
    same memory at every step: the next backward pass overwrites them, as with DDP's
    `gradient_as_bucket_view=True`. Clone gradients that are needed later.

    Args:
        module: A module whose parameters are dense and on the CPU. Parameters that are trained must
            be float16, bfloat16, float32, float64, complex64 or complex128; frozen parameters may
            have any dtype. Parameters and buffers take the values of the group's rank 0.
        group: The group of ranks; the default group if None.
        broadcast_buffers: Whether to broadcast the buffers of rank 0 (such as the running
            statistics of BatchNorm) before every forward pass in training mode.
        bucket_bytes: The size of the gradients that are averaged at once, in bytes, above 0. A
            matrix of up to 32 MiB is never split. Each rank keeps one bucket for gradients in
            progress, or two if cores are idle.
        collective_backward: Whether the module's own backward communicates, like that of
            SyncBatchNorm. If true, gradients never wait for other ranks during backward, so ranks
            may leave out different parameters. A separate thread then reduces the gradients, and
            those for which there is no free buffer yet stay in `grad`. None: whether the module has
            a SyncBatchNorm, PyTorch's or `phalanx.parallel`'s.
        elastic: True for a training that continues when ranks are lost, by
            `phalanx.train.Elastic` or `Trainer(elastic=True)`, on the default group. The model is
            shared when the training begins, and shared anew after each change of the ranks. The
            optimizer that `optimizer` makes keeps its state in memory that outlives the ranks. If a
            rank is lost during a step of it, the others complete that step. This costs a copy of
            the old values of what the step updates.

    Blocks until all ranks have constructed theirs, unless `elastic` is true.

    Raises:
        UsageError: There is no process group, there is nothing to train, a parameter is not dense,
            not on the CPU or trained in another dtype, or the models of two ranks differ (raised on
            all ranks, with the first difference).
        PhalanxError: There is not enough memory.

    Example:
        >>> model = phalanx.parallel.SharedDataParallel(model)
        >>> optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3, fused=True)
        >>> for inputs, targets in batches:
        ...     optimizer.zero_grad()
        ...     loss(model(inputs), targets).backward()
        ...     norm = model.clip_grad_norm_(1.0)
        ...     optimizer.step()
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        broadcast_buffers: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        collective_backward: bool | None = None,
        elastic: bool = False,
    ) -> None:
        if not dist.is_initialized():
            raise UsageError(
                "SharedDataParallel: no process group, expected one: call phalanx.init() or "
                "torch.distributed.init_process_group() first"
            )
        if bucket_bytes < 1:
            raise UsageError(
                f"SharedDataParallel: bucket_bytes {bucket_bytes} given, expected above 0"
            )
        if elastic and group is not None:
            raise UsageError(
                "SharedDataParallel: elastic=True with a group given, expected the default group"
            )
        super().__init__()
        check_supported(module)
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = True
        if collective_backward is None:
            collective_backward = any(isinstance(part, _COLLECTIVE) for part in module.modules())
        self.elastic = elastic
        """True if the model is for a training that continues when ranks are lost."""
        self._trained = [each for each in module.parameters() if each.requires_grad]
        self._optimizers: list[ShardedOptimizer] = []
        self._arguments = group, bucket_bytes, collective_backward
        self._shared: SharedParameters | None = None
        # Hooks on the accumulation nodes: post-accumulate-grad hooks are not called if a gradient
        # is deferred.
        self._accumulation_nodes = [accumulation_node(each) for each in self._trained]
        for number, node in enumerate(self._accumulation_nodes):
            node.register_hook(self._make_gradient_hook(number))
        if not elastic:
            self.form()

    def form(self) -> None:
        """Share the model, and the work of its optimizers, among the ranks of the group.

        Collective. An elastic loop calls it at the start and after each change of the ranks.
        Parameters and buffers take the values of the group's rank 0. Nothing happens if the model
        is shared already.
        """
        if self._shared is not None:
            return
        group, bucket_bytes, collective_backward = self._arguments
        self._shared = shared = share_parameters(self.module, group, bucket_bytes)
        self._gradients = Gradients(shared, nonblocking=collective_backward)
        self._backward_tracker = BackwardTracker()
        self._broadcast_buffers()
        self._deferred_linear = DeferredLinearGrad(
            [(n, weight) for n, weight in enumerate(shared.trained) if is_row_major_matrix(weight)],
            self._gradients.defer,
        )
        for optimizer in self._optimizers:
            optimizer.attach(shared, self._gradients)
        if self.elastic:
            gc.collect()  # the memory that was shared before, which is part of cycles

    def release(self) -> bool:
        """Take the state of the training out of the memory of the host, after a loss of ranks.

        An elastic loop calls it before `form`. In between, `state_dict` of the model and of its
        optimizers return the state, and `load_state_dict` replaces it, on this rank alone.

        Returns:
            False if this rank has no whole state: a step of an optimizer was begun that only lost
            ranks could have completed.
        """
        if self._shared is None:
            return True
        is_whole = [optimizer.release() for optimizer in self._optimizers]
        for parameter in self._trained:
            parameter.grad = None
        self._shared = None
        return all(is_whole)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Run the module; in training, the next backward pass averages the gradients."""
        if not torch.is_grad_enabled():
            return self.module(*inputs, **keywords)
        if self._shared is None:
            raise UsageError(
                "SharedDataParallel(elastic=True): the forward pass came before the training, "
                "expected one in the loop of Elastic or Trainer"
            )
        if self._gradients.in_progress:
            raise UsageError(
                "SharedDataParallel: an exception interrupted the last backward pass, so the "
                "ranks are no longer synchronized: end the job, and restart from a checkpoint"
            )
        self._shared.restore_views()
        synchronize = self.require_backward_grad_sync
        self._backward_tracker.begin(synchronize)
        if self.training and self.broadcast_buffers and synchronize:
            self._broadcast_buffers()
        with self._deferred_linear if synchronize else contextlib.nullcontext():
            outputs = self.module(*inputs, **keywords)
        self._backward_tracker.register_hooks(outputs, synchronize)
        return outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank without averaging them within the context.

        The next backward pass whose forward pass is outside averages the accumulated gradients.

        Example:
            >>> with model.no_sync():
            ...     F.cross_entropy(model(inputs), targets).backward()
            >>> F.cross_entropy(model(inputs), targets).backward()  # averages the sum of both
        """
        previous, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = previous

    def optimizer(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params: Iterable[Any] | None = None,
        *,
        elementwise: bool = False,
        **options: Any,
    ) -> ShardedOptimizer:
        """Make an optimizer whose work and state are divided among the ranks of the host.

        Args:
            optimizer_class: A class of `torch.optim` that updates each element independently, such
                as SGD, Adam or AdamW.
            params: Some of the parameters, or parameter groups, as for any optimizer; all
                parameters if None.
            elementwise: Whether a class that is not PyTorch's updates each element from its own
                gradient and state alone, never from a norm or the shape of a parameter.
            options: Arguments for the class, such as `lr`. A step is fastest with `fused=True`, if
                the class supports it.

        Raises:
            UsageError: The class is not known to update each element independently, or a parameter
                is not part of this model or does not require a gradient.

        Example:
            >>> groups = [{"params": model.parameters(), "weight_decay": 0.01}]
            >>> optimizer = model.optimizer(torch.optim.AdamW, groups, lr=1e-3, fused=True)
        """
        optimizer = ShardedOptimizer(
            self._trained,
            optimizer_class,
            params,
            elementwise=elementwise,
            elastic=self.elastic,
            **options,
        )
        if self._shared is not None:
            optimizer.attach(self._shared, self._gradients)
        if self.elastic:
            self._optimizers.append(optimizer)
        return optimizer

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return the norm before.

        This is like `torch.nn.utils.clip_grad_norm_(model.parameters(), ...)`, which works too, but
        each rank scales only its slices. All ranks must call it, after backward and before the
        step.

        Args:
            max_norm: The maximum norm, above 0.
            norm_type: The p of the p-norm, above 0, or infinity.

        Returns:
            The norm before scaling, a float64 scalar, the same on all ranks.

        Example:
            >>> loss.backward()
            >>> norm = model.clip_grad_norm_(1.0)
            >>> optimizer.step()
        """
        return self._gradients.clip(max_norm, norm_type)

    def register_comm_hook(self, *_: object) -> None:
        """Reject DDP's communication hooks, which change how buckets are sent: none are sent here.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "SharedDataParallel.register_comm_hook: gradients are reduced in shared memory, "
            "where there is nothing to compress: use DistributedDataParallel for such hooks"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return PlainCopy, (self.module, self.training)

    def _make_gradient_hook(self, number: int) -> Callable[..., None]:
        def collect_gradient(*_: object) -> None:
            if not self._gradients.in_progress:
                if not self._backward_tracker.synchronizes():
                    self._gradients.add_deferred(number)
                    return
                call_after_backward(self._finish)
            try:
                self._gradients.collect(number)
            except CollectiveMismatch as error:
                raise error.replace(
                    f"{error} (SharedDataParallel, averaging gradients: if the module's own "
                    "backward communicates, and ranks leave out parameters, give "
                    "collective_backward=True)"
                ) from error

        return collect_gradient

    def _finish(self) -> None:
        with torch.no_grad():
            self._gradients.finish()
        self._backward_tracker.mark_averaged()

    @torch.no_grad()
    def _broadcast_buffers(self) -> None:
        """Broadcast the buffers of rank 0, in one message for each dtype."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self.module.buffers():
            if buffer.numel():
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_dtype.values():
            run_packed(dist.broadcast, buffers, group=self._arguments[0], group_src=0)


class PlainCopy(nn.Module):
    """A plain module that replaces a `SharedDataParallel`, with the same names and its own memory.

    `copy.deepcopy`, `torch.optim.swa_utils.AveragedModel` and `torch.save` of the whole module make
    it; any rank may do so alone. It has plain parameters, and its backward pass does not average
    gradients. It serves as an average of weights, a teacher or a model to evaluate. To train it,
    wrap its `module`.
    """

    def __init__(self, module: nn.Module, training: bool) -> None:
        super().__init__()
        self.module = module
        self.training = training

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Run the module."""
        return self.module(*inputs, **keywords)


class BackwardTracker:
    """A tracker of the wrapper's forward passes, which decides if a backward pass averages.

    Hooks on the graph of a forward pass's outputs identify its backward pass, whatever runs in
    between. A backward pass through no known output (of a loss that the module has stored, or
    returned in a class of its own) counts as that of the last forward pass, once. DDP treats all
    backward passes like this.
    """

    def __init__(self) -> None:
        self._expected = False
        # Set by the outputs through which the current backward pass went.
        self._current: bool | None = None
        self._hooks = {synchronize: self._make_hook(synchronize) for synchronize in (False, True)}

    def begin(self, synchronize: bool) -> None:
        """Record the start of a forward pass whose backward pass averages if `synchronize`."""
        self._expected = synchronize
        self._current = None  # left by a backward pass that an exception interrupted

    def register_hooks(self, outputs: object, synchronize: bool) -> None:
        """Register hooks on the outputs of the forward pass."""
        if torch.compiler.is_compiling():
            return
        for tensor in _tensors(outputs):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._hooks[synchronize])

    def synchronizes(self) -> bool:
        """Return whether the current backward pass averages."""
        return self._expected if self._current is None else self._current

    def mark_averaged(self) -> None:
        """Record that a backward pass has averaged."""
        self._expected = False

    def _make_hook(self, synchronize: bool) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if self._current is None:
                call_after_backward(self._reset)
            self._current = synchronize or bool(self._current)

        return hook

    def _reset(self) -> None:
        self._current = None


def _tensors(outputs: object) -> Iterator[Tensor]:
    """Yield the tensors in the outputs of a module."""
    parts: Any = ()
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        parts = outputs.values()
    elif isinstance(outputs, (tuple, list)):
        parts = outputs
    elif dataclasses.is_dataclass(outputs):
        parts = (getattr(outputs, field.name) for field in dataclasses.fields(outputs))
    for part in parts:
        yield from _tensors(part)
