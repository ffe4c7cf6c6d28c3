"""A training loop whose state survives the loss of ranks, in the memory of those that are left.

A step that fails because a rank is lost is repeated, after newcomers have taken the places of lost
ranks, or without them (`recovery`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.errors import PhalanxError, UsageError
from phalanx.parallel import LocalSGD, SharedDataParallel
from phalanx.parallel.groups import create_group
from phalanx.train.random_generators import seed_rank
from phalanx.train.recovery import (
    NEWCOMER,
    Recovery,
    check_model,
    check_number,
    find_furthest,
    find_loss,
    gather,
    has_begun,
    is_distributed,
    progress_at_start,
    share_furthest,
)
from phalanx.train.trees import TreeSender, broadcast_tree, receive_tree

if TYPE_CHECKING:
    from types import TracebackType


class _Stateful(Protocol):
    """An object whose state can be saved and loaded, as in `torch.distributed.checkpoint`."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> object:
        """Take over a state."""


class Elastic:
    """The steps of a training that continues when ranks are lost.

    Iteration yields a context manager for each step, whose body runs the step. If the body fails
    because a rank is lost or late, the exception ends there. The ranks that are left agree, wait
    for newcomers (`phalanx.replace`), take over the most advanced state among them, and repeat the
    step, unless one of them had completed it. If fewer newcomers have come than ranks were lost,
    rank 0 looks for others once a second, between steps; the step that they interrupt is repeated.

    All state that a step changes must be in the model, the optimizer or `state`; other state is
    neither repeated nor given to newcomers. The rest of the body after `optimizer.step()` is not
    repeated: a scheduler must follow it at once, before any collective. After a loss, all groups
    but the default one are left; make them in `wrap`. All ranks must use the loop
    in the same way, newcomers included: they run the same script, as `phalanx run --elastic` starts
    it. The loop follows Horovod's `elastic.run` and torchft's `Manager`.

    Args:
        model: A module with the same parameters on all ranks, without a wrapper such as
            DistributedDataParallel; or a `phalanx.parallel.SharedDataParallel` with elastic=True.
            Its state is what ranks take over.
        optimizer: Its optimizer, whose `step()` each step of the loop calls once, after all
            collectives on which its gradients depend. With a `phalanx.parallel.LocalSGD` or
            `DiLoCo` with elastic=True, each host makes its own steps, and the loop ends with an
            exchange. After a change, the hosts that are left continue with their own parameters,
            and with the number of steps of the one with most. A step that a loss ends may then be
            repeated or not. A host that joins gets the state of another one, which sends it while
            it makes steps; it takes part from the next exchange on, which waits for it.
            Schedulers are refused: set the learning rate by `step.number`.
        steps: The number of steps.
        wrap: A function that wraps the model, such as DistributedDataParallel. It is called on all
            ranks at the start and after each change of the ranks, and the result is `step.model`.
            Without it, average the gradients in each step, for example by
            `phalanx.parallel.average_gradients`.
        state: Further objects with `state_dict` and `load_state_dict`, such as a scheduler.
        seed: The random generators of each rank are seeded with it, the rank and the step, so that
            a repeated step has the same random numbers.
        min_ranks: The least number of ranks. With fewer, the error is raised.
        wait: The time to wait for newcomers after a loss, in seconds. If fewer have come, the
            training continues with these, unless they are fewer than `min_ranks`.

    Raises:
        UsageError: An argument is wrong. When the loop begins: the optimizer has a scheduler, and
            there is no further state. While it runs: a step did not call `optimizer.step()` exactly
            once.
        RankExcluded: While the loop runs: the other ranks have continued without this one, which
            was late.
        PhalanxError: While the loop runs: fewer than `min_ranks` are left.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> for step in phalanx.train.Elastic(model, optimizer, steps=3):
        ...     with step:
        ...         optimizer.zero_grad()
        ...         step.model(torch.ones(4, 2) * step.number).mean().backward()
        ...         phalanx.parallel.average_gradients(model)
        ...         optimizer.step()
        >>> step.number
        2
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        steps: int,
        *,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
        state: Sequence[_Stateful] = (),
        seed: int = 0,
        min_ranks: int = 1,
        wait: float = 60.0,
    ) -> None:
        check_number("Elastic", "steps", steps, int, 0)
        check_model("Elastic", model)
        if wrap is not None and isinstance(model, SharedDataParallel):
            raise UsageError("Elastic: a SharedDataParallel with wrap given, expected one of them")
        self._local = optimizer if isinstance(optimizer, LocalSGD) else None
        if self._local is not None and not self._local.elastic:
            raise UsageError(
                f"Elastic: a {type(optimizer).__name__} without elastic=True given, expected it"
            )
        self._recovery = Recovery("Elastic", min_ranks, wait)
        self._model, self._optimizer = model, optimizer
        self._steps = steps
        self._wrap = wrap
        self._wrapped = model
        self._state = list(state)
        self._seed = seed
        self.completed = 0
        """The number of optimizer steps so far."""
        self._has_begun = False
        """True once this rank has the same state as the others."""
        self._made = 0
        """The number of optimizer steps within the step of the loop."""
        self._sender: TreeSender | None = None
        optimizer.register_step_post_hook(self._count_step)

    def __iter__(self) -> Iterator[Step]:
        self._check_state()
        self._recovery.run(self._recover, progress_at_start(), self._progress)
        while self.completed < self._steps or not self._is_synchronized():
            if self.completed >= self._steps:  # a rank was lost in the last exchange: repeat it
                continue
            step, self._made = Step(self.completed, self._wrapped, self._seed), 0
            buffers = [each.detach().clone() for each in self._model.buffers()]
            yield step
            if step.error is not None:
                if self.completed == step.number:  # a forward pass changes the buffers
                    _copy_all(self._model.buffers(), buffers)
                self._continue_after(step.error)
            elif self._made != 1:
                raise UsageError(
                    f"Elastic: step {step.number} made {self._made} optimizer steps, expected 1, "
                    "within `with step`"
                )
            elif self.completed < self._steps and self._recovery.has_newcomers():
                self._continue_after(None)

    def _is_synchronized(self) -> bool:
        """Make the last exchange, if hosts make their own steps; return False after a loss in it.

        With early exchanges, it waits until all hosts have made their steps.
        """
        if self._local is None:
            return True
        try:
            self._local.synchronize()
        except Exception as error:
            loss = find_loss(error)
            if loss is None:
                raise
            self._continue_after(loss)
            return False
        return True

    def _check_state(self) -> None:
        # A scheduler replaces the method of the optimizer that it was made for.
        has_scheduler = hasattr(self._optimizer.step, "_wrapped_by_lr_sched")
        if has_scheduler and self._local is not None:
            raise UsageError(
                f"Elastic: a scheduler was made for a {type(self._optimizer).__name__}, expected "
                "none: it counts the steps of its host, and hosts take over the number of steps of "
                "each other. Set the learning rate in each step, as a function of step.number"
            )
        if has_scheduler and not self._state:
            raise UsageError(
                "Elastic: a scheduler was made for the optimizer, but state=() was given: expected "
                "state=[scheduler], since its progress is lost with a rank otherwise"
            )

    def _count_step(self, *_arguments: object) -> None:
        self._made += 1
        # A host that has joined may take over the number of steps of the others.
        self.completed = self.completed + 1 if self._local is None else self._local.completed

    def _continue_after(self, error: PhalanxError | None) -> None:
        self._recovery.replace(error)
        self._recovery.run(self._recover, self.completed, self._progress)

    def _progress(self) -> int | None:
        return self.completed if self._has_begun else progress_at_start()

    def _recover(self, completed: int | None) -> None:
        """Give all ranks the state of the one with most steps, and wrap the model.

        Args:
            completed: The number of steps of this rank; see `Recovery.run`.
        """
        self._unwrap()
        if self._local is not None:
            self._local.release()
        if self._local is not None and has_begun(completed):
            self._recover_hosts(self._local, completed)
        else:
            self._recover_all(completed)
        self._has_begun = True
        if self._wrap is not None:
            self._wrapped = self._wrap(self._model)

    def _recover_all(self, completed: int | None) -> None:
        shared = self._model if isinstance(self._model, SharedDataParallel) else None
        if shared is not None and not shared.release():
            completed = NEWCOMER  # others have begun this step, and have the whole state
        state = share_furthest(completed, lambda: (self.completed, self._capture()))
        if state is not None:
            self.completed, states = state
            self._load(states)
        if shared is not None:
            shared.form()
        if self._local is not None:
            self._local.form()
            self.completed = self._local.completed

    def _recover_hosts(self, local: LocalSGD, completed: int | None) -> None:
        """Let the hosts go on with their own parameters; give others the state of one of them.

        The ranks of a host take over the state of the one with most steps. If none of them has the
        state after the last exchange, one gets it from another host, which sends it while it makes
        steps.
        """
        if self._sender is not None:
            self._sender.join()
        if completed not in (None, NEWCOMER):
            completed = local.exchanges
        is_whole = find_furthest(completed)
        rank = dist.get_rank()
        steps = gather(local.completed if is_whole[rank] else NEWCOMER)
        local.form(is_whole=is_whole[rank])
        sources = [max(ranks, key=steps.__getitem__) for ranks in local.hosts]
        late = [source for source in sources if not is_whole[source]]
        if late:
            self._send_state(local, [is_whole.index(True), *late])
        ranks, source = next(
            pair for pair in zip(local.hosts, sources, strict=True) if rank in pair[0]
        )
        if len(ranks) > 1:
            own = self._capture() if rank == source else None
            states = broadcast_tree(own, ranks.index(source), local.host_group)
            if rank != source:
                self._load(states)
        local.resume(is_late=source in late)
        self.completed = local.completed

    def _send_state(self, local: LocalSGD, ranks: list[int]) -> None:
        """Send the state of the first of these ranks to the others; wait for it on these only."""
        source, rank, members = ranks[0], dist.get_rank(), sorted(ranks)
        whole: Any = dist.group.WORLD
        group: Any = create_group(whole, [members], members)
        if rank == source:
            receivers = [number for number, each in enumerate(members) if each != source]
            self._sender = TreeSender(self._capture(is_whole=False), receivers, group)
        elif rank in members:
            self._load(receive_tree(members.index(source), group))
            local.resume(is_late=True)

    def _capture(self, *, is_whole: bool = True) -> list[dict[str, Any]]:
        """Return the state; unless `is_whole`, without the parameters that the optimizer has."""
        objects: list[Any] = [self._model, self._optimizer, *self._state]
        states = [dict(each.state_dict()) for each in objects]
        if not is_whole:
            own = {id(each) for group in self._optimizer.param_groups for each in group["params"]}
            for name, parameter in self._model.named_parameters(remove_duplicate=False):
                if id(parameter) in own:
                    states[0].pop(name, None)
        return states

    def _load(self, states: Sequence[dict[str, Any]]) -> None:
        self._model.load_state_dict({**self._model.state_dict(), **states[0]})
        others: list[Any] = [self._optimizer, *self._state]
        for each, values in zip(others, states[1:], strict=True):
            each.load_state_dict(values)

    def _unwrap(self) -> None:
        """Detach the wrapper, whose backward pass may have ended in the middle, from the model."""
        if isinstance(self._wrapped, DistributedDataParallel):
            self._wrapped._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        self._wrapped = self._model


@torch.no_grad()
def _copy_all(tensors: Iterable[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


class Step:
    """One step of an `Elastic` loop, a context manager.

    Attributes:
        number: The number of the step, from 0. A repeated step has the same one.
        model: The wrapped model; the model itself if there is no wrapper.
        error: The error that ended the step; None if there was none.
    """

    def __init__(self, number: int, model: nn.Module, seed: int) -> None:
        self.number = number
        self.model = model
        self.error: PhalanxError | None = None
        self._seed = seed

    def __enter__(self) -> Step:
        seed_rank(self._seed, dist.get_rank() if is_distributed() else 0, self.number)
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> bool:
        if error is None:
            return False
        self.error = find_loss(error)
        return self.error is not None
