"""The call site: the innermost frame that belongs neither to torch nor to Phalanx."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from phalanx import _native
from phalanx.backend.call_site import call_site, short_site


def oracle() -> str:
    """Return the caller's file and line, as the interpreter reports them."""
    frame = sys._getframe(1)
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def in_a_generator() -> Iterator[tuple[str, str]]:
    for _ in range(3):
        yield call_site(), oracle()


@torch.no_grad()
def behind_a_decorator_of_torch() -> tuple[str, str]:
    return call_site(), oracle()


class Asks:
    @property
    def place(self) -> tuple[str, str]:
        return call_site(), oracle()

    def __index__(self) -> int:
        """Called by C code, between two of Python's frames."""
        self.seen = call_site(), oracle()
        return 0


def test_innermost_frame_of_the_user() -> None:
    asks = Asks()
    assert [0][asks] == 0
    places = [
        (call_site(), oracle()),
        (lambda: [call_site(), oracle()])(),  # noqa: PLC3002
        *in_a_generator(),
        *[(call_site(), oracle()) for _ in range(2)],
        behind_a_decorator_of_torch(),
        asks.place,
        asks.seen,
        eval("(call_site(), oracle())"),
    ]
    for found, expected in places:
        assert found == expected


def test_frames_of_torch_are_skipped() -> None:
    seen = []
    tensor = torch.ones(1, requires_grad=True)
    tensor.register_hook(lambda _: seen.append((call_site(), oracle())))
    tensor.sum().backward()
    assert seen[0][0] == seen[0][1]
    found = torch.utils._pytree.tree_map(lambda _: (call_site(), oracle()), [0])[0]
    assert found[0] == found[1]


def test_every_line_has_its_own_number() -> None:
    first = _native.call_site()
    second = _native.call_site()
    again = [_native.call_site() for _ in range(3)]
    assert first != second
    assert len(set(again)) == 1
    assert _native.call_site_text(first).startswith(__file__)
    assert _native.call_site_text(0) == _native.call_site_text(2**31) == ""


def test_freed_code_objects() -> None:
    """The memory of a freed code object may be reused: their call sites must not mix."""
    for number in range(500):
        space: dict[str, object] = {"call_site": call_site}
        exec(compile("\n" * number + "found = call_site()", f"cell{number}.py", "exec"), space)
        assert space["found"] == f"cell{number}.py:{number + 1}"


def test_threads() -> None:
    found: list[str] = []
    line = sys._getframe().f_lineno + 1
    thread = threading.Thread(target=lambda: found.append(call_site()))
    thread.start()
    thread.join(60)
    assert found == [f"test_call_site.py:{line}"]


@pytest.mark.parametrize(
    ("site", "expected"),
    [("/a/b/train.py:4", "train.py:4"), ("<stdin>:1", "<stdin>:1"), ("", "an unknown location")],
)
def test_short_site(site: str, expected: str) -> None:
    assert short_site(site) == expected
