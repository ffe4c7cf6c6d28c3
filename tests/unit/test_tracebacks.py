"""Short texts of uncaught exceptions: folded tracebacks, and lines for consequences."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

import pytest
import torch

from phalanx.errors import Aborted, CollectiveMismatch, PeerLost, PhalanxError
from phalanx.recorder.exception_hook import describe_consequence, shorten
from phalanx.system.tracebacks import format_folded

LOST = "[rank 0/2 on node] all_reduce #3 float32[4] SUM at train.py:12: rank 1 (pid 7) has died"


def catch(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def fail_in_torch() -> None:
    torch.nn.Sequential(torch.nn.Linear(4, 2))(torch.ones(3, 5))


def raise_from(error: BaseException, cause: BaseException) -> None:
    raise error from cause


def test_a_run_of_frames_inside_torch_is_a_line() -> None:
    error = catch(fail_in_torch)
    whole = traceback.format_exception(error)
    text = format_folded(error)
    inside = [line for line in whole if f'File "{torch.__path__[0]}' in line]
    assert len(inside) > 3
    last = traceback.extract_tb(error.__traceback__)[-1]
    lines = text.splitlines()
    expected = (
        f"  ... {len(inside)} frames inside torch, the last in forward (linear.py:{last.lineno})"
    )
    assert f"{expected} ..." in lines
    own = "".join(line for line in whole if line not in inside)
    assert "".join(f"{line}\n" for line in lines if not line.startswith("  ...")) == own


def test_without_libraries_the_text_is_that_of_python() -> None:
    cause = catch(lambda: 1 // 0)
    error = catch(lambda: raise_from(KeyError("a"), cause))
    assert format_folded(error) == "".join(traceback.format_exception(error))


def test_causes_are_folded_too() -> None:
    error = catch(lambda: raise_from(KeyError("a"), catch(fail_in_torch)))
    text = format_folded(error)
    assert "frames inside torch" in text
    assert "The above exception was the direct cause" in text
    assert torch.__path__[0] not in text


if sys.version_info >= (3, 11):

    def test_exceptions_of_a_group_are_folded() -> None:
        group = ExceptionGroup("several", [catch(fail_in_torch)])  # noqa: F821
        assert torch.__path__[0] not in format_folded(group)


def test_a_traceback_without_frames_of_the_program_is_whole() -> None:
    error = catch(fail_in_torch)
    while error.__traceback__ and not error.__traceback__.tb_frame.f_code.co_filename.startswith(
        torch.__path__[0]
    ):
        error.__traceback__ = error.__traceback__.tb_next
    assert format_folded(error) == "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            PeerLost(LOST, ranks=[1]),
            "PeerLost: all_reduce #3 float32[4] SUM at train.py:12: rank 1 (pid 7) has died",
        ),
        (
            RuntimeError(f"Cannot extract tensors from value: PeerLost: {LOST}\n\nAt:\n  a.py(1)"),
            "PeerLost: all_reduce #3 float32[4] SUM at train.py:12: rank 1 (pid 7) has died",
        ),
        (PeerLost("rank 1 has died\nmore", ranks=[1]), "PeerLost: rank 1 has died"),
        (PeerLost("", ranks=[1]), "PeerLost: "),
        (CollectiveMismatch("ranks 0 and 1 disagree", ranks=[0, 1]), ""),
        (
            CollectiveMismatch("ranks 1 and 2 disagree", ranks=[1, 2]),
            "CollectiveMismatch: ranks 1 and 2 disagree",
        ),
        (Aborted("aborted by rank 0", ranks=[0]), ""),
        (PeerLost("ranks unknown"), ""),
        (PhalanxError("another one", ranks=[1]), ""),
        (RuntimeError("a failure: with a colon: in it"), ""),
        (ValueError("loss"), ""),
    ],
)
def test_consequences(error: Exception, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert describe_consequence(error) == expected
    assert shorten(error) == (f"{expected}\n" if expected else format_folded(error))


def test_a_consequence_names_the_line_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")

    def lose() -> None:
        raise PeerLost("worker 'ps1' has died", ranks=[1])

    line = lose.__code__.co_firstlineno + 1
    expected = f"PeerLost: worker 'ps1' has died (at test_tracebacks.py:{line} in lose)"
    assert describe_consequence(catch(lose)) == expected


def test_a_line_refers_to_the_traceback_of_another_rank() -> None:
    def compute() -> None:
        raise ValueError("loss\nis not a number")

    line = compute.__code__.co_firstlineno + 1
    site = f"at test_tracebacks.py:{line} in compute"
    error = catch(compute)
    seen: list[str] = []
    assert shorten(error, lambda text: seen.append(text) or "") == format_folded(error)
    assert seen == [format_folded(error)]
    assert shorten(error, lambda _: "3") == f"ValueError: loss ({site}, as on rank 3)\n"
    assert shorten(ValueError("raised nowhere"), lambda _: "3") == (
        "ValueError: raised nowhere (as on rank 3)\n"
    )
    # A line of a consequence stays as it is.
    assert shorten(PeerLost(LOST, ranks=[1]), lambda _: "3") == shorten(PeerLost(LOST, ranks=[1]))


def test_an_error_that_follows_an_own_one_is_no_consequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that fails, and loses its peers while it cleans up, must show why it failed."""
    monkeypatch.setenv("RANK", "0")

    def clean_up() -> None:
        try:
            raise ValueError("loss is not a number")
        finally:
            raise PeerLost(LOST, ranks=[1])

    error = catch(clean_up)
    assert describe_consequence(error) == ""
    assert "ValueError: loss is not a number" in shorten(error)
    error.__suppress_context__ = True  # as by `raise ... from None`
    assert describe_consequence(error) != ""
    other = catch(lambda: raise_from(PeerLost(LOST, ranks=[1]), PeerLost(LOST, ranks=[1])))
    assert describe_consequence(other) != ""
