"""Counts of references to values that workers own."""

from __future__ import annotations

import pytest

from phalanx.rpc.reference_counting import OwnedValues, RefCountDelta, RRefId

RREF = RRefId(1, 7)


@pytest.mark.parametrize("holder", [0, 1, 2])
def test_a_value_that_is_awaited_is_kept_for_its_creation(holder: int) -> None:
    values = OwnedValues()
    values.apply(RefCountDelta(RREF, holder, 1))
    awaited = values.get_or_create(RREF)
    assert values.apply(RefCountDelta(RREF, holder, -1)) is None
    created = values.begin(RREF, 1)
    assert created is awaited
    assert values.apply(RefCountDelta(RREF, 1, -1)) is created
    assert len(values) == 0


def test_references_to_what_nobody_awaits_leave_nothing() -> None:
    values = OwnedValues()
    for amount in (1, -1):
        values.apply(RefCountDelta(RREF, 2, amount))
    assert len(values) == 0


def test_all_references_end_before_the_creation() -> None:
    values = OwnedValues()
    values.apply(RefCountDelta(RREF, 1, -1))
    assert len(values) == 1
    values.begin(RREF, 1).set_result(3)
    assert len(values) == 0
