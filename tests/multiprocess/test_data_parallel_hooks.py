"""Hooks of the optimizer of `SharedDataParallel`, compared with those of a plain optimizer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as hooks

from phalanx.parallel import SharedDataParallel
from tests.ranks import RankServer
from tests.synchronous_sgd import average, preloaded, same, seed, seeded

__all__ = ["preloaded", "seed"]


class HookCalls(list[Any]):
    """The calls of hooks, in order."""

    def hook(self, name: str, result: Any = None) -> Any:
        def record(*arguments: Any) -> Any:
            self.append((name, sorted(arguments[1]["state"]) if "dict" in name else len(arguments)))
            return result(*arguments) if result else None

        return record

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(self.hook("before step"))
        optimizer.register_step_post_hook(self.hook("after step"))
        optimizer.register_state_dict_pre_hook(self.hook("before saving"))
        optimizer.register_state_dict_post_hook(self.hook("saved dict", drop_last_state))
        optimizer.register_state_dict_post_hook(self.hook("first saved dict"), prepend=True)
        optimizer.register_load_state_dict_pre_hook(self.hook("loaded dict", drop_last_state))
        optimizer.register_load_state_dict_post_hook(self.hook("after loading"))


def drop_last_state(_: Any, state: dict[str, Any]) -> dict[str, Any]:
    last = max(state["state"])
    return {**state, "state": {k: v for k, v in state["state"].items() if k != last}, "mine": 3}


class Clamped(torch.optim.SGD):
    """An optimizer that registers a hook on itself."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register_step_post_hook(self.clamp)

    @torch.no_grad()
    def clamp(self, *_: Any) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.clamp_(-0.05, 0.05)


def compare_hooks(seed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    replica = nn.Sequential(nn.Linear(9, 70), nn.Linear(70, 70))
    model = SharedDataParallel(copy.deepcopy(replica))
    inputs = torch.randn(3, 9, generator=seeded(seed))
    calls_by_side: list[HookCalls] = []
    for module, make in ((model, model.optimizer), (replica, None)):
        optimizer: Any = (
            make(torch.optim.Adam, lr=0.01) if make else torch.optim.Adam(module.parameters(), 0.01)
        )
        calls = HookCalls()
        calls.register(optimizer)
        handles = [
            hooks.register_optimizer_step_pre_hook(calls.hook("before any step")),
            hooks.register_optimizer_step_post_hook(calls.hook("after any step")),
        ]
        for _ in range(2):
            optimizer.zero_grad()
            module(inputs).square().mean().backward()
            if module is replica:
                average(replica)
            optimizer.step()
            saved = optimizer.state_dict()
            assert saved["mine"] == 3
            optimizer.load_state_dict(saved)
            assert len(saved["state"]) == 3, "loading must not change the user's dict"
        for handle in handles:
            handle.remove()
        calls_by_side.append(calls)
    assert calls_by_side[0] == calls_by_side[1]
    assert [name for name, _ in calls_by_side[0][:4]] == [
        "before any step",
        "before step",
        "after step",
        "after any step",
    ]
    assert calls_by_side[0][5:8] == [
        ("first saved dict", [0, 1, 2, 3]),
        ("saved dict", [0, 1, 2, 3]),
        ("loaded dict", [0, 1, 2]),
    ]
    for one, other in zip(model.parameters(), replica.parameters(), strict=True):
        assert same(one.detach(), other.detach())

    model.optimizer(Clamped, lr=0.01, elementwise=True).step()
    Clamped(replica.parameters(), lr=0.01).step()
    for one, other in zip(model.parameters(), replica.parameters(), strict=True):
        assert same(one.detach(), other.detach())
        assert other.abs().max() <= 0.05


def test_optimizer_hooks_equal_those_of_plain_optimizer(ranks: RankServer, seed: int) -> None:
    ranks.run(2, compare_hooks, seed)
