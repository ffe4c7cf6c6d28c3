"""Plans: operations and groups, drawn from a seed, the same on every rank."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from random import Random

from phalanx import _native
from tests.conformance import cases

# Number of operations after which all works are awaited and groups are formed anew.
CHAPTER = 500
SUB_GROUPS = 3
# Maximum number of bytes that a rank passes to one operation.
LARGEST = 8 * 2**20
# Sizes in bytes at which the core changes its algorithm.
LIMITS = (_native.SMALL_BYTES, _native.RING_BYTES, _native.CHUNK_BYTES, 2**20)

# Relative frequency of each kind.
WEIGHTS = {
    "all_reduce": 12,
    "reduce": 6,
    "broadcast": 7,
    "gather": 5,
    "scatter": 5,
    "all_gather": 5,
    "all_gather_uneven": 4,
    "all_gather_single": 6,
    "reduce_scatter": 5,
    "reduce_scatter_uneven": 4,
    "reduce_scatter_single": 6,
    "all_to_all": 5,
    "all_to_all_uneven": 4,
    "all_to_all_single": 6,
    "all_to_all_single_uneven": 4,
    "all_reduce_coalesced": 3,
    "all_gather_coalesced": 3,
    "coalescing_all_reduce": 3,
    "coalescing_all_gather": 3,
    "coalescing_reduce_scatter": 3,
    "coalescing_any": 3,
    "barrier": 2,
    "monitored_barrier": 1,
    "broadcast_objects": 1,
    "all_gather_object": 1,
    "gather_object": 1,
    "scatter_objects": 1,
    "send_objects": 1,
    "message": 14,
    "exchange": 6,
    "any_source": 4,
}
MESSAGES = {"message", "exchange", "any_source", "send_objects"}
REDUCTIONS = {name for name in WEIGHTS if "reduce" in name}
ROOTED = {"reduce", "broadcast", "gather", "scatter"} | {
    name for name in WEIGHTS if name.endswith(("_object", "_objects"))
} - {"all_gather_object"}
IN_PARTS = {name for name in WEIGHTS if "gather" in name or "scatter" in name or "to_all" in name}
WITHOUT_TENSORS = {name for name in WEIGHTS if "object" in name or "barrier" in name}

_KINDS = list(WEIGHTS)
_CUMULATED = list(itertools.accumulate(WEIGHTS.values()))


@dataclass(frozen=True)
class Operation:
    """An operation of a group; further parameters are drawn from its own `seed`."""

    number: int
    kind: str
    group: int
    """Index of the group in the chapter; 0 is the world."""
    members: tuple[int, ...]
    dtype: str
    count: int
    """Number of elements of a tensor, or of each part if there is one for each rank."""
    reduction: str
    root: int
    """Group rank of the root; -1 if the kind has no root."""
    asynchronous: bool
    seed: str

    def __str__(self) -> str:
        words = [self.kind]
        if self.kind not in WITHOUT_TENSORS:
            words.append(f"{self.dtype}[{self.count}]")
        if self.reduction:
            words.append(self.reduction)
        if self.root >= 0:
            words.append(f"root {self.members[self.root]}")
        words.append(f"in ranks {list(self.members)}")
        if self.asynchronous:
            words.append("asynchronously")
        return " ".join(words)


class Plan:
    """The operations of a seed for a world of `ranks`.

    Args:
        seed: Any integer.
        ranks: World size.
        kinds: Kinds to run, all if empty; the others are skipped.
    """

    def __init__(self, seed: int, ranks: int, kinds: tuple[str, ...] = ()) -> None:
        self.seed = seed
        self.ranks = ranks
        self.kinds = frozenset(kinds or WEIGHTS)
        self._drawn: dict[int, list[tuple[int, ...]]] = {}

    def groups(self, chapter: int) -> list[tuple[int, ...]]:
        """Return the ranks of each group of a chapter, the world first; groups may overlap."""
        if chapter not in self._drawn:
            random = Random(f"{self.seed} {self.ranks} groups {chapter}")
            world = tuple(range(self.ranks))
            subsets = [
                tuple(sorted(random.sample(world, random.randint(1, self.ranks))))
                for _ in range(SUB_GROUPS)
            ]
            self._drawn = {chapter: [world, *subsets]}
        return self._drawn[chapter]

    def operation(self, number: int) -> Operation | None:
        """Return operation `number`; None if its kind is not selected or needs a second rank."""
        seed = f"{self.seed} {self.ranks} {number}"
        random = Random(seed)
        kind = random.choices(_KINDS, cum_weights=_CUMULATED)[0]
        groups = self.groups(number // CHAPTER)
        group = random.choice((0, 0, *range(1, len(groups))))
        if kind in MESSAGES and len(groups[group]) == 1:
            group = 0
        size = len(groups[group])
        if kind not in self.kinds or (kind in MESSAGES and size == 1):
            return None
        dtype = random.choice(list(cases.DTYPES))
        return Operation(
            number=number,
            kind=kind,
            group=group,
            members=groups[group],
            dtype=dtype,
            count=draw_count(random, dtype, size if kind in IN_PARTS else 1, size),
            reduction=draw_reduction(random, dtype) if kind in REDUCTIONS else "",
            root=random.randrange(size) if kind in ROOTED else -1,
            asynchronous=random.random() < 0.5 and kind not in WITHOUT_TENSORS - {"barrier"},
            seed=seed,
        )


def draw_reduction(random: Random, dtype: str) -> str:
    names = cases.operators(dtype)
    floating = dtype in cases.FLOATS or dtype in cases.COMPLEX
    return random.choice((*names, "PREMUL_SUM") if floating else names)


def draw_count(random: Random, dtype: str, parts: int, ranks: int) -> int:
    """Draw a number of elements: mostly few, often near a limit of the core, rarely millions."""
    width = cases.DTYPES[dtype].itemsize
    roll = random.random()
    if roll < 0.05:
        return 0
    if roll < 0.12:
        return 1
    if roll < 0.50:
        return random.randint(2, 300)
    if roll < 0.75:
        return int(math.exp(random.uniform(math.log(300), math.log(5000))))
    if roll < 0.90:
        near = random.choice(LIMITS) // width // random.choice((1, parts, ranks))
        count = near + random.choice((-1, 0, 1))
    else:
        low, high = (2**15, 2**20) if roll < 0.995 else (2**20, LARGEST)
        count = int(math.exp(random.uniform(math.log(low), math.log(high)))) // width
    return min(count, LARGEST // width // parts)
