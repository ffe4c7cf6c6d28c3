"""This process's agent, from `init_rpc` to `shutdown`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from phalanx.errors import UsageError
from phalanx.rpc import seam

if TYPE_CHECKING:
    from phalanx.rpc.agent import Agent

__all__ = ["DEFAULT_TIMEOUT", "UNSET", "agent", "agent_or_none", "seconds", "set_agent"]

UNSET = -1.0
"""As a timeout: what `init_rpc` was given."""
DEFAULT_TIMEOUT = 60.0
"""Seconds that a call may take, if nothing else is said; PyTorch's."""

_agents: list[Agent] = []
_left = [False]
_parents: list[Agent] = []
"""Those of processes that this one was forked off from: nothing of theirs may be closed here."""


def agent() -> Agent:
    """The agent.

    Raises:
        UsageError: There is none.
    """
    if not _agents:
        if _parents:
            raise UsageError(
                f"this process was forked off by worker {_parents[-1].info.name!r}: it is none "
                "itself; let the worker make the calls"
            )
        raise UsageError(
            "this process has left RPC by shutdown: no calls after it"
            if _left[0]
            else "this process is no worker yet: call phalanx.rpc.init_rpc(name) first"
        )
    return _agents[0]


def agent_or_none() -> Agent | None:
    """The agent, None if there is none."""
    return _agents[0] if _agents else None


def set_agent(new: Agent | None) -> None:
    """Begin or end."""
    _left[0] = new is None
    _agents[:] = [] if new is None else [new]


def _forked() -> None:
    _parents.extend(_agents)
    _agents.clear()
    seam.set_graph(None)


os.register_at_fork(after_in_child=_forked)


def seconds(timeout: float) -> float:
    """How long a call may take; 0: any time.

    Raises:
        UsageError: The timeout is negative or no number.
    """
    if timeout == UNSET:
        return agent().timeout
    given: object = timeout
    if not isinstance(given, int | float) or not given >= 0:
        raise UsageError(f"timeout={timeout!r}: expected seconds, or 0 for no limit")
    return float(timeout) if timeout != float("inf") else 0.0
