"""An optimizer whose work and state are divided among the ranks of a host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn, optim

from phalanx.errors import UsageError
from phalanx.parallel.shared_data_parallel import optimizer_state
from phalanx.parallel.shared_data_parallel.layout import Piece
from phalanx.parallel.shared_data_parallel.optimizer_state import NAMING
from phalanx.parallel.shared_data_parallel.parameters import give_back
from phalanx.parallel.shared_data_parallel.views import flat

if TYPE_CHECKING:
    from phalanx.parallel.shared_data_parallel.module import SharedDataParallel

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


class ShardedOptimizer(optim.Optimizer):
    """An optimizer that on each rank updates a slice of the model's parameters in shared memory.

    `SharedDataParallel.optimizer` makes it. The usage is that of the optimizer that it divides:
    `param_groups` are those of the whole model, so that schedulers work, and the step is bitwise
    the same. `state` is empty, since a rank has only slices of the state; `state_dict` returns the
    whole state.
    """

    def __init__(
        self,
        model: SharedDataParallel,
        kind: Callable[..., optim.Optimizer],
        params: Iterable[Any] | None,
        *,
        elementwise: bool,
        **options: Any,
    ) -> None:
        if not elementwise and kind not in ELEMENTWISE:
            known = ", ".join(one.__name__ for one in ELEMENTWISE)
            raise UsageError(
                f"SharedDataParallel.optimizer: {getattr(kind, '__name__', kind)} given, expected one "
                f"that treats each element by itself ({known}): give elementwise=True if it does, "
                "else make it yourself, with model.parameters(), as for DDP"
            )
        self.kind = kind
        """The class of the optimizer that is divided."""
        self._model = model
        self._numbers = {id(owner): number for number, owner in enumerate(model._trained)}
        self._sealed = False
        # A trial instance provides the defaults, and checks the options before anything is made.
        defaults = kind([torch.zeros(1)], **options).defaults
        super().__init__(list(model._trained if params is None else params), defaults)
        self._sealed = True
        self._pieces = self._cut()
        self._inner = self._make(kind, options)
        self._averages: list[tuple[nn.Parameter, Piece, Tensor]] = [
            (owner, piece, model._gradients.average(piece.start, piece.end, piece.parameter))
            for pieces in self._pieces
            for owner, piece in pieces
        ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group during construction, like the base class.

        Raises:
            UsageError: The optimizer is constructed already, or a parameter is not one that the
                model trains.
        """
        if self._sealed:
            raise UsageError(
                "add_param_group: the parameters are divided among the ranks already: make a new "
                "optimizer with model.optimizer(...)"
            )
        super().add_param_group(param_group)
        for owner in self.param_groups[-1]["params"]:
            if id(owner) not in self._numbers:
                raise UsageError(
                    f"SharedDataParallel.optimizer: a parameter {list(owner.shape)} given that isn't of "
                    "this model, or doesn't require a gradient"
                )

    def _cut(self) -> list[list[tuple[nn.Parameter, Piece]]]:
        """Return this rank's pieces of each group's parameters."""
        model = self._model
        group_of = {
            self._numbers[id(owner)]: index
            for index, group in enumerate(self.param_groups)
            for owner in group["params"]
        }
        pieces: list[list[tuple[nn.Parameter, Piece]]] = [[] for _ in self.param_groups]
        places, layout = model._places, model._layout
        for piece in layout.pieces(places.local_rank) if places.owns else []:
            if (index := group_of.get(piece.parameter)) is not None:
                part = model._memory.common(piece.start, piece.end, layout.dtypes[piece.parameter])
                pieces[index].append((nn.Parameter(part), piece))
        return pieces

    def _make(self, kind: Callable[..., optim.Optimizer], options: dict[str, Any]) -> Any:
        """Return the optimizer of this rank's pieces, or None if the rank has none."""
        groups = [
            {
                **{key: value for key, value in group.items() if key not in NAMING},
                "params": [owner for owner, _ in pieces],
            }
            for group, pieces in zip(self.param_groups, self._pieces, strict=True)
        ]
        return kind(groups, **options) if any(group["params"] for group in groups) else None

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
        model = self._model
        model._views.restore()
        model._places.meet()  # no rank reads the parameters any more
        self._publish()
        if self._inner is not None:
            self._update()
        model._places.meet()
        model._memory.drop()
        torch.autograd.graph.increment_version(model._trained)
        return loss

    @torch.no_grad()
    def _update(self) -> None:
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: group[key] for key in inner if key != "params" and key in group})
        trained = self._model._trained
        for owner, piece, average in self._averages:
            gradient = trained[piece.parameter].grad
            if gradient is None:
                owner.grad = None
            elif self._model._gradients.is_average(gradient, piece.parameter):
                owner.grad = average
            else:  # the user has assigned another gradient
                owner.grad = self._part(flat(gradient, trained[piece.parameter]), piece)
        begun = bool(self._inner.state)
        self._step_inside()
        if not begun:  # the new state lies in between memory that gradients have freed
            give_back()

    def _step_inside(self) -> None:
        """Step the inner optimizer without the global step hooks, which run for the outer one."""
        inner, step = self._inner, type(self._inner).step
        own = inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks
        if own or not getattr(step, "hooked", False):
            inner.step()
        else:
            step.__wrapped__(inner)

    def _part(self, elements: Tensor, piece: Piece) -> Tensor:
        """Return a piece of a parameter's elements."""
        layout = self._model._layout
        start = layout.spots[piece.parameter].start
        size = layout.dtypes[piece.parameter].itemsize
        return elements[(piece.start - start) // size : (piece.end - start) // size]

    def _publish(self) -> None:
        """Publish in-place writes to this rank's slices, so that the step starts from them."""
        model = self._model
        if model._places.owns:
            for cut in model._layout.slices(model._places.local_rank):
                model._memory.publish(cut.start, cut.end)

    # The state, in the format of the optimizer that is divided.

    def _states(self) -> list[tuple[Piece, dict[str, Any]]]:
        """Return the state of each piece of this rank."""
        if self._inner is None:
            return []
        return [(piece, self._inner.state.get(owner, {})) for owner, piece, _ in self._averages]

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole model, in the format of the optimizer that is divided.

        All ranks of a host must call it, and it blocks until they have. Each rank gets the whole
        state; its tensors are in memory that the host holds once.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        found = optimizer_state.collect(self._states(), self._model._trained, self._model)
        index = {number: i for i, number in enumerate(self._order())}
        packed = {
            "state": {i: found[n] for n, i in index.items() if n in found},
            "param_groups": [
                {**group, "params": [index[self._numbers[id(owner)]] for owner in group["params"]]}
                for group in self.param_groups
            ],
        }
        for answering in self._optimizer_state_dict_post_hooks.values():
            packed = answering(self, packed) or packed
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
        optimizer_state.check(state_dict, self.param_groups)
        trained = self._model._trained
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: saved[key] for key in saved if key not in NAMING})
        index = {number: i for i, number in enumerate(self._order())}
        states_of = {int(i): state for i, state in state_dict["state"].items()}
        for owner, piece, _ in self._averages:
            whole = states_of.get(index[piece.parameter])
            if whole is None:
                self._inner.state.pop(owner, None)
                continue
            parameter = trained[piece.parameter]
            self._inner.state[owner] = {
                key: self._own_part(key, value, parameter, piece) for key, value in whole.items()
            }
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _own_part(self, key: str, value: Any, parameter: Tensor, piece: Piece) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dim() == 0 and key == "step":
            return value.clone()
        value = value.to(parameter.dtype) if value.is_floating_point() else value
        if value.dim() == 0 and parameter.dim():
            return value.clone()
        return self._part(flat(value, parameter), piece).clone()

    def _order(self) -> list[int]:
        """Return the numbers of the parameters, in the order of the groups."""
        return [
            self._numbers[id(owner)] for group in self.param_groups for owner in group["params"]
        ]
