"""Display of the results: a line for each size and system, a column for each algorithm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.bench.algorithms.record import fastest_algorithm
from phalanx.bench.operations import ALGORITHMS
from phalanx.bench.plan import Variant, format_size
from phalanx.bench.table import Display, format_timing

if TYPE_CHECKING:
    from phalanx.bench.results import Result

__all__ = ["SHORT", "AlgorithmsDisplay"]

SHORT = {
    "": "own",
    "ring_all_reduce_simple": "ring, simple",
    "ring_all_reduce": "ring",
    "halving_doubling_all_reduce": "halving",
    "tree_all_reduce": "tree",
}
"""Short names of the algorithms, for the table."""


class AlgorithmsDisplay(Display):
    """A display of a run of `--algorithms`, for one world size."""

    legend = (
        "all take turns\n"
        "own: the backend's all_reduce; the others are those of phalanx.parallel, by messages\n"
        "fastest: the fastest of the latter on that system"
    )

    def header(self) -> list[str]:
        """Return the headings of the columns."""
        return ["size", "system", *SHORT.values(), "fastest"]

    def widths(self) -> list[int]:
        """Return the widths of the columns for output without a terminal."""
        return [8, 14, *(13 for _ in SHORT), 12]

    def rows(self, result: Result, *, wide: bool) -> list[list[str]]:
        """Return a line for each system that has timings."""
        lines = []
        for system in self._systems:
            labels = [Variant(system, name).label for name in ("", *ALGORITHMS)]
            timings = [result.timings.get(label) for label in labels]
            if any(timings):
                cells = [format_timing(each, wide=wide) for each in timings]
                best = SHORT[fastest_algorithm(result, system) or ""]
                lines.append([format_size(result.size), system, *cells, best])
        return lines
