"""An optimizer whose work and state are divided among the ranks of a host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from phalanx.errors import CollectiveMismatch, PhalanxError, UsageError
from phalanx.parallel.shared_data_parallel.gradients import Gradients
from phalanx.parallel.shared_data_parallel.journal import (
    CHUNK_BYTES,
    Journal,
    OldValues,
    StateSpec,
    describe_state,
    split,
)
from phalanx.parallel.shared_data_parallel.layout import (
    ALIGNMENT,
    ParameterFragment,
    round_up,
)
from phalanx.parallel.shared_data_parallel.memory import HostMemory, RankTopology, flat, shaped_like
from phalanx.parallel.shared_data_parallel.parameters import SharedParameters, trim_heap

#: Optimizers of PyTorch that update each element independently.
ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adagrad,
    optim.Adadelta,
    optim.Adamax,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
)

# The keys of a parameter group that are not options.
_NON_OPTION_KEYS = ("params", "param_names")


class _Slice(NamedTuple):
    """A fragment that is updated."""

    group: int
    """The index of its parameter group."""
    local: nn.Parameter
    """The parameter of the inner optimizer, in the memory of the host."""
    fragment: ParameterFragment
    average: Tensor
    """This rank's replica of its averaged gradient."""


class _Update(NamedTuple):
    """A part of a step: slices that are updated together."""

    slices: list[_Slice]
    """In the order of the groups."""
    inner: Any
    """The optimizer of these slices."""


class ShardedOptimizer(optim.Optimizer):
    """An optimizer that on each rank updates a slice of the model's parameters in shared memory.

    `SharedDataParallel.optimizer` makes it. The usage is that of the optimizer that it divides:
    `param_groups` are those of the whole model, so that schedulers work, and the step is bitwise
    the same. `state` is empty, since a rank has only slices of the state; `state_dict` returns the
    whole state.

    Example:
        >>> optimizer = model.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
        >>> state = optimizer.state_dict()
        >>> optimizer.load_state_dict(state)
    """

    def __init__(
        self,
        trained: Sequence[nn.Parameter],
        optimizer_class: Callable[..., optim.Optimizer],
        params: Iterable[Any] | None,
        /,
        *,
        elementwise: bool,
        elastic: bool,
        **options: Any,
    ) -> None:
        if not elementwise and optimizer_class not in ELEMENTWISE:
            known = ", ".join(one.__name__ for one in ELEMENTWISE)
            raise UsageError(
                "SharedDataParallel.optimizer: "
                f"{getattr(optimizer_class, '__name__', optimizer_class)} given, expected one that "
                f"updates each element independently ({known}): give elementwise=True if it does, "
                "otherwise create it with model.parameters(), as for DDP"
            )
        self.optimizer_class = optimizer_class
        """The class of the optimizer that is divided."""
        self._trained, self._elastic, self._options = trained, elastic, options
        self._parameter_numbers = {
            id(parameter): number for number, parameter in enumerate(trained)
        }
        self._is_constructed = False
        # A trial instance provides the defaults, and checks the options before anything is made.
        defaults = optimizer_class(
            [torch.zeros(1, dtype=torch.float32, device="cpu")], **options
        ).defaults
        super().__init__(list(trained if params is None else params), defaults)
        self._is_constructed = True
        self._group_of = {
            self._parameter_numbers[id(parameter)]: index
            for index, group in enumerate(self.param_groups)
            for parameter in group["params"]
        }
        self._shared: Any = None
        self._gradients: Any = None
        self._journal: Journal | None = None
        self._updates: list[_Update] = []
        """The updates of this rank's slices."""
        self._released: dict[int, dict[str, Any]] = {}
        """The state of each parameter while the memory is not shared."""

    def attach(self, shared: SharedParameters, gradients: Gradients) -> None:
        """Divide the work and the state among the ranks of the host, which share the parameters.

        With `elastic`, all ranks of the host must call it, and block until all have.
        """
        self._shared, self._gradients = shared, gradients
        owner = shared.topology.local_rank
        if self._elastic:
            chunks = [
                split(self._fragments(each), CHUNK_BYTES) for each in range(shared.layout.owners)
            ]
            self._journal = Journal(shared, chunks, self._describe_states())
            own = chunks[owner] if owner < len(chunks) else []
        else:
            fragments = self._fragments(owner)
            own = [fragments] if fragments else []
        self._updates = [self._make_update(each, shared.memory.shared) for each in own]
        if self._released:
            self._load(self._released.get)
            self._released = {}

    def release(self) -> bool:
        """Take the whole state out of the memory of the host, after the loss of a rank.

        Returns:
            False if other ranks have begun a step that this rank has not completed, so that it has
            no whole state.
        """
        journal, self._journal, self._updates, self._shared = self._journal, None, [], None
        if journal is None:
            return True
        self._released = {number: journal.assemble(number) for number in self._group_of}
        return not journal.is_begun()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group during construction, like the base class.

        Raises:
            UsageError: The optimizer is constructed already, or a parameter is not one that the
                model trains.
        """
        if self._is_constructed:
            raise UsageError(
                "add_param_group: the parameters are already divided among the ranks: create a new "
                "optimizer with model.optimizer(...)"
            )
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if id(parameter) not in self._parameter_numbers:
                raise UsageError(
                    f"SharedDataParallel.optimizer: a parameter {list(parameter.shape)} given that "
                    "is not part of this model or does not require a gradient"
                )

    def _fragments(self, owner: int) -> list[ParameterFragment]:
        """Return an owner's fragments of the parameters, in the order of the groups."""
        found = self._shared.layout.owned_fragments(owner)
        own = [fragment for fragment in found if fragment.parameter in self._group_of]
        return sorted(own, key=lambda fragment: self._group_of[fragment.parameter])

    def _make_update(
        self, fragments: Sequence[ParameterFragment], view: Callable[..., Tensor]
    ) -> _Update:
        """Make an optimizer of some fragments; `view` returns the memory of their parameters."""
        slices = []
        for fragment in fragments:
            dtype = self._shared.layout.dtypes[fragment.parameter]
            part = fragment.start, fragment.end, dtype
            average = self._gradients.memory.replica(*part)
            group = self._group_of[fragment.parameter]
            slices.append(_Slice(group, nn.Parameter(view(*part)), fragment, average))
        groups = [
            {**_options(group), "params": [own.local for own in slices if own.group == index]}
            for index, group in enumerate(self.param_groups)
        ]
        return _Update(slices, self.optimizer_class(groups, **self._options))

    @torch.no_grad()
    def _describe_states(self) -> dict[int, StateSpec]:
        """Return the entries of the state of each parameter, as a step of a trial creates them."""
        specs: dict[tuple[int, torch.dtype], StateSpec] = {}
        result = {}
        for number, index in self._group_of.items():
            dtype = self._trained[number].dtype
            if (index, dtype) not in specs:
                trial = nn.Parameter(torch.zeros(2, dtype=dtype, device="cpu"))
                trial.grad = torch.zeros_like(trial)
                groups = [{**_options(self.param_groups[index]), "params": [trial]}]
                inner = self.optimizer_class(groups, **self._options)
                _step(inner)
                name = self.optimizer_class.__name__
                specs[index, dtype] = describe_state(inner.state[trial], name)
            result[number] = specs[index, dtype]
        return result

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update this rank's slices with its gradients; block until all ranks of the host have.

        All ranks of the host must call it.

        Args:
            closure: A function that computes the loss again; called once, before the update.

        Returns:
            The value that the closure returned, or None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        shared = self._shared
        if shared is None:
            raise UsageError(
                "SharedDataParallel(elastic=True): the optimizer's step came before the training, "
                "expected one in the loop of Elastic or Trainer"
            )
        shared.restore_views()
        shared.topology.barrier()  # no rank reads the parameters any more
        # In-place writes to this rank's slices, so that the step starts from them.
        shared.memory.publish(shared.layout.slices(shared.topology.local_rank))
        self._update()
        completions = [self._begin_completion(owner) for owner in self._wait_for_others()]
        shared.memory.discard()
        for each in completions:
            self._complete(*each)
        if self._journal is not None:
            self._journal.end_step()
        torch.autograd.graph.increment_version(shared.trained)
        return loss

    @torch.no_grad()
    def _update(self) -> None:
        for number, update in enumerate(self._updates):
            self._prepare(update)
            if self._journal is None:
                has_state = bool(update.inner.state)
                _step(update.inner)
                if not has_state:  # the new state lies between memory that gradients have freed
                    trim_heap()
            else:
                self._journal.save(number)
                _step(update.inner)
                self._keep_states(number, update)
                self._journal.mark_updated(number)

    def _prepare(self, update: _Update) -> None:
        """Give an inner optimizer the options and the gradients of this step."""
        for group, inner in zip(self.param_groups, update.inner.param_groups, strict=True):
            inner.update({key: group[key] for key in inner if key != "params" and key in group})
        trained, layout = self._trained, self._shared.layout
        for _, local, fragment, average in update.slices:
            gradient = trained[fragment.parameter].grad
            if gradient is None:
                local.grad = None
            elif self._gradients.is_average(gradient, fragment.parameter):
                local.grad = average
            else:  # the user has assigned another gradient
                elements = flat(gradient, trained[fragment.parameter])
                local.grad = elements[layout.elements(fragment)]

    def _keep_states(self, number: int, update: _Update) -> None:
        """Move states that a step or a load has made to the memory of the host."""
        journal: Any = self._journal
        states = update.inner.state
        for index, own in enumerate(update.slices):
            if own.local in states and not journal.is_kept(number, index):
                states[own.local] = journal.keep(number, index, states[own.local])

    def _wait_for_others(self) -> Sequence[int]:
        """Wait until all ranks of the host have made the step; return the lost ones that have not.

        The step is begun, so it must be completed if all that have not completed it are lost.
        """
        try:
            self._shared.topology.barrier()
        except PhalanxError as error:
            journal = self._journal
            if journal is None or isinstance(error, CollectiveMismatch):
                raise
            lost = journal.find_lost(error)
            if lost is None:
                raise
            return lost
        return ()

    @torch.no_grad()
    def _begin_completion(self, owner: int) -> tuple[int, list[list[OldValues]]]:
        """Return the chunks that a lost rank has not updated, with their old values."""
        journal: Any = self._journal
        memory, dtypes = self._shared.memory, self._shared.layout.dtypes
        reached = journal.position(owner)
        chunks = []
        for number in range(reached.chunk, len(journal.chunks[owner])):
            old = list(journal.old_values(owner, number))
            if reached == (0, False):
                # It may not have published in-place writes, which this rank has made too.
                for index, (fragment, _, state) in enumerate(old):
                    part = fragment.start, fragment.end, dtypes[fragment.parameter]
                    old[index] = OldValues(fragment, memory.replica(*part).clone(), state)
            chunks.append(old)
        return owner, chunks

    @torch.no_grad()
    def _complete(self, owner: int, chunks: Sequence[Sequence[OldValues]]) -> None:
        """Complete the step of a lost rank, in this rank's own view of the memory."""
        journal: Any = self._journal
        memory, dtypes = self._shared.memory, self._shared.layout.dtypes
        first = len(journal.chunks[owner]) - len(chunks)
        for number, old in enumerate(chunks, start=first):
            for fragment, parameters, _ in old:
                part = fragment.start, fragment.end, dtypes[fragment.parameter]
                memory.replica(*part).copy_(parameters)
            update = self._make_update([each.fragment for each in old], memory.replica)
            states = update.inner.state
            for own, (_, _, state) in zip(update.slices, old, strict=True):
                if state:
                    states[own.local] = state
            self._prepare(update)
            _step(update.inner)
            for index, own in enumerate(update.slices):
                journal.set_completed(owner, number, index, states.get(own.local, {}))

    # The state, in the format of the optimizer that is divided.

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole model, in the format of the optimizer that is divided.

        All ranks of a host must call it, and it blocks until they have. Each rank gets the whole
        state; its tensors are in memory that the host holds once. While the memory is not shared
        (`SharedDataParallel.release`), the tensors are this rank's own.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        if self._is_attached:
            own = [
                (it.fragment, update.inner.state.get(it.local, {}))
                for update in self._updates
                for it in update.slices
            ]
            states = _collect_states(own, self._shared)
        else:
            states = self._released
        index = {number: i for i, number in enumerate(self._parameter_order())}
        packed = {
            "state": {i: states[n] for n, i in index.items() if n in states},
            "param_groups": [
                {
                    **group,
                    "params": [
                        index[self._parameter_numbers[id(parameter)]]
                        for parameter in group["params"]
                    ],
                }
                for group in self.param_groups
            ],
        }
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            packed = post_hook(self, packed) or packed
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's slices of a state from this or from a plain optimizer's `state_dict`.

        Any rank may call it alone.

        Raises:
            UsageError: The state is for other parameter groups, or for parameters of other shapes.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        _check_state(state_dict, self.param_groups)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: saved[key] for key in saved if key not in _NON_OPTION_KEYS})
        states_of = {int(i): state for i, state in state_dict["state"].items()}
        by_number = {
            number: states_of[i]
            for i, number in enumerate(self._parameter_order())
            if i in states_of
        }
        if self._is_attached:
            self._load(by_number.get)
        else:
            self._released = by_number
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load(self, state_of: Callable[[int], dict[str, Any] | None]) -> None:
        """Load this rank's slices; `state_of` returns the state of a whole parameter."""
        for number, update in enumerate(self._updates):
            states = update.inner.state
            for index, (_, local, fragment, _) in enumerate(update.slices):
                state = state_of(fragment.parameter)
                states.pop(local, None)
                if self._journal is not None:
                    self._journal.drop(number, index)
                if not state:
                    continue
                parameter = self._trained[fragment.parameter]
                states[local] = {
                    key: self._slice_state(key, value, parameter, fragment)
                    for key, value in state.items()
                }
            if self._journal is not None:
                self._keep_states(number, update)

    def _slice_state(
        self, key: str, value: Any, parameter: Tensor, fragment: ParameterFragment
    ) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dim() == 0 and key == "step":
            return value.clone()
        value = value.to(parameter.dtype) if value.is_floating_point() else value
        if value.dim() == 0 and parameter.dim():
            return value.clone()
        return flat(value, parameter)[self._shared.layout.elements(fragment)].clone()

    @property
    def _is_attached(self) -> bool:
        return self._shared is not None

    def _parameter_order(self) -> list[int]:
        """Return the numbers of the parameters, in the order of the groups."""
        return [
            self._parameter_numbers[id(parameter)]
            for group in self.param_groups
            for parameter in group["params"]
        ]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group."""
    return {key: value for key, value in group.items() if key not in _NON_OPTION_KEYS}


def _step(inner: Any) -> None:
    """Step an inner optimizer without the global step hooks, which run for the outer one."""
    step = type(inner).step
    has_hooks = inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks
    if has_hooks or not getattr(step, "hooked", False):
        inner.step()
    else:
        step.__wrapped__(inner)


def _collect_states(
    fragments: Sequence[tuple[ParameterFragment, dict[str, Any]]], shared: SharedParameters
) -> dict[int, dict[str, Any]]:
    """Return the whole state of each parameter, by its number; all ranks of the host must call it.

    Args:
        fragments: This rank's fragments, each with its state.
        shared: The parameters of the model.
    """
    states = _gather_summaries(
        {fragment.parameter: _summarize(state) for fragment, state in fragments if state},
        shared.topology,
    )
    offsets: dict[tuple[int, str], tuple[int, torch.dtype]] = {}
    size = 0
    for number in sorted(states):
        for key, dtype in sorted(states[number].items()):
            if isinstance(dtype, torch.dtype):
                offsets[number, key] = size, dtype
                size += round_up(shared.trained[number].numel() * dtype.itemsize, ALIGNMENT)
    memory = HostMemory(size, shared.topology)
    for fragment, state in fragments:
        first = shared.layout.elements(fragment).start
        for key, value in state.items():
            if (fragment.parameter, key) in offsets:
                offset, dtype = offsets[fragment.parameter, key]
                start = offset + first * dtype.itemsize
                memory.shared(start, start + value.numel() * dtype.itemsize, dtype).copy_(value)
    shared.topology.barrier()
    for (number, key), (start, dtype) in offsets.items():
        parameter = shared.trained[number]
        part = memory.replica(start, start + parameter.numel() * dtype.itemsize, dtype)
        states[number][key] = shaped_like(part, parameter)
    return states


def _summarize(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with the dtype in place of each tensor that has the parameter's elements."""

    def summarize(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype if value.dim() else value.clone()
        return value

    return {key: summarize(value) for key, value in state.items()}


def _gather_summaries(
    own: dict[int, dict[str, Any]], topology: RankTopology
) -> dict[int, dict[str, Any]]:
    """Return a summary of each parameter with a state, from the first rank that has a fragment."""
    by_rank = [own]
    if topology.host_group is not None:
        by_rank = [{}] * topology.local_size
        dist.all_gather_object(by_rank, own, group=topology.host_group)
    return {n: state for summaries in reversed(by_rank) for n, state in summaries.items()}


def _check_state(state_dict: dict[str, Any], groups: Sequence[dict[str, Any]]) -> None:
    """Check that a state fits these groups of parameters.

    Raises:
        UsageError: The number of parameters or the shape of a tensor differs.
    """
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    expected = [len(group["params"]) for group in groups]
    if saved != expected:
        raise UsageError(
            f"load_state_dict: a state for groups of {saved} parameters given, expected {expected}:"
            " is it the state of a different model?"
        )
    parameters = [parameter for group in groups for parameter in group["params"]]
    for index, state in state_dict["state"].items():
        for key, value in state.items():
            shape = parameters[int(index)].shape
            if isinstance(value, Tensor) and value.dim() and value.shape != shape:
                raise UsageError(
                    f"load_state_dict: {key} of parameter {index} is {list(value.shape)}, expected "
                    f"{list(shape)}: is it the state of a different model?"
                )
