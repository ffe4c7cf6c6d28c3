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
    Layout,
    ParameterFragment,
    round_up,
)
from phalanx.parallel.shared_data_parallel.memory import HostMemory, flat, shaped_like
from phalanx.parallel.shared_data_parallel.parameters import SharedParameters, trim_heap
from phalanx.parallel.shared_data_parallel.rank_topology import RankTopology

__all__ = ["ELEMENTWISE", "ShardedOptimizer"]

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
        self._fragments = self._find_fragments()
        self._inner = self._make_inner(optimizer_class, options)
        self._averages: list[tuple[nn.Parameter, ParameterFragment, Tensor]] = [
            (
                local,
                fragment,
                gradients.average_fragment(fragment.start, fragment.end, fragment.parameter),
            )
            for fragments in self._fragments
            for local, fragment in fragments
        ]

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

    def _find_fragments(self) -> list[list[tuple[nn.Parameter, ParameterFragment]]]:
        """Return this rank's fragments of each group's parameters."""
        group_of = {
            self._parameter_numbers[id(parameter)]: index
            for index, group in enumerate(self.param_groups)
            for parameter in group["params"]
        }
        fragments: list[list[tuple[nn.Parameter, ParameterFragment]]] = [
            [] for _ in self.param_groups
        ]
        topology, layout = self._shared.topology, self._shared.layout
        for fragment in layout.fragments(topology.local_rank) if topology.is_owner else []:
            if (index := group_of.get(fragment.parameter)) is not None:
                part = self._shared.memory.shared(
                    fragment.start, fragment.end, layout.dtypes[fragment.parameter]
                )
                fragments[index].append((nn.Parameter(part), fragment))
        return fragments

    def _make_inner(
        self, optimizer_class: Callable[..., optim.Optimizer], options: dict[str, Any]
    ) -> Any:
        """Return the optimizer of this rank's fragments, or None if the rank has none."""
        groups = [
            {
                **{key: value for key, value in group.items() if key not in _NON_OPTION_KEYS},
                "params": [local for local, _ in fragments],
            }
            for group, fragments in zip(self.param_groups, self._fragments, strict=True)
        ]
        return (
            optimizer_class(groups, **options) if any(group["params"] for group in groups) else None
        )

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
        shared.views.restore()
        shared.topology.barrier()  # no rank reads the parameters any more
        self._publish()
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
        trained = self._shared.trained
        for local, fragment, average in self._averages:
            gradient = trained[fragment.parameter].grad
            if gradient is None:
                local.grad = None
            elif self._gradients.is_average(gradient, fragment.parameter):
                local.grad = average
            else:  # the user has assigned another gradient
                local.grad = self._slice_elements(
                    flat(gradient, trained[fragment.parameter]), fragment
                )
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

    def _slice_elements(self, elements: Tensor, fragment: ParameterFragment) -> Tensor:
        """Return a fragment of a parameter's elements."""
        layout = self._shared.layout
        start = layout.slots[fragment.parameter].start
        size = layout.dtypes[fragment.parameter].itemsize
        return elements[(fragment.start - start) // size : (fragment.end - start) // size]

    def _publish(self) -> None:
        """Publish in-place writes to this rank's slices, so that the step starts from them."""
        shared = self._shared
        if shared.topology.is_owner:
            for bucket in shared.layout.slices(shared.topology.local_rank):
                shared.memory.publish(bucket.start, bucket.end)

    # The state, in the format of the optimizer that is divided.

    def _fragment_states(self) -> list[tuple[ParameterFragment, dict[str, Any]]]:
        """Return the state of each fragment of this rank."""
        if self._inner is None:
            return []
        return [
            (fragment, self._inner.state.get(local, {})) for local, fragment, _ in self._averages
        ]

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole model, in the format of the optimizer that is divided.

        All ranks of a host must call it, and it blocks until they have. Each rank gets the whole
        state; its tensors are in memory that the host holds once.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        states = _collect_states(self._fragment_states(), self._shared)
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
        for local, fragment, _ in self._averages:
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
        return self._slice_elements(flat(value, parameter), fragment).clone()

    def _parameter_order(self) -> list[int]:
        """Return the numbers of the parameters, in the order of the groups."""
        return [
            self._parameter_numbers[id(parameter)]
            for group in self.param_groups
            for parameter in group["params"]
        ]


class _Summary(NamedTuple):
    """A rank's description of the state of a parameter of which it has a fragment."""

    tensors: dict[str, torch.dtype]
    """The dtypes of the tensors that have an element for each element of the parameter."""
    scalars: dict[str, Any]
    """All other values."""


def _collect_states(
    fragments: Sequence[tuple[ParameterFragment, dict[str, Any]]],
    shared: SharedParameters,
) -> dict[int, dict[str, Any]]:
    """Return the whole state of each parameter, by its number; all ranks of the host must call it.

    Args:
        fragments: This rank's fragments, each with its state.
        shared: The parameters of the model.
    """
    summaries = _exchange_summaries(
        {fragment.parameter: _summary(state) for fragment, state in fragments}, shared.topology
    )
    offsets: dict[tuple[int, str], tuple[int, torch.dtype]] = {}
    size = 0
    for number, summary in sorted(summaries.items()):
        for key, dtype in sorted(summary.tensors.items()):
            offsets[number, key] = size, dtype
            size += round_up(shared.trained[number].numel() * dtype.itemsize, ALIGNMENT)
    memory = HostMemory(size, shared.topology)
    for fragment, state in fragments:
        for key, value in state.items():
            if (fragment.parameter, key) in offsets:
                _write_fragment(
                    memory, value, fragment, offsets[fragment.parameter, key], shared.layout
                )
    shared.topology.barrier()
    states = {number: dict(summary.scalars) for number, summary in summaries.items()}
    for (number, key), (start, dtype) in offsets.items():
        parameter = shared.trained[number]
        part = memory.replica(start, start + parameter.numel() * dtype.itemsize, dtype)
        states[number][key] = shaped_like(part, parameter)
    return states


def _summary(state: dict[str, Any]) -> _Summary:
    tensors: dict[str, torch.dtype] = {}
    scalars: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim():
            tensors[key] = value.dtype
        else:
            scalars[key] = value.clone() if isinstance(value, Tensor) else value
    return _Summary(tensors, scalars)


def _exchange_summaries(own: dict[int, _Summary], topology: RankTopology) -> dict[int, _Summary]:
    """Return a summary of each parameter with a state, from the first rank that has a fragment."""
    by_rank: list[dict[int, _Summary]] = [own]
    if topology.host_group is not None:
        by_rank = [{}] * topology.local_size
        dist.all_gather_object(by_rank, own, group=topology.host_group)
    merged: dict[int, _Summary] = {}
    for summaries in by_rank:
        for number, summary in summaries.items():
            if summary.tensors or summary.scalars:
                merged.setdefault(number, summary)
    return merged


def _write_fragment(
    memory: HostMemory,
    value: Tensor,
    fragment: ParameterFragment,
    location: tuple[int, torch.dtype],
    layout: Layout,
) -> None:
    start, dtype = location
    offset_in_parameter = fragment.start - layout.slots[fragment.parameter].start
    first = (
        start + offset_in_parameter // layout.dtypes[fragment.parameter].itemsize * dtype.itemsize
    )
    memory.shared(first, first + value.numel() * dtype.itemsize, dtype).copy_(value)


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
