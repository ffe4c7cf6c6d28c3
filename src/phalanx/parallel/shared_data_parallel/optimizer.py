"""An optimizer whose work and state are divided among the ranks of a host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from phalanx.errors import UsageError
from phalanx.parallel.shared_data_parallel.gradients import Gradients
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
    """A fragment that this rank updates."""

    group: int
    """The index of its parameter group."""
    local: nn.Parameter
    """The parameter of the inner optimizer, in the memory of the host."""
    fragment: ParameterFragment
    average: Tensor
    """This rank's replica of its averaged gradient."""


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
        shared: SharedParameters,
        gradients: Gradients,
        optimizer_class: Callable[..., optim.Optimizer],
        params: Iterable[Any] | None,
        /,
        *,
        elementwise: bool,
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
        self._shared = shared
        self._gradients = gradients
        self._parameter_numbers = {
            id(parameter): number for number, parameter in enumerate(shared.trained)
        }
        self._is_constructed = False
        # A trial instance provides the defaults, and checks the options before anything is made.
        defaults = optimizer_class([torch.zeros(1)], **options).defaults
        super().__init__(list(shared.trained if params is None else params), defaults)
        self._is_constructed = True
        self._slices = self._divide()
        """This rank's slices, in the order of the groups."""
        groups = [
            {
                **{key: value for key, value in group.items() if key not in _NON_OPTION_KEYS},
                "params": [own.local for own in self._slices if own.group == index],
            }
            for index, group in enumerate(self.param_groups)
        ]
        self._inner: Any = optimizer_class(groups, **options) if self._slices else None

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

    def _divide(self) -> list[_Slice]:
        """Return this rank's fragments of the parameters."""
        group_of = {
            self._parameter_numbers[id(parameter)]: index
            for index, group in enumerate(self.param_groups)
            for parameter in group["params"]
        }
        layout, slices = self._shared.layout, []
        for fragment in layout.owned_fragments(self._shared.topology.local_rank):
            if fragment.parameter in group_of:
                part = fragment.start, fragment.end, layout.dtypes[fragment.parameter]
                local = nn.Parameter(self._shared.memory.shared(*part))
                average = self._gradients.memory.replica(*part)
                slices.append(_Slice(group_of[fragment.parameter], local, fragment, average))
        return sorted(slices, key=lambda own: own.group)

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
        shared.restore_views()
        shared.topology.barrier()  # no rank reads the parameters any more
        # In-place writes to this rank's slices, so that the step starts from them.
        shared.memory.publish(shared.layout.slices(shared.topology.local_rank))
        if self._inner is not None:
            self._update()
        shared.topology.barrier()
        shared.memory.discard()
        torch.autograd.graph.increment_version(shared.trained)
        return loss

    @torch.no_grad()
    def _update(self) -> None:
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: group[key] for key in inner if key != "params" and key in group})
        trained, layout = self._shared.trained, self._shared.layout
        for _, local, fragment, average in self._slices:
            gradient = trained[fragment.parameter].grad
            if gradient is None:
                local.grad = None
            elif self._gradients.is_average(gradient, fragment.parameter):
                local.grad = average
            else:  # the user has assigned another gradient
                elements = flat(gradient, trained[fragment.parameter])
                local.grad = elements[layout.elements(fragment)]
        has_state = bool(self._inner.state)
        self._step_inner()
        if not has_state:  # the new state lies in between memory that gradients have freed
            trim_heap()

    def _step_inner(self) -> None:
        """Step the inner optimizer without the global step hooks, which run for the outer one."""
        inner, step = self._inner, type(self._inner).step
        has_hooks = inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks
        if has_hooks or not getattr(step, "hooked", False):
            inner.step()
        else:
            step.__wrapped__(inner)

    # The state, in the format of the optimizer that is divided.

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole model, in the format of the optimizer that is divided.

        All ranks of a host must call it, and it blocks until they have. Each rank gets the whole
        state; its tensors are in memory that the host holds once.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        own = [(it.fragment, self._inner.state.get(it.local, {})) for it in self._slices]
        states = _collect_states(own, self._shared)
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
        trained = self._shared.trained
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: saved[key] for key in saved if key not in _NON_OPTION_KEYS})
        index = {number: i for i, number in enumerate(self._parameter_order())}
        states_of = {int(i): state for i, state in state_dict["state"].items()}
        for _, local, fragment, _ in self._slices:
            state = states_of.get(index[fragment.parameter])
            if state is None:
                self._inner.state.pop(local, None)
                continue
            parameter = trained[fragment.parameter]
            self._inner.state[local] = {
                key: self._slice_state(key, value, parameter, fragment)
                for key, value in state.items()
            }
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

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

    def _parameter_order(self) -> list[int]:
        """Return the numbers of the parameters, in the order of the groups."""
        return [
            self._parameter_numbers[id(parameter)]
            for group in self.param_groups
            for parameter in group["params"]
        ]


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
