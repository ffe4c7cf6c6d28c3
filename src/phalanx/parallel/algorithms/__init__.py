"""All-reduce out of nothing but messages: four classic algorithms, on any backend that can send.

Each file is one algorithm: a public function, and below it the steps that one rank takes, which are
all there is to it. `peers` has what the steps are made of: send, receive, both at once, combine.
`operators` says what to combine with. docs/algorithms.md draws the steps and measures them.
"""

from collections.abc import Callable

from phalanx.parallel.algorithms.halving_doubling import halving_doubling_all_reduce
from phalanx.parallel.algorithms.ring import ring_all_reduce
from phalanx.parallel.algorithms.ring_simple import ring_all_reduce_simple
from phalanx.parallel.algorithms.tree import tree_all_reduce

__all__ = [
    "ALGORITHMS",
    "halving_doubling_all_reduce",
    "ring_all_reduce",
    "ring_all_reduce_simple",
    "tree_all_reduce",
]

ALGORITHMS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        ring_all_reduce_simple,
        ring_all_reduce,
        halving_doubling_all_reduce,
        tree_all_reduce,
    )
}
"""By name, from the plainest on."""
