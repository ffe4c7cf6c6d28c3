"""How each all-reduce of `phalanx.parallel` moves data, drawn from its own code.

    python benchmarks/algorithm_pictures.py docs/algorithms

The steps of an algorithm run here on threads, with queues for messages, on tensors in which every
element says whose parts it holds: rank r begins with bit r, and parts are combined by OR. What was
sent when is then put in order, and drawn: a row for each rank, a column for each step. So the
pictures are of the code as it is. tests/unit/test_algorithm_costs.py counts the same messages.
"""

from __future__ import annotations

import argparse
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phalanx.parallel.algorithms.halving_doubling import halving_doubling_steps
from phalanx.parallel.algorithms.peers import Peers, Steps
from phalanx.parallel.algorithms.ring import ring_steps
from phalanx.parallel.algorithms.ring_simple import ring_simple_steps
from phalanx.parallel.algorithms.tree import tree_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEPS: dict[str, Steps] = {
    "ring_all_reduce_simple": ring_simple_steps,
    "ring_all_reduce": ring_steps,
    "halving_doubling_all_reduce": halving_doubling_steps,
    "tree_all_reduce": tree_steps,
}
PICTURES = (*((name, 4) for name in STEPS), ("halving_doubling_all_reduce", 3))
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
COUNT = 4  # elements of the tensor in a picture
LIMIT = 30.0  # seconds for a message
CELL, GAP, ROW = 0.34, 0.9, 0.62  # inches: a slice, between columns, from rank to rank


@dataclass(frozen=True)
class Message:
    """One message: elements `start` to `end` of the tensor, with the parts that each has in it."""

    source: int
    to: int
    start: int
    end: int
    parts: tuple[int, ...]
    left: int
    """Which of the sender's events this was, from 0 on."""
    came: int = -1
    """Which of the receiver's events this was."""
    step: int = 0
    """When it travelled: messages of one step travel at the same time."""


Boxes = dict[tuple[int, int], "queue.Queue[Message]"]
"""What is on its way, by sender and receiver."""


class Recorder(Peers):
    """The other ranks, as threads of this process; keeps every message."""

    def __init__(self, rank: int, size: int, count: int, boxes: Boxes) -> None:
        """Be a rank of so many, for a tensor of so many elements."""
        self.rank, self.size, self._count, self._boxes = rank, size, count, boxes
        self.combine = lambda first, second, into: torch.bitwise_or(first, second, out=into)
        self.received: list[Message] = []
        self._events = 0

    def send(self, outgoing: Tensor, to: int) -> None:
        """Send a tensor."""
        self.exchange(outgoing, to, outgoing[:0], -1)

    def receive(self, incoming: Tensor, source: int) -> None:
        """Receive a tensor."""
        self.exchange(incoming[:0], -1, incoming, source)

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> None:
        """Send one tensor and receive another."""
        if outgoing.numel():
            # The simple ring holds all tensors in one: a row for each rank.
            start = outgoing.storage_offset() % self._count
            parts = tuple(outgoing.tolist())
            message = Message(self.rank, to, start, start + len(parts), parts, self._events)
            self._boxes[self.rank, to].put(message)
        if incoming.numel():
            message = self._boxes[source, self.rank].get(timeout=LIMIT)
            incoming.copy_(torch.tensor(message.parts))
            self.received.append(replace(message, came=self._events))
        self._events += 1


def trace(name: str, ranks: int, count: int) -> list[Message]:
    """Every message of an all-reduce of `count` elements, in the order of the steps.

    Raises:
        AssertionError: a rank didn't end with everybody's part of every element.
    """
    boxes: Boxes = {pair: queue.Queue() for pair in product(range(ranks), repeat=2)}
    peers = [Recorder(rank, ranks, count, boxes) for rank in range(ranks)]
    ends: list[list[int]] = [[] for _ in range(ranks)]

    def work(rank: int) -> None:
        flat = torch.full((count,), 1 << rank)
        STEPS[name](peers[rank], flat)
        ends[rank] = flat.tolist()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == [[(1 << ranks) - 1] * count] * ranks, f"{name} of {ranks} ranks: {ends}"
    return in_steps([message for each in peers for message in each.received])


def in_steps(messages: Sequence[Message]) -> list[Message]:
    """Say when each message travels: as soon as both ends have done all that they do before."""
    events = sorted(
        {(m.source, m.left) for m in messages} | {(m.to, m.came) for m in messages},
        key=lambda event: event[1],
    )
    when = dict.fromkeys(events, 1)
    while True:
        before = dict(when)
        for rank, number in events:
            earlier = [when[event] for event in events if event[0] == rank and event[1] < number]
            when[rank, number] = max([when[rank, number], *(step + 1 for step in earlier)])
        for message in messages:
            ends = (message.source, message.left), (message.to, message.came)
            when[ends[0]] = when[ends[1]] = max(when[end] for end in ends)
        if when == before:
            break
    placed = [replace(message, step=when[message.to, message.came]) for message in messages]
    return sorted(placed, key=lambda message: (message.step, message.source, message.to))


def held(messages: Sequence[Message], ranks: int, count: int) -> list[list[list[int]]]:
    """After each step, from 0 on, whose parts each rank has of each element."""
    states = [[[1 << rank] * count for rank in range(ranks)]]
    for step in range(1, 1 + max(message.step for message in messages)):
        state = [list(row) for row in states[-1]]
        for message in messages:
            if message.step == step:
                for index, parts in enumerate(message.parts, message.start):
                    state[message.to][index] |= parts
        states.append(state)
    return states


def words(messages: Sequence[Message]) -> str:
    """The messages as text, which stands in a picture's file: "1: 0 to 2, 0-4" is one."""
    return "; ".join(f"{m.step}: {m.source} to {m.to}, {m.start}-{m.end}" for m in messages)


def draw(name: str, ranks: int, path: Path) -> None:
    """Draw an all-reduce of four elements."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    messages = trace(name, ranks, COUNT)
    states = held(messages, ranks, COUNT)
    wide = COUNT * CELL
    width = len(states) * (wide + GAP) - GAP + 0.9
    height = ranks * ROW + 0.6
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 10}):
        picture = Figure(figsize=(width, height), facecolor="white")
        axes = picture.add_axes((0, 0, 1, 1))
        axes.set(xlim=(-0.75, width - 0.75), ylim=(height - 0.55, -0.55))
        axes.axis("off")
        for rank in range(ranks):
            axes.text(-0.12, rank * ROW + 0.2, f"rank {rank}", ha="right", va="center")
        for step, state in enumerate(states):
            left = step * (wide + GAP)
            title = f"after step {step}" if step else "before"
            axes.text(left + wide / 2, -0.3, title, ha="center", va="center")
            for rank, row in enumerate(state):
                _draw_tensor(axes, left, rank * ROW, row, ranks)
        for message in messages:
            _draw_message(axes, message, wide)
        picture.savefig(path, metadata={"Date": None, "Description": words(messages)})


def _draw_tensor(axes: Axes, left: float, top: float, row: Sequence[int], ranks: int) -> None:
    """A box for each slice, with a stripe for each rank whose part is in it."""
    from matplotlib.patches import Rectangle

    stripe = CELL / ranks
    for index, parts in enumerate(row):
        x = left + index * CELL
        for rank in range(ranks):
            if parts >> rank & 1:
                place = (x + rank * stripe, top)
                axes.add_patch(Rectangle(place, stripe, 0.4, color=COLORS[rank], linewidth=0))
        axes.add_patch(Rectangle((x, top), CELL, 0.4, fill=False, edgecolor="#888888", lw=0.7))


def _draw_message(axes: Axes, message: Message, wide: float) -> None:
    """An arrow from rank to rank, and a frame around what it carries."""
    from matplotlib.patches import Rectangle

    left = (message.step - 1) * (wide + GAP)
    top, bottom = message.source * ROW, message.to * ROW
    place = (left + message.start * CELL, top)
    size = (message.end - message.start) * CELL
    axes.add_patch(Rectangle(place, size, 0.4, fill=False, edgecolor="black", lw=2.2))
    axes.annotate(
        "",
        xy=(left + wide + GAP - 0.04, bottom + 0.2),
        xytext=(left + wide + 0.04, top + 0.2),
        arrowprops={"arrowstyle": "-|>", "color": "black", "lw": 1.3, "shrinkA": 0, "shrinkB": 0},
    )


def main() -> None:
    """Draw every picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the pictures go")
    folder = parser.parse_args().folder
    folder.mkdir(exist_ok=True)
    for name, ranks in PICTURES:
        path = folder / f"{name}_{ranks}.svg"
        draw(name, ranks, path)
        print(path)


if __name__ == "__main__":
    main()
