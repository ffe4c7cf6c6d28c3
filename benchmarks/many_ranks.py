"""Cache lines that cross caches, nodes and sockets, for many ranks on a host: a simulation.

    python benchmarks/many_ranks.py [--output FILE]

No machine with many cores is at hand, so this counts instead of measuring. Ranks fill the cores of
published machines in order. Collectives are played as reads and writes of cache lines, once as the
core does them in small groups (*flat*: every rank looks at every other), once over a *tree* of the
machine, as it meets and reduces little data in groups of 32 ranks and more: ranks that share a
cache first, then the caches of a node, the nodes of a socket, the sockets. Large data are reduced
over the chain of caches then, in the order of ranks. Broadcasts over trees are simulated only. For
every read the simulation finds the nearest cache that holds the line, and counts by the boundary
between them. A write leaves the line in the writer's cache alone.

The model has one cache per group of cores that share their last level, large enough for the chunk
in progress; the private caches within it are not modelled. Rings and entries are reused as in the
core, and the figures are those of a collective after some others.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from phalanx.topology import places

places.MIN_RANKS = 2
BOUNDARIES = ("cache", "node", "socket")
LINE = 64
WAYS = ("flat", "tree")
ENTRIES = 4  # of a rank, used in turns (kEntries)
PAYLOAD = 24  # the most bytes in an entry (kEntryPayload)
SMALL = 16 * 1024  # the most bytes that move up in blocks (kSmallBytes)
DATA = 1024  # bytes of the all-reduce of which every rank reads all data


@dataclass(frozen=True)
class Machine:
    """A machine: sockets of nodes of caches of cores."""

    name: str
    sockets: int
    nodes: int  # per socket
    caches: int  # per node
    cores: int  # per cache

    def place(self, rank: int) -> tuple[int, int, int]:
        """Return the socket, the node and the cache of a rank, each counted over the machine."""
        cache = rank // self.cores
        node = cache // self.caches
        return node // self.nodes, node, cache

    @property
    def size(self) -> int:
        """The number of cores."""
        return self.sockets * self.nodes * self.caches * self.cores


# From the vendors' data sheets: cores per last-level cache, and nodes per socket as configured.
MACHINES = (
    Machine("2 x EPYC 7763 (Milan), NPS1", 2, 1, 8, 8),
    Machine("2 x EPYC 9654 (Genoa), NPS4", 2, 4, 3, 8),
    Machine("2 x EPYC 9754 (Bergamo), NPS1", 2, 1, 16, 8),
    Machine("2 x Xeon 8480+ (Sapphire Rapids)", 2, 1, 1, 56),
    Machine("2 x Altra Max M128", 2, 1, 1, 128),
)


class Memory:
    """The caches that hold each line, and the lines that have crossed each boundary."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._holders: dict[Hashable, set[tuple[int, int, int]]] = {}
        self.crossed: Counter[int] = Counter()

    def read(self, rank: int, line: Hashable) -> None:
        """Have a rank read a line, from the nearest cache that holds it."""
        place = self._machine.place(rank)
        holders = self._holders.setdefault(line, {place})
        if place in holders:
            return
        self.crossed[min(_boundary(place, each) for each in holders)] += 1
        holders.add(place)

    def write(self, rank: int, line: Hashable) -> None:
        """Have a rank write a line, of which no other cache keeps a copy."""
        self._holders[line] = {self._machine.place(rank)}


def _lines(size: int) -> int:
    """Return the cache lines of data that aren't in the entry."""
    return 0 if size <= PAYLOAD else -(-size // LINE)


def _boundary(one: tuple[int, int, int], other: tuple[int, int, int]) -> int:
    """Return the index of the outermost boundary between two places."""
    return 2 if one[0] != other[0] else 1 if one[1] != other[1] else 0


class Play:
    """The accesses of ranks in a sequence of collectives."""

    def __init__(self, machine: Machine, ranks: int) -> None:
        self.memory = Memory(machine)
        self.ranks = range(ranks)
        self.number = 0
        where = [machine.place(rank) for rank in self.ranks]
        self._parents = places.meeting_tree(where)
        first_ranks = places.cache_chain(where) if self._parents else []
        self._caches = [
            range(begin, end) for begin, end in itertools.pairwise([*first_ranks, ranks])
        ]

    def meet(self, size: int, *, tree: bool) -> None:
        """Every rank publishes an entry and `size` bytes, and gets the sum of all."""
        self.number += 1
        if tree and self._parents:
            self._meet_over_tree(size)
            return
        for rank in self.ranks:
            self._publish("entry", rank, 1 + _lines(size))
        for rank, peer in itertools.product(self.ranks, self.ranks):
            self._take("entry", rank, peer, 1 + _lines(size))

    def _meet_over_tree(self, size: int) -> None:
        """As Collective::enter_tree, pass_up, await_parent, pass_down and reduce_over_tree."""
        below = [1] * len(self.ranks)
        in_blocks = size * len(self.ranks) <= SMALL
        for rank in self.ranks:
            self._publish("entry", rank, 1 + _lines(size))
        for rank in reversed(self.ranks[1:]):
            parent = self._parents[rank]
            block = _lines(size * below[rank]) if in_blocks else 0
            self._publish("step", rank, 1)
            self._publish("block", rank, block)
            self._take("entry", parent, rank, 1)
            self._take("step", parent, rank, 1)
            self._take("block", parent, rank, block)
            below[parent] += below[rank]
        for rank in self.ranks[1:] if not in_blocks else ():
            self._take("entry", 0, rank, 1 + _lines(size))
        # The result takes the place of the parent's own data, in its entry if it fits there.
        result = max(1, _lines(size))
        for parent in sorted({*self._parents} - {-1}):
            self._publish("down", parent, 1)
            self._publish("result", parent, result)
        for rank in self.ranks[1:]:
            parent = self._parents[rank]
            self._take("entry", rank, parent, 1)
            self._take("down", rank, parent, 1)
            self._take("result", rank, parent, result)

    def broadcast(self, lines: int, *, tree: bool) -> None:
        """Rank 0 publishes an entry and `lines` of data, which all others read."""
        self.number += 1
        if not tree:
            self._publish("entry", 0, 1 + lines)
            for rank in self.ranks[1:]:
                self._take("entry", rank, 0, 1 + lines)
            return
        for parent in sorted({*self._parents} - {-1}):
            self._publish("entry", parent, 1 + lines)
        for rank in self.ranks[1:] if self._parents else ():
            self._take("entry", rank, self._parents[rank], 1 + lines)

    def reduce_slices(self, *, tree: bool) -> None:
        """The data of a large all-reduce, as SlicedReduction: a chunk of a line per rank."""
        self.number += 1
        caches = self._caches if tree and self._caches else [self.ranks]
        slices = max(map(len, caches))
        for line in self.ranks:
            part = line * slices // len(self.ranks)
            owners = [group[part * len(group) // slices] for group in caches]
            for rank in self.ranks:
                if rank not in owners:
                    self._write_chunk(rank, line)
            # The owner of each cache combines the data of its ranks with those of the cache before.
            for group, owner, before in zip(caches, owners, [None, *owners], strict=False):
                for rank in group if before is None else (before, *group):
                    if rank != owner:
                        self._read_chunk(owner, rank, line)
                self._write_chunk(owner, line)
            for rank in self.ranks:
                self._read_chunk(rank, owners[-1], line)

    def _publish(self, kind: Hashable, rank: int, lines: int) -> None:
        for line in range(lines):
            self.memory.write(rank, (kind, rank, self.number % ENTRIES, line))

    def _take(self, kind: Hashable, rank: int, peer: int, lines: int) -> None:
        for line in range(lines):
            self.memory.read(rank, (kind, peer, self.number % ENTRIES, line))

    # Two chunks have a place in a rank's piece of its ring.
    def _write_chunk(self, rank: int, line: int) -> None:
        self.memory.write(rank, ("chunk", rank, self.number % 2, line))

    def _read_chunk(self, rank: int, peer: int, line: int) -> None:
        self.memory.read(rank, ("chunk", peer, self.number % 2, line))


COLLECTIVES: dict[str, Callable[[Play, bool], None]] = {
    "barrier, all_reduce 4 B": lambda play, tree: play.meet(4, tree=tree),
    "all_reduce 1 KiB": lambda play, tree: play.meet(DATA, tree=tree),
    "broadcast 1 KiB": lambda play, tree: play.broadcast(DATA // LINE, tree=tree),
    "all_reduce, large": lambda play, tree: play.reduce_slices(tree=tree),
}


def count(machine: Machine, ranks: int, collective: str, *, tree: bool) -> list[float]:
    """Return the lines that cross each boundary; for large data per line of a rank's tensor."""
    play = Play(machine, ranks)
    run = COLLECTIVES[collective]
    for _ in range(ENTRIES + 1):
        run(play, tree)
    play.memory.crossed.clear()
    run(play, tree)
    scale = ranks if "large" in collective else 1
    return [play.memory.crossed[index] / scale for index in range(len(BOUNDARIES))]


def sizes(machine: Machine) -> Sequence[int]:
    return [ranks for ranks in (8, 16, 32, 64, 128, 256) if ranks <= machine.size]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    console = Console()
    rows = []
    for machine, collective in itertools.product(MACHINES, COLLECTIVES):
        table = Table(title=f"{machine.name}: {collective}", title_justify="left")
        for column in ("ranks", *(f"{way}, {each}" for each in BOUNDARIES for way in WAYS)):
            table.add_column(column, justify="right")
        for ranks in sizes(machine):
            figures = {way: count(machine, ranks, collective, tree=way == "tree") for way in WAYS}
            rows.append(
                {"machine": machine.name, "collective": collective, "ranks": ranks, **figures}
            )
            cells = (f"{figures[way][index]:,.4g}" for index in range(3) for way in WAYS)
            table.add_row(str(ranks), *cells)
        console.print(table)
    if options.output:
        options.output.write_text(json.dumps({"boundaries": BOUNDARIES, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
