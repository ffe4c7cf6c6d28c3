"""Functions and classes in messages of `phalanx.rpc`: by reference or by value."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.rpc import calls
from phalanx.rpc.autograd.gradients import Root
from phalanx.rpc.pickling import PickleContext, deserialize, serialize


def send(value: object) -> Any:
    """Return a value as it arrives on another worker that runs another program."""
    context = PickleContext(SimpleNamespace(id=1, same_main=False), None)  # type: ignore[arg-type]
    return deserialize(serialize(value, context, "the value"), [], context)


@pytest.mark.parametrize("value", [calls.rpc_sync, Root, Root(1, 2)])
def test_own_names_are_sent_by_reference(value: object) -> None:
    sent = send(value)
    assert sent == value
    assert sent is value or isinstance(value, Root)


def test_function_that_bears_an_own_name_is_sent_by_value() -> None:
    """`functools.wraps` copies the module and the name of the function that it wraps."""

    @functools.wraps(calls.is_available)
    def wrapped() -> str:
        return f"wrapped {calls.is_available()}"

    assert wrapped.__module__ == "phalanx.rpc.calls"
    assert send(wrapped)() == "wrapped True"


def test_function_without_a_module_is_sent_by_value() -> None:
    def nameless() -> int:
        return 3

    nameless.__module__ = None  # type: ignore[assignment]
    assert send(nameless)() == 3
