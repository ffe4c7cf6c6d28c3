"""The shards of a state that each rank writes, with unique keys."""

from __future__ import annotations

from itertools import chain

from hypothesis import example, given
from hypothesis import strategies as st

from phalanx.checkpoints.sharding import TensorDescription, assign_shards

# Names that look like keys of shards.
names = st.text("ab[]0,.", max_size=5) | st.sampled_from(["a", "a[0]", "a[2]", "a[2][]", "a[]"])
descriptions = st.builds(
    TensorDescription,
    st.just("F32"),
    st.lists(st.integers(0, 6), max_size=2).map(tuple),
    st.none(),
)


@given(state=st.dictionaries(names, descriptions, min_size=1, max_size=6), ranks=st.integers(1, 4))
@example(
    state={"a": TensorDescription("F32", (4,), None), "a[2]": TensorDescription("F32", (2,), None)},
    ranks=2,
)
def test_keys_are_unique(state: dict[str, TensorDescription], ranks: int) -> None:
    shards = list(chain(*assign_shards([state] * ranks)))
    keys = [shard.key for shard in shards]
    assert len(set(keys)) == len(keys)
    # The shards cover each element of the state once.
    for name, description in state.items():
        sizes = [shard.box.size for shard in shards if shard.name == name]
        assert sum(sizes) == description.whole.size
        assert sizes
