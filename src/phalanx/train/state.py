"""The contents of the trainer's checkpoints, and the check that a checkpoint fits the run."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from phalanx.errors import UsageError
from phalanx.torch_versions import tree_map_only
from phalanx.train.batch_schedule import BatchSchedule
from phalanx.train.random_generators import random_states, restore_random_states, seed_rank
from phalanx.train.replicas import Replicas, describe_tensor
from phalanx.train.step import Stepper

_MAX_LISTED = 3
# Settings that do not select an optimizer's algorithm. Its implementation may change between runs.
_NON_ALGORITHM_KEYS = {"params", "param_names", "initial_lr", "foreach", "fused", "capturable"}


class TrainingState:
    """The complete training state, captured for a checkpoint and restored from one.

    Args:
        replicas: The model on all ranks.
        stepper: The optimizer and the scaler of the loss.
        schedule: The batch schedule.
        scheduler: A learning rate scheduler, or None.
        seed: The seed for random generators whose state is not in the checkpoint.
    """

    def __init__(
        self,
        replicas: Replicas,
        stepper: Stepper,
        schedule: BatchSchedule,
        scheduler: Any,
        seed: int,
    ) -> None:
        self._replicas, self._stepper, self._schedule = replicas, stepper, schedule
        self._scheduler, self._seed = scheduler, seed

    def capture(self, progress: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state, the same on every rank. Collective.

        Args:
            progress: The trainer's own values.
        """
        # A run that continues and a run that resumes must both use rank 0's buffers.
        self._replicas.broadcast_buffers()
        return {
            **self.capture_replica(),
            "optimizer_spec": self._optimizer_spec(),
            "random": random_states(),
            "progress": dict(progress),
        }

    def capture_replica(self) -> dict[str, Any]:
        """Return the state of this rank. Collective unless the model is a plain module."""
        return {
            "model": self._replicas.state_dict(),
            "optimizer": self._stepper.optimizer.state_dict(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "scaler": self._stepper.scaler.state_dict(),
            "sampler": self._schedule.state_dict(),
        }

    def restore(self, state: Mapping[str, Any], path: object) -> dict[str, Any]:
        """Restore a state, and return the trainer's progress. Collective.

        Args:
            state: The result of `capture`, at this or another world size.
            path: The path of the checkpoint, for messages.

        Raises:
            UsageError: The state belongs to a different model, optimizer or data set, or was not
                saved by a trainer.
        """
        missing = {"model", "optimizer", "sampler", "random", "progress"} - set(state)
        if missing:
            raise UsageError(
                f"{path}: a checkpoint without {', '.join(sorted(missing))} found, expected one "
                "that a Trainer saved: give another directory"
            )
        self._check_model(state["model"], path)
        self._check_optimizer(state, path)
        try:
            self.restore_replica(state)
        except UsageError as error:
            raise UsageError(f"{path} does not match this run: {error}") from None
        progress: dict[str, Any] = state["progress"]
        # Seed first: the checkpoint has no random state for a rank that the saving run lacked.
        seed_rank(self._seed, self._replicas.rank, progress["step"])
        restore_random_states(state["random"])
        return progress

    def restore_replica(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `capture_replica`. Collective unless the model is a plain module.

        Raises:
            UsageError: The data set has a different size, or its order comes from another seed.
        """
        self._schedule.load_state_dict(state["sampler"])
        self._replicas.load_state_dict(state["model"])
        # A tensor of a checkpoint is a view that keeps the whole buffer of the file alive.
        optimizer = tree_map_only(Tensor, Tensor.clone, state["optimizer"])
        self._stepper.optimizer.load_state_dict(optimizer)
        if self._scheduler is not None:
            current = self._scheduler.state_dict()
            self._scheduler.load_state_dict(_restore_types(current, state["scheduler"]))
        if state["scaler"]:
            self._stepper.scaler.load_state_dict(state["scaler"])

    def _optimizer_spec(self) -> dict[str, Any]:
        """Return the optimizer's class, and the names of the parameters in each group."""
        optimizer: Any = self._stepper.optimizer
        names = {id(p): name for name, p in self._replicas.inner.named_parameters()}
        kind = getattr(optimizer, "optimizer_class", type(optimizer))  # of a sharded optimizer
        groups = [[names.get(id(p), "?") for p in g["params"]] for g in optimizer.param_groups]
        return {"class": kind.__name__, "groups": groups}

    def _check_model(self, saved: Mapping[str, Any], path: object) -> None:
        expected = self._replicas.state_dict()
        differences = [
            *_list_names("the checkpoint lacks", sorted(set(expected) - set(saved))),
            *_list_names("this model lacks", sorted(set(saved) - set(expected))),
            *_list_names(
                "they differ in",
                [
                    f"{name} ({_describe_value(saved[name])} saved, {_describe_value(value)} here)"
                    for name, value in expected.items()
                    if name in saved and _describe_value(saved[name]) != _describe_value(value)
                ],
            ),
        ]
        if differences:
            raise UsageError(
                f"{path} has the state of a different model than "
                f"{type(self._replicas.inner).__name__}: {'; '.join(differences)}. Use another "
                "directory for this run, or build the model that was trained"
            )

    def _check_optimizer(self, state: Mapping[str, Any], path: object) -> None:
        """Raise UsageError unless the optimizer, its parameters and the scheduler match."""
        saved = _describe_groups(state["optimizer"]["param_groups"], state.get("optimizer_spec"))
        current = _describe_groups(self._stepper.optimizer.param_groups, self._optimizer_spec())
        if saved != current:
            raise UsageError(
                f"{path} has the state of a different optimizer: {'; '.join(saved)}. Expected "
                f"{'; '.join(current)}: build the optimizer that was used, or give another "
                "directory"
            )
        if (state["scheduler"] is None) != (self._scheduler is None):
            has, wants = ("no", "one") if self._scheduler is not None else ("a", "none")
            raise UsageError(
                f"{path} has {has} scheduler state, expected {wants}: give the scheduler that "
                "was used, or another directory"
            )


def _describe_groups(groups: list[dict[str, Any]], spec: Mapping[str, Any] | None) -> list[str]:
    """Return a description of each parameter group: its class, parameters and settings.

    Only the values of boolean settings are included, as these select a different algorithm.
    """
    described = []
    for number, group in enumerate(groups):
        settings = [
            f"{name}={value}" if isinstance(value, bool) else name
            for name, value in sorted(group.items())
            if name not in _NON_ALGORITHM_KEYS
        ]
        names = spec["groups"][number] if spec else []
        order = f" ({_summarize_names(names)})" if names else ""
        kind = spec["class"] if spec else "an optimizer"
        described.append(
            f"{kind} of {len(group['params'])} parameters{order} with {', '.join(settings)}"
        )
    return described


def _summarize_names(names: list[str]) -> str:
    """Return the first names of some parameters, and a checksum of all names in order."""
    first = ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")
    return f"{first}; order {zlib.crc32(chr(10).join(names).encode()):08x}"


def _restore_types(template: Any, saved: Any) -> Any:
    """Return a saved value with the types of `template`: counters and tuples, saved as others."""
    if isinstance(template, Mapping) and isinstance(saved, Mapping):
        values = {key: _restore_types(template.get(key), value) for key, value in saved.items()}
        return Counter(values) if isinstance(template, Counter) else values
    if isinstance(template, list | tuple) and isinstance(saved, list):
        if len(template) == len(saved):
            saved = [_restore_types(*pair) for pair in zip(template, saved, strict=True)]
        return tuple(saved) if isinstance(template, tuple) else saved
    return saved


def _describe_value(value: Any) -> str:
    return describe_tensor(value) if isinstance(value, Tensor) else type(value).__name__


def _list_names(relation: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return [f"{relation} {', '.join(names[:_MAX_LISTED])}{more}"]
