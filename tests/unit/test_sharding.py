"""What each rank writes of a state: every part under a key of its own."""

from __future__ import annotations

from itertools import chain

from hypothesis import example, given
from hypothesis import strategies as st

from phalanx.train.checkpoints.sharding import Held, share_out

# Names that look like parts of others.
names = st.text("ab[]0,.", max_size=5) | st.sampled_from(["a", "a[0]", "a[2]", "a[2][]", "a[]"])
held = st.builds(
    Held,
    st.just("F32"),
    st.lists(st.integers(0, 6), max_size=2).map(tuple),
    st.none(),
)


@given(state=st.dictionaries(names, held, min_size=1, max_size=6), ranks=st.integers(1, 4))
@example(
    state={"a": Held("F32", (4,), None), "a[2]": Held("F32", (2,), None)},
    ranks=2,
)
def test_no_two_parts_have_one_key(state: dict[str, Held], ranks: int) -> None:
    pieces = list(chain(*share_out([state] * ranks)))
    keys = [piece.key for piece in pieces]
    assert len(set(keys)) == len(keys)
    # They are all of the state, each element once.
    for name, whole in state.items():
        sizes = [piece.box.size for piece in pieces if piece.name == name]
        assert sum(sizes) == whole.whole.size
        assert sizes
