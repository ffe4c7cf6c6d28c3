"""A training loop that resumes exactly, exits on SIGTERM and names the rank that caused a NaN."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from phalanx.checkpoints import Checkpointer
from phalanx.errors import UsageError
from phalanx.parallel import LocalSGD, SharedDataParallel
from phalanx.train.batch_schedule import BatchSchedule, MicroBatch
from phalanx.train.evaluation import Evaluation, Loss, move_to_device, unpack_loss
from phalanx.train.preemption import PREEMPTION_EXIT_CODE, PreemptionHandler
from phalanx.train.progress import Display, check_tensorboard, open_tensorboard
from phalanx.train.random_generators import seed_rank
from phalanx.train.recovery import (
    NEWCOMER,
    NewcomersWait,
    Recovery,
    check_model,
    has_begun,
    progress_at_start,
    share_furthest,
)
from phalanx.train.replicas import Replicas
from phalanx.train.state import TrainingState
from phalanx.train.step import FiniteCheck, Stepper, StepSync, Totals

# A scale below this means 30 skipped steps in a row, counted from PyTorch's initial scale. The
# scale is then not the reason for values that are not finite. fairseq stops at the same scale.
_MIN_SCALE = 1e-4
# A function that returns the micro-batches of the next step, or None if they are not available.
_Fetch = Callable[[], list[MicroBatch] | None]


@dataclass
class Result:
    """The result of `Trainer.fit`, the same on every rank.

    Printed in one line, with four digits of each number and the number of `losses`.

    Attributes:
        step: Number of steps of this run and of the runs that it resumed, including those that
            float16 skipped.
        epoch: Number of completed epochs.
        loss: The mean loss over the samples of the last step; NaN before the first step.
        evaluation: The means over the samples of `evaluate` in the last evaluation: "loss" and the
            metrics; empty if there was no evaluation.
        losses: The loss of each step of this call of `fit`; infinite or NaN for some steps that
            float16 skipped.

    Example:
        >>> result = trainer.fit()
        >>> print(result)
        Result(step=3, epoch=1, loss=..., evaluation={...}, losses=[3 values])
        >>> mean_loss = sum(result.losses) / len(result.losses)
    """

    step: int = 0
    epoch: int = 0
    loss: float = float("nan")
    evaluation: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)

    def __repr__(self) -> str:
        evaluation = ", ".join(f"{name!r}: {value:.4g}" for name, value in self.evaluation.items())
        count = len(self.losses)
        return (
            f"Result(step={self.step}, epoch={self.epoch}, loss={self.loss:.4g}, "
            f"evaluation={{{evaluation}}}, losses=[{count} value{'s' * (count != 1)}])"
        )


class Trainer:
    """A synchronous training loop on all ranks that resumes from the latest checkpoint.

    The same script runs in one process and on many ranks. The model is a plain module, whose
    parameters are broadcast from rank 0 and whose gradients the trainer averages. It may also be
    wrapped in PyTorch's `DistributedDataParallel` or `phalanx.parallel.SharedDataParallel`, which
    average the gradients themselves. The samples of a step, and the loss and gradient as means over
    them, are the same at every world size.

    Args:
        model: The model, on its device. Batches are moved to that device.
        optimizer: The optimizer of the model's parameters. If it is a `phalanx.parallel.LocalSGD`
            or `DiLoCo`, the ranks of different hosts make steps independently of each other: each
            host has its part of the global batch, and `loss` and metrics are its own. SIGTERM then
            ends the training at the next exchange, and before each evaluation and checkpoint all
            parameters are exchanged. A checkpoint has rank 0's state of the inner optimizer.
        data: The data set to train on. It must have a length.
        loss: A function of the model and a batch. It returns the mean loss over the batch, a tensor
            of one element; or a pair of that and a dict of metrics, numbers that are means over the
            batch too. The names of the metrics must be the same each time.
        global_batch: Number of samples in a step, of all ranks and micro-batches together. The last
            step of an epoch may have fewer.
        epochs: Total number of epochs, including resumed runs. Give either this or `steps`.
        steps: Total number of optimizer steps, including resumed runs.
        accumulate: Number of micro-batches in a step, processed one after another to save memory.
            It must divide the global batch. The step is the same except for rounding.
        precision: "bfloat16" or "float16" (with scaled losses) for the forward pass by autocast;
            None computes in the dtype of the parameters.
        clip: The maximum norm of all gradients together; None disables clipping.
        scheduler: A learning rate scheduler. It is stepped after each step that the optimizer
            makes, not after each epoch.
        evaluate: A data set on which `loss` is evaluated, without gradients and in evaluation mode,
            after each epoch and at the end.
        checkpoints: A directory, or `Checkpointer`. Training resumes from the newest checkpoint
            there. None saves nothing.
        checkpoint_every: Number of steps between checkpoints; None saves after each epoch. A
            checkpoint is saved at the end and on SIGTERM in any case.
        seed: The seed of the samples' order and, together with the rank, of the random generators
            of Python, NumPy and PyTorch, which `fit` seeds. Dropout differs between ranks.
        loader: Arguments for `DataLoader`, such as `num_workers` and `collate_fn`. With
            `batch_size` None the data set is indexed by lists of indices.
        on_step: A function called on every rank after each step with the number of the step, from
            1, and the means over its samples: "loss" and the metrics.
        tensorboard: A directory for TensorBoard's files, which rank 0 writes. If steps are repeated
            after a restart, TensorBoard shows the new ones. Use a separate directory for each run.
        progress: True to show a progress bar on rank 0, or lines if stderr is not a terminal. A
            notebook has both, below the cell.
        elastic: True to continue when ranks are lost, with newcomers in their places, as
            `phalanx run --elastic` starts them. The model must be a plain module or a
            SharedDataParallel with elastic=True, and no collective may be between the formation of
            the group and `fit`. The step in which a rank is lost is
            repeated. If each lost rank is replaced, the parameters at the end are those of a run
            without losses, bit for bit; for this, the random generators are seeded in each step.
            Buffers that a forward pass changes, such as BatchNorm's means, continue from those of a
            rank that is left.
        min_ranks: With `elastic`, the least number of ranks with which training continues.
        wait: With `elastic`, the time to wait for newcomers after a loss, in seconds. If fewer have
            come, training continues with these, and others join later.
        check_gradients: True to check on each rank that all gradients are finite, which reads each
            of them once. With "float16" the check runs only when the scale of the loss has fallen
            to 1 or less, to name the rank and parameter at fault.

    Raises:
        UsageError: An argument is invalid. It is raised before training starts, on the ranks that
            gave the argument.
        CheckpointError: The directory of checkpoints cannot be created or written, on all ranks.

    Example:
        >>> def loss(model, batch):
        ...     images, labels = batch
        ...     return torch.nn.functional.cross_entropy(model(images), labels)
        >>> with phalanx.init():
        ...     trainer = Trainer(model, optimizer, data, loss, global_batch=128, epochs=10)
        ...     result = trainer.fit()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Dataset[Any],
        loss: Loss,
        *,
        global_batch: int,
        epochs: int | None = None,
        steps: int | None = None,
        accumulate: int = 1,
        precision: str | None = None,
        clip: float | None = None,
        scheduler: Any = None,
        evaluate: Dataset[Any] | None = None,
        checkpoints: str | PathLike[str] | Checkpointer | None = None,
        checkpoint_every: int | None = None,
        seed: int = 0,
        loader: Mapping[str, Any] | None = None,
        on_step: Callable[[int, dict[str, float]], None] | None = None,
        tensorboard: str | PathLike[str] | None = None,
        progress: bool = True,
        check_gradients: bool = True,
        elastic: bool = False,
        min_ranks: int = 1,
        wait: float = 60.0,
    ) -> None:
        _check_limits(epochs, steps, checkpoint_every)
        self._recovery = Recovery("Trainer", min_ranks, wait) if elastic else None
        self._loss, self._seed, self._on_step = loss, seed, on_step
        self._epochs, self._steps, self._checkpoint_every = epochs, steps, checkpoint_every
        self._global_batch, self._scheduler, self._show_progress = global_batch, scheduler, progress
        self._check_gradients, self._tensorboard = check_gradients, tensorboard
        if tensorboard is not None:
            check_tensorboard()
        self._model, self._data, self._evaluated_data = model, data, evaluate
        self._accumulate, self._loader = accumulate, loader or {}
        self._local = optimizer if isinstance(optimizer, LocalSGD) else None
        if self._local is not None:
            self._check_local(self._local, precision, checkpoints, elastic=elastic)
            self._local.average = False  # `Replicas` does, before the gradients are clipped
        self._replicas = Replicas(model, self._local)
        self._stepper = Stepper(model, optimizer, precision, clip, self._replicas.device)
        self._divide_work()
        self._directory: str | PathLike[str] | None = None
        self._checkpoints: Checkpointer | None = None
        if isinstance(checkpoints, str | PathLike):
            self._directory = checkpoints
            if not elastic:
                self._checkpoints = Checkpointer(checkpoints)
        else:
            self._checkpoints = checkpoints
        if elastic:
            self._check_elastic()
        self._saved_step = 0  # there is nothing to save before the first step
        self._finite_check: FiniteCheck | None = None
        self._buffers: list[Tensor] = []
        """The buffers before the current step, if ranks may be lost in it."""
        self._unfinished: tuple[int, bool] | None = None
        self._has_tried = self._has_begun = False
        """The epoch of a completed step, and whether it is over, until all that follows is done."""
        self.result = Result()

    def _divide_work(self) -> None:
        """Divide the batches among the ranks."""
        self._replicas = Replicas(self._model, self._local)
        self._schedule = BatchSchedule(
            self._data, self._global_batch, self._accumulate, self._seed, self._loader
        )
        self._evaluation: Evaluation | None = None
        if self._evaluated_data is not None:
            size = self._accumulate * self._replicas.world_size
            batch = max(1, self._global_batch // size)
            self._evaluation = Evaluation(self._evaluated_data, batch, self._loss, self._loader)
        self._state = TrainingState(
            self._replicas, self._stepper, self._schedule, self._scheduler, self._seed
        )
        self._step_sync = StepSync(self._replicas)

    def _check_local(
        self, local: LocalSGD, precision: str | None, checkpoints: object, *, elastic: bool
    ) -> None:
        name = type(local).__name__
        given = {
            "elastic=True": elastic or local.elastic,
            "early=True": local.early,
            "precision='float16'": precision == "float16",
        }
        if any(given.values()):
            option = next(text for text, is_given in given.items() if is_given)
            raise UsageError(
                f"the optimizer {name} with {option} given: hosts would make different numbers of "
                "steps between two exchanges. Expected one of them"
            )
        if isinstance(checkpoints, Checkpointer) and checkpoints.sharded:
            raise UsageError(
                f"the optimizer {name} with a sharded Checkpointer given: its state differs "
                "between hosts. Expected Checkpointer(sharded=False), which saves that of rank 0"
            )
        if Replicas(self._model).is_wrapped:
            raise UsageError(
                f"the optimizer {name} with a model in {type(self._model).__name__} given, which "
                "averages over all hosts in each step: expected a plain module"
            )

    def _check_elastic(self) -> None:
        check_model("Trainer", self._model)
        if self._checkpoints is not None:
            raise UsageError(
                "elastic=True with a Checkpointer given, which newcomers cannot create: give its "
                "directory"
            )

    def fit(self) -> Result:
        """Train until the end, starting from the newest checkpoint if there is one. Collective.

        Blocks until training has ended. If the checkpoint is from a completed run, the state is
        restored and no step is made.

        Returns:
            The result, the same on every rank.

        Raises:
            FloatingPointError: A loss or a gradient is not finite. Every rank raises it; the
                message names the ranks and parameters at fault. The optimizer has not made the
                step, and the last checkpoint is from before it. With "float16" it is raised only
                after smaller scales of the loss have not helped.
            UsageError: The checkpoint is of a different model, optimizer or data set; the models or
                the names of the metrics differ between ranks; the loss function returned an invalid
                value; the trainer was created before the process group; or TensorBoard's directory
                cannot be written.
            CheckpointError: A checkpoint cannot be written (for example because the disk is full),
                or checkpoints exist and none is usable. Every rank raises it. Older checkpoints
                remain unchanged.
            SystemExit: A rank received SIGTERM. Every rank raises it with the code 143
                (`PREEMPTION_EXIT_CODE`), after saving a checkpoint if `checkpoints` is given.
            torch.distributed.DistBackendError: A rank died or did not join a collective.

        Example:
            >>> result = trainer.fit()
            >>> accuracy = result.evaluation["accuracy"]
        """
        if self._recovery is None:
            self._train(None, is_first=True)
        else:
            self._recovery.run(self._train_elastic, progress_at_start(), self._progress)
        return self.result

    def _train(self, progress: int | None, *, is_first: bool) -> None:
        """Train until the end.

        Args:
            progress: The progress of this rank; see `Recovery.run`.
            is_first: Whether no rank has tried before.
        """
        if is_first:
            self._replicas.check()
        is_main, has_recorder = self._replicas.rank == 0, self._replicas.uses_phalanx
        display = Display(is_main=is_main, enabled=self._show_progress, has_recorder=has_recorder)
        with contextlib.ExitStack() as stack:
            preemption = stack.enter_context(PreemptionHandler())
            stack.enter_context(display)
            stack.callback(self._set_gradient_check, enabled=False)
            self._start(display, progress, is_first=is_first)
            if self._unfinished is not None:
                self._after_step(display, stop_requested=False)
            while not self._is_finished():
                self._run_epoch(display, preemption)
            self._exchange()
            self._save(display)

    def _train_elastic(self, progress: int | None) -> None:
        shared = self._shared_model()
        if shared is not None and not shared.release():
            progress = NEWCOMER  # others have begun this step, and have the whole state
        position = self._schedule.state_dict()
        self._divide_work()
        self._schedule.load_state_dict(position)
        if self._directory is not None:
            self._checkpoints = Checkpointer(self._directory)
        is_first, self._has_tried = progress is None and not self._has_tried, True
        self._train(progress, is_first=is_first)

    def _shared_model(self) -> SharedDataParallel | None:
        return self._model if isinstance(self._model, SharedDataParallel) else None

    def _progress(self) -> int | None:
        """Return the progress of this rank: it grows with each step, and with what follows it."""
        if not self._has_begun:
            return progress_at_start()
        return 2 * self.result.step + (self._unfinished is None)

    def _run_epoch(self, display: Display, preemption: PreemptionHandler) -> None:
        """Make the remaining steps of the epoch or of the run.

        If workers make the batches, a rank waits for the next step's batches before the ranks agree
        on the current step. SIGTERM ends that wait. The ranks can therefore agree to stop, however
        long a batch takes.
        """
        with contextlib.closing(self._schedule.steps()) as steps:

            def wait_for_batch() -> list[MicroBatch] | None:
                if self._local is not None:  # the other hosts would wait in the next exchange
                    return next(steps, None)
                return preemption.run_interruptible(lambda: next(steps, None))

            prefetch = self._schedule.uses_workers
            next_micro_batches = wait_for_batch() if prefetch else None
            if self._replicas.sum([preemption.requested])[0]:
                self._exit_preempted(display)
            while not self._is_finished():
                micro_batches = next_micro_batches if prefetch else next(steps, None)
                if micro_batches is None:
                    return
                last = self._steps is not None and self.result.step + 1 >= self._steps
                fetch: _Fetch = wait_for_batch if prefetch and not last else lambda: None
                next_micro_batches, stop_requested = self._step(
                    micro_batches, display, preemption, fetch
                )
                self._after_step(display, stop_requested=stop_requested)
                if self._recovery is None or self._is_finished():
                    continue
                if self._recovery.has_newcomers():
                    raise NewcomersWait

    def _start(self, display: Display, progress: int | None, *, is_first: bool) -> None:
        """Restore a state or start from scratch, equally on all ranks."""
        if is_first or not has_begun(progress):
            self._start_from_disk(display)
        else:
            self._start_from_memory(progress)
        shared = self._shared_model()
        if shared is not None and shared.elastic:
            shared.form()
        self._has_begun = True
        self._stepper.optimizer.zero_grad()
        display.begin(self.result.step, self._last_step(), self._open_tensorboard())
        self._set_gradient_check(enabled=not self._stepper.scaler.is_enabled())

    def _start_from_disk(self, display: Display) -> None:
        """Restore a checkpoint or start from scratch."""
        self.result.losses = []
        seed_rank(self._seed, self._replicas.rank)
        checkpoint = None if self._checkpoints is None else self._checkpoints.load()
        if checkpoint is None:
            self._replicas.synchronize()
        else:
            self._resume(
                self._state.restore(checkpoint.state, checkpoint.path), display, checkpoint.path
            )

    def _start_from_memory(self, progress: int | None) -> None:
        """Take over the state of the rank that has come furthest."""
        self._restore_buffers()

        def capture() -> dict[str, Any]:
            return {
                "training": self._state.capture_replica(),
                "result": dict(vars(self.result)),
                "saved_step": self._saved_step,
                "unfinished": self._unfinished,
            }

        if (state := share_furthest(progress, capture)) is not None:
            self._state.restore_replica(state["training"])
            vars(self.result).update(state["result"])
            self._saved_step, self._unfinished = state["saved_step"], state["unfinished"]

    def _restore_buffers(self) -> None:
        """Undo what the forward passes of an unfinished step did to the buffers."""
        for buffer, value in zip(self._replicas.inner.buffers(), self._buffers, strict=False):
            buffer.copy_(value)
        self._buffers = []

    def _open_tensorboard(self) -> Any:
        """Return a TensorBoard writer on rank 0 if one is wanted, else None. Collective.

        Raises:
            UsageError: Rank 0 cannot write the directory. Every rank raises it.
        """
        writer, problem = None, ""
        if self._tensorboard is not None and self._replicas.rank == 0:
            try:
                writer = open_tensorboard(self._tensorboard, self.result.step + 1)
            except OSError as error:
                problem = f"cannot write TensorBoard files to {self._tensorboard}: {error}"
        if problem := self._replicas.gather(problem)[0]:
            raise UsageError(f"{problem}: give a directory that rank 0 can write")
        return writer

    def _set_gradient_check(self, *, enabled: bool) -> None:
        if self._finite_check is not None and not enabled:
            self._finite_check.close()
            self._finite_check = None
        elif self._finite_check is None and enabled and self._check_gradients:
            self._finite_check = FiniteCheck(self._replicas.inner)

    def _resume(self, progress: dict[str, Any], display: Display, path: object) -> None:
        result = self.result
        result.step, result.epoch = progress["step"], self._schedule.epoch
        result.loss, result.evaluation = progress["loss"], dict(progress["evaluation"])
        self._saved_step = result.step
        current = {"ranks": self._replicas.world_size, "global batch": self._global_batch}
        previous = {"ranks": progress["world_size"], "global batch": progress["global_batch"]}
        changes = [
            f"{name} {previous[name]} before, {current[name]} now"
            for name in current
            if current[name] != previous[name]
        ]
        ended = "; the run is complete, nothing is left to train" if self._is_finished() else ""
        display.print_line(
            f"resuming from step {result.step} (epoch {self._schedule.epoch + 1}, "
            f"{self._schedule.position} of its {self._schedule.samples} samples done), {path}"
            + "".join(f"; {change}" for change in changes)
            + ended
        )

    def _step(
        self,
        micro_batches: list[MicroBatch],
        display: Display,
        preemption: PreemptionHandler,
        fetch: _Fetch,
    ) -> tuple[list[MicroBatch] | None, bool]:
        """Make a step; return the fetched micro-batches, and whether to stop after the step."""
        if self._recovery is not None:
            seed_rank(self._seed, self._replicas.rank, self.result.step)
            self._buffers = [each.detach().clone() for each in self._replicas.inner.buffers()]
        totals = Totals()
        for number, micro_batch in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            self._forward_backward(micro_batch, totals, last=last)
        next_micro_batches = fetch()
        sync_start = time.monotonic()
        self._replicas.average()
        non_finite = "" if self._finite_check is None else self._finite_check.pop_non_finite()
        synced = self._step_sync.synchronize(
            totals, non_finite, stop_requested=preemption.requested, step=self._describe_step()
        )
        blocked = time.monotonic() - sync_start if self._replicas.world_size > 1 else 0.0
        metrics, loss = synced.metrics, totals.sums["loss"]
        is_fatal = not self._stepper.scaler.is_enabled() and self._local is None
        if not synced.is_finite and is_fatal:  # else the scaler or the next exchange notices it
            self._step_sync.raise_non_finite(loss, non_finite, step=self._describe_step())
        if not self._stepper.step():
            self._handle_skipped_step(loss, non_finite, display)
        elif self._scheduler is not None:
            self._scheduler.step()
        samples = self._schedule.advance(len(micro_batches))
        result = self.result
        result.step, result.loss = result.step + 1, metrics["loss"]
        result.losses.append(result.loss)
        self._unfinished = self._schedule.epoch, self._schedule.at_end
        self._buffers = []
        display.step(result.step, self._schedule.epoch, metrics, samples, blocked)
        if self._on_step is not None:
            self._on_step(result.step, metrics)
        return next_micro_batches, self._must_stop(preemption, synced.stop_requested)

    def _must_stop(self, preemption: PreemptionHandler, stop_requested: bool) -> bool:
        """Return whether all ranks stop after this step; hosts agree on it in exchanges only."""
        if self._local is None:
            return stop_requested
        return self._local.has_exchanged and self._replicas.sum([preemption.requested])[0] > 0

    def _exchange(self) -> None:
        """Give all ranks the same parameters, if hosts make their own steps."""
        if self._local is not None:
            self._local.synchronize()

    def _describe_step(self) -> str:
        return f"step {self.result.step + 1} (epoch {self._schedule.epoch + 1})"

    def _handle_skipped_step(self, loss: float, non_finite: str, display: Display) -> None:
        """Continue after a step that the float16 scaler skipped, or raise if it cannot help."""
        scale = self._stepper.scaler.get_scale()
        if scale < _MIN_SCALE:
            reason = f", like many before it, and scaling the loss by {scale:.0e} does not help"
            self._step_sync.raise_non_finite(
                loss, non_finite, step=self._describe_step(), reason=reason
            )
        display.print_line(
            f"{self._describe_step()} skipped: its gradients are not finite in float16; the loss "
            f"is scaled by {scale:g} from now on"
        )
        self._set_gradient_check(enabled=scale <= 1)  # the scale is then unlikely to be the cause

    def _forward_backward(self, micro_batch: MicroBatch, totals: Totals, *, last: bool) -> None:
        """Accumulate the gradients of a micro-batch, and its weighted metrics in the totals."""
        replicas, weight = self._replicas, micro_batch.weight
        batch = move_to_device(micro_batch.content, replicas.device)
        with replicas.backward_context(is_last=last):
            with self._stepper.autocast():
                loss, metrics = unpack_loss(self._loss(replicas.model, batch))
            # The factor turns the average over the ranks into the mean over the step's samples.
            self._stepper.backward(loss * (weight * replicas.world_size))
        totals.add({"loss": loss.item(), **metrics}, weight)

    def _after_step(self, display: Display, *, stop_requested: bool) -> None:
        """End the epoch, evaluate, save and exit, as required after the completed step."""
        result, (epoch, at_end) = self.result, self._unfinished or (self._schedule.epoch, False)
        if at_end and self._schedule.epoch == epoch:
            self._schedule.next_epoch()
            result.epoch = self._schedule.epoch
        if at_end or self._is_finished():
            self._exchange()
            if self._evaluation is not None:
                display.set_activity("evaluating")
                result.evaluation = self._evaluation.run(self._replicas, self._stepper.autocast)
                display.set_activity("training")
            display.end_epoch(result.step, epoch, result.loss, result.evaluation)
        due = (
            at_end if self._checkpoint_every is None else result.step % self._checkpoint_every == 0
        )
        if due:
            self._save(display)
        self._unfinished = None
        if stop_requested and not self._is_finished():
            self._exit_preempted(display)

    def _exit_preempted(self, display: Display) -> NoReturn:
        self._save(display)
        step = self.result.step
        saved = "checkpoint saved, " if step and self._checkpoints is not None else ""
        display.print_line(f"stopped by SIGTERM after step {step}: {saved}exiting")
        raise SystemExit(PREEMPTION_EXIT_CODE)

    def _save(self, display: Display) -> None:
        result = self.result
        if self._checkpoints is None or result.step == self._saved_step:
            return
        self._exchange()
        display.flush()
        progress = {
            "step": result.step,
            "loss": result.loss,
            "evaluation": result.evaluation,
            "world_size": self._replicas.world_size,
            "global_batch": self._global_batch,
        }
        self._checkpoints.save(result.step, self._state.capture(progress))
        self._saved_step = result.step

    def _is_finished(self) -> bool:
        if self._steps is not None:
            return self.result.step >= self._steps
        return self._schedule.epoch >= (self._epochs or 0)

    def _last_step(self) -> int:
        """Return the number of the last step, computed from the current global batch."""
        if self._steps is not None:
            return self._steps
        per_epoch = -(-self._schedule.samples // self._global_batch)
        remaining = -(-(self._schedule.samples - self._schedule.position) // self._global_batch)
        return (
            self.result.step
            + remaining
            + per_epoch * ((self._epochs or 0) - self._schedule.epoch - 1)
        )


def _check_limits(epochs: int | None, steps: int | None, checkpoint_every: int | None) -> None:
    if (epochs is None) == (steps is None):
        raise UsageError(f"epochs {epochs} and steps {steps} given, expected one of them")
    for name, number in (
        ("epochs", epochs),
        ("steps", steps),
        ("checkpoint_every", checkpoint_every),
    ):
        if number is not None and number < 1:
            raise UsageError(f"{name} is {number}, expected at least 1")
