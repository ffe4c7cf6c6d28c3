"""A rank polls the store for the others with few requests."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from phalanx import _native
from phalanx.topology.store_rendezvous import StoreRendezvous, key


class CountingStore:
    """A store that counts requests."""

    def __init__(self, there: set[str]) -> None:
        self._there = there
        self.times = 0

    def check(self, keys: list[str]) -> bool:
        self.times += 1
        assert keys
        return self._there.issuperset(keys)


@given(st.data())
def test_first_missing_rank(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 300))
    absent = data.draw(st.sets(st.integers(0, size - 1), max_size=3))
    known = data.draw(st.integers(0, min(absent, default=size)))
    store = CountingStore({key("rank", rank) for rank in range(size) if rank not in absent})
    joining = _native.GroupFormation("", 0, size, "")
    rendezvous = StoreRendezvous(store, 0, size, time.monotonic(), 1.0, joining, None)  # type: ignore[arg-type]
    keys = [key("rank", rank) for rank in range(size)]
    assert rendezvous._first_missing(keys, known) == min(absent, default=size)
    assert store.times <= 2 * size.bit_length() + 1
    joining.end("ok")
