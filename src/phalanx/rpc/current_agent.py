"""The agent of this process, from `init_rpc` to `shutdown`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from phalanx.errors import UsageError
from phalanx.rpc.codec.autograd_hook import set_autograd_hook

if TYPE_CHECKING:
    from phalanx.rpc.agent import Agent

__all__ = ["DEFAULT_TIMEOUT", "UNSET", "agent", "agent_or_none", "seconds", "set_agent"]

UNSET = -1.0
"""The timeout that stands for the one given to `init_rpc`."""
DEFAULT_TIMEOUT = 60.0
"""The default timeout of a call, in seconds; the same as PyTorch's."""

_agents: list[Agent] = []
_has_left = [False]
_parents: list[Agent] = []
"""Agents of processes that this one was forked from; nothing of theirs may be closed here."""


def agent() -> Agent:
    """Return the agent of this process.

    Raises:
        UsageError: There is no agent.
    """
    if not _agents:
        if _parents:
            raise UsageError(
                f"this process was forked by worker {_parents[-1].info.name!r} and is not a worker "
                "itself; make the calls in that worker"
            )
        raise UsageError(
            "RPC has not been initialized again since this process left it by shutdown()"
            if _has_left[0]
            else "RPC has not been initialized in this process. Current RPC agent is not set! Did "
            "you initialize the RPC framework by calling phalanx.rpc.init_rpc(name)?"
        )
    return _agents[0]


def agent_or_none() -> Agent | None:
    """Return the agent of this process, or None if there is none."""
    return _agents[0] if _agents else None


def set_agent(new: Agent | None) -> None:
    """Set the agent of this process; None removes it."""
    _has_left[0] = new is None
    _agents[:] = [] if new is None else [new]


def _forked() -> None:
    _parents.extend(_agents)
    _agents.clear()
    set_autograd_hook(None)


os.register_at_fork(after_in_child=_forked)


def seconds(timeout: float) -> float:
    """Return the timeout of a call in seconds; 0 means no limit.

    Raises:
        UsageError: The timeout is negative or not a number.
    """
    if timeout == UNSET:
        return agent().timeout
    given: object = timeout
    if not isinstance(given, int | float) or not given >= 0:
        raise UsageError(f"timeout={timeout!r}: expected seconds, or 0 for no limit")
    return float(timeout) if timeout != float("inf") else 0.0
