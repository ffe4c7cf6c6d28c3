"""All-reduce by point-to-point messages: four classic algorithms, for any backend with send.

Each file is one algorithm: a public function and the steps of one rank. `peers` provides the
primitives of the steps: send, receive, exchange and combine. `operators` provides the functions
that combine two tensors. docs/algorithms.md draws the steps and measures them.
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
"""The algorithms by name, the simplest first."""
