"""Pictures of the data movement of the all-reduces of `phalanx.parallel`, made by their code.

    python benchmarks/algorithm_pictures.py docs/algorithms

The steps of an algorithm run on threads, with queues for messages. Every element of a tensor is a
bit mask of the ranks whose parts it contains: rank r starts with bit r, and parts are combined by
OR. The recorded messages are assigned to steps and drawn, with a row for each rank and a column for
each step. The pictures therefore match the code. tests/unit/test_algorithm_costs.py counts the same
messages.
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

from phalanx.parallel.algorithms import (
    Peers,
    Steps,
    halving_doubling_steps,
    ring_simple_steps,
    ring_steps,
    tree_steps,
)

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
    """A message: elements `start` to `end` of the tensor, and the parts in each element."""

    source: int
    to: int
    start: int
    end: int
    parts: tuple[int, ...]
    send_event: int
    """The index of the message among the sender's events, from 0."""
    receive_event: int = -1
    """The index of the message among the receiver's events."""
    step: int = 0
    """The step in which the message is sent; messages of one step are concurrent."""


Channels = dict[tuple[int, int], "queue.Queue[Message]"]
"""The messages in flight, by sender and receiver."""


class Recorder(Peers):
    """The other ranks as threads of this process, with a record of every message."""

    def __init__(self, rank: int, size: int, count: int, channels: Channels) -> None:
        """Create a rank of a group, for a tensor of `count` elements."""
        self.rank, self.size, self._count, self._channels = rank, size, count, channels
        self.combine = lambda first, second, output: torch.bitwise_or(first, second, out=output)
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
            self._channels[self.rank, to].put(message)
        if incoming.numel():
            message = self._channels[source, self.rank].get(timeout=LIMIT)
            incoming.copy_(torch.tensor(message.parts))
            self.received.append(replace(message, receive_event=self._events))
        self._events += 1


def trace(name: str, ranks: int, count: int) -> list[Message]:
    """Return every message of an all-reduce of `count` elements, in the order of the steps.

    Raises:
        AssertionError: A rank ended without the parts of all ranks in every element.
    """
    channels: Channels = {pair: queue.Queue() for pair in product(range(ranks), repeat=2)}
    peers = [Recorder(rank, ranks, count, channels) for rank in range(ranks)]
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
    return assign_steps([message for peer in peers for message in peer.received])


def assign_steps(messages: Sequence[Message]) -> list[Message]:
    """Assign each message to the first step at which both ends have completed earlier events."""
    events = sorted(
        {(m.source, m.send_event) for m in messages} | {(m.to, m.receive_event) for m in messages},
        key=lambda event: event[1],
    )
    step_of = dict.fromkeys(events, 1)
    while True:
        previous = dict(step_of)
        for rank, number in events:
            earlier = [step_of[event] for event in events if event[0] == rank and event[1] < number]
            step_of[rank, number] = max([step_of[rank, number], *(step + 1 for step in earlier)])
        for message in messages:
            ends = (message.source, message.send_event), (message.to, message.receive_event)
            step_of[ends[0]] = step_of[ends[1]] = max(step_of[end] for end in ends)
        if step_of == previous:
            break
    placed = [
        replace(message, step=step_of[message.to, message.receive_event]) for message in messages
    ]
    return sorted(placed, key=lambda message: (message.step, message.source, message.to))


def trace_parts(messages: Sequence[Message], ranks: int, count: int) -> list[list[list[int]]]:
    """Return, for each step from 0, the parts in each element on each rank."""
    states = [[[1 << rank] * count for rank in range(ranks)]]
    for step in range(1, 1 + max(message.step for message in messages)):
        state = [list(row) for row in states[-1]]
        for message in messages:
            if message.step == step:
                for index, parts in enumerate(message.parts, message.start):
                    state[message.to][index] |= parts
        states.append(state)
    return states


def describe(messages: Sequence[Message]) -> str:
    """Return the messages as text for the picture's metadata, such as "1: 0 to 2, 0-4"."""
    return "; ".join(f"{m.step}: {m.source} to {m.to}, {m.start}-{m.end}" for m in messages)


def draw(name: str, ranks: int, path: Path) -> None:
    """Draw an all-reduce of four elements."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    messages = trace(name, ranks, COUNT)
    states = trace_parts(messages, ranks, COUNT)
    tensor_width = COUNT * CELL
    width = len(states) * (tensor_width + GAP) - GAP + 0.9
    height = ranks * ROW + 0.6
    # A page shows all pictures at one width, so that the text of a wide one must be larger.
    font = {"svg.fonttype": "none", "font.size": max(10.0, 1.05 * width)}
    with mpl.rc_context({"svg.hashsalt": name} | font):
        picture = Figure(figsize=(width, height), facecolor="white")
        axes = picture.add_axes((0, 0, 1, 1))
        axes.set(xlim=(-0.75, width - 0.75), ylim=(height - 0.55, -0.55))
        axes.axis("off")
        for rank in range(ranks):
            axes.text(-0.12, rank * ROW + 0.2, f"rank {rank}", ha="right", va="center")
        for step, state in enumerate(states):
            left = step * (tensor_width + GAP)
            title = f"after step {step}" if step else "before"
            axes.text(left + tensor_width / 2, -0.3, title, ha="center", va="center")
            for rank, row in enumerate(state):
                _draw_tensor(axes, left, rank * ROW, row, ranks)
        for message in messages:
            _draw_message(axes, message, tensor_width)
        metadata = {"Date": None, "Description": describe(messages)}
        picture.savefig(path, bbox_inches="tight", pad_inches=0.05, metadata=metadata)


def _draw_tensor(axes: Axes, left: float, top: float, row: Sequence[int], ranks: int) -> None:
    """Draw a box for each element, with a stripe for each rank whose part is in it."""
    from matplotlib.patches import Rectangle

    stripe = CELL / ranks
    for index, parts in enumerate(row):
        x = left + index * CELL
        for rank in range(ranks):
            if parts >> rank & 1:
                corner = (x + rank * stripe, top)
                axes.add_patch(Rectangle(corner, stripe, 0.4, color=COLORS[rank], linewidth=0))
        axes.add_patch(Rectangle((x, top), CELL, 0.4, fill=False, edgecolor="#888888", lw=0.7))


def _draw_message(axes: Axes, message: Message, tensor_width: float) -> None:
    """Draw an arrow from rank to rank, and a frame around the elements."""
    from matplotlib.patches import Rectangle

    left = (message.step - 1) * (tensor_width + GAP)
    top, bottom = message.source * ROW, message.to * ROW
    corner = (left + message.start * CELL, top)
    size = (message.end - message.start) * CELL
    axes.add_patch(Rectangle(corner, size, 0.4, fill=False, edgecolor="black", lw=2.2))
    axes.annotate(
        "",
        xy=(left + tensor_width + GAP - 0.04, bottom + 0.2),
        xytext=(left + tensor_width + 0.04, top + 0.2),
        arrowprops={"arrowstyle": "-|>", "color": "black", "lw": 1.3, "shrinkA": 0, "shrinkB": 0},
    )


def main() -> None:
    """Draw every picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the folder of the pictures")
    folder = parser.parse_args().folder
    folder.mkdir(exist_ok=True)
    for name, ranks in PICTURES:
        path = folder / f"{name}_{ranks}.svg"
        draw(name, ranks, path)
        print(path)


if __name__ == "__main__":
    main()
