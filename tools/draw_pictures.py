"""Draw the pictures of the documentation: python tools/draw_pictures.py [DIRECTORY].

The default directory is docs. Text stays text in the files, so that it can be searched and read
aloud.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

DIRECTORY = Path(__file__).parents[1] / "docs"
COLORS = ("#cfe2f3", "#f9d9c5", "#d5e8d0", "#e6d9f0")
"""One color per rank."""
EDGE, TEXT, FAILED = "#455a64", "#1b2a33", "#c0392b"
MEMORY, OUTSIDE = "#fff3cd", "#f7f9fa"
"""The colors of shared memory, and of what contains other shapes."""

Point = tuple[float, float]


class Picture:
    """A drawing; the origin is at the lower left.

    A unit is 0.4 inches, and less in wide pictures: all of them fit into a column at full size.
    """

    def __init__(self, width: float, height: float) -> None:
        unit = min(0.4, 7.4 / width)
        self._figure, self._axes = plt.subplots(figsize=(width * unit, height * unit))
        self._axes.set(xlim=(0, width), ylim=(0, height), aspect="equal")
        self._axes.axis("off")
        self._axes.set_position((0, 0, 1, 1))

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", **style: Any
    ) -> None:
        """Draw a rounded box; `text` is in its centre, or at its top if `top` is true."""
        at_top = style.pop("top", False)
        options = {"facecolor": "white", "edgecolor": EDGE, "linewidth": 1.0} | style
        shape = FancyBboxPatch((x, y), width, height, "round,pad=0,rounding_size=0.15", **options)
        self._axes.add_patch(shape)
        if at_top:
            self.text(x + width / 2, y + height - 0.1, text, va="top")
        else:
            self.text(x + width / 2, y + height / 2, text)

    def text(self, x: float, y: float, text: str, **style: Any) -> None:
        """Draw text centred at a point."""
        options = {"ha": "center", "va": "center", "fontsize": 9, "color": TEXT} | style
        self._axes.text(x, y, text, **options)

    def arrow(self, start: Point, end: Point, text: str = "", **style: Any) -> None:
        """Draw an arrow, with text above its middle."""
        defaults = {
            "arrowstyle": "-|>",
            "color": EDGE,
            "linewidth": 1.2,
            "shrinkA": 2,
            "shrinkB": 2,
        }
        patch = FancyArrowPatch(start, end, mutation_scale=11, **(defaults | style))
        self._axes.add_patch(patch)
        if text:
            middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.28)
            self.text(*middle, text, fontsize=8)

    def rank(self, number: int, x: float, y: float, text: str = "", width: float = 2.4) -> None:
        """Draw a rank in its color."""
        self.box(x, y, width, 1.2, f"rank {number}\n{text}".strip(), facecolor=COLORS[number % 4])

    def save(self, path: Path) -> None:
        """Write the file; its bytes depend only on the drawing."""
        self._figure.savefig(path, bbox_inches="tight", metadata={"Creator": None, "Date": None})
        plt.close(self._figure)


def draw_architecture() -> Picture:
    """Draw the layers, and two hosts with their ranks."""
    picture = Picture(20, 8.6)
    layers = (
        (7.2, "your program, DDP, FSDP2, Lightning, phalanx.train, phalanx.rpc, ..."),
        (5.9, "torch.distributed"),
        (4.6, 'backend "phalanx": process group, failure detection, flight recorder'),
    )
    for number, (y, text) in enumerate(layers):
        picture.box(0.2, y, 19.6, 1.0, text, facecolor=("white", "#eceff1", MEMORY)[number])
    for host, x in enumerate((0.2, 12.2)):
        picture.box(x, 0.2, 7.6, 4.0, f"host {host}", top=True, facecolor=OUTSIDE)
        picture.box(x + 0.4, 0.5, 6.8, 0.9, "shared memory", facecolor=MEMORY)
        for local in range(2):
            rank, left = 2 * host + local, x + 0.6 + 3.6 * local
            picture.box(left, 2.2, 2.8, 0.9, f"rank {rank}", facecolor=COLORS[rank])
            picture.arrow((left + 1.4, 2.2), (left + 1.4, 1.4), arrowstyle="<|-|>")
    picture.arrow((7.8, 1.9), (12.2, 1.9), "Gloo, MPI or relay", arrowstyle="<|-|>")
    return picture


def draw_memory() -> Picture:
    """Draw the memory of four ranks with DDP, and with SharedDataParallel."""
    parts = (("parameters", 0), ("gradients", 1), ("optimizer", 2))
    picture = Picture(21, 6.4)
    picture.text(6.6, 6.1, "DistributedDataParallel", fontsize=10, fontweight="bold")
    picture.text(17.2, 6.1, "SharedDataParallel", fontsize=10, fontweight="bold")
    for rank in range(4):
        x = 0.2 + 3.3 * rank
        picture.text(x + 1.4, 5.4, f"rank {rank}")
        for text, row in parts:
            picture.box(x, 3.8 - 1.4 * row, 2.8, 1.2, text, facecolor=COLORS[row])
        picture.text(14.4 + 1.85 * rank, 5.4, f"rank {rank}")
    for text, row in parts:
        y = 3.8 - 1.4 * row
        picture.box(13.6, y, 7.2, 1.2, f"{text}, once per host", facecolor=COLORS[row])
    picture.text(6.6, 0.4, "four times the model")
    picture.text(17.2, 0.4, "once the model")
    return picture


def draw_processes() -> Picture:
    """Draw four processes in a group."""
    picture = Picture(13, 3.6)
    picture.box(0.2, 0.2, 12.6, 3.2, "process group, world size 4", top=True, facecolor=OUTSIDE)
    for rank in range(4):
        picture.rank(rank, 0.7 + 3.1 * rank, 0.7, "own memory")
    for rank in range(3):
        x = 0.7 + 3.1 * rank + 2.4
        picture.arrow((x, 1.3), (x + 0.7, 1.3), arrowstyle="<|-|>")
    return picture


def draw_messages() -> Picture:
    """Draw one message over time."""
    picture = Picture(12, 4.2)
    picture.rank(0, 0.2, 2.8)
    picture.rank(1, 0.2, 0.4)
    for y in (3.4, 1.0):
        picture.arrow((2.8, y), (11.6, y))
    picture.box(4.0, 3.1, 2.2, 0.6, "send", facecolor=COLORS[0])
    picture.box(3.4, 0.7, 4.6, 0.6, "recv waits", facecolor=COLORS[1])
    picture.arrow((5.0, 3.1), (7.6, 1.35), "")
    picture.text(7.1, 2.4, "tensor", fontsize=8)
    picture.text(10.9, 0.55, "time", fontsize=8)
    return picture


def draw_collectives() -> Picture:
    """Draw the six collectives on three ranks, before and after."""
    before = {
        "broadcast": ("A", "", ""),
        "scatter": ("A B C", "", ""),
        "gather": ("A", "B", "C"),
        "all_gather": ("A", "B", "C"),
        "reduce": ("A", "B", "C"),
        "all_reduce": ("A", "B", "C"),
    }
    after = {
        "broadcast": ("A", "A", "A"),
        "scatter": ("A", "B", "C"),
        "gather": ("A B C", "", ""),
        "all_gather": ("A B C",) * 3,
        "reduce": ("A+B+C", "", ""),
        "all_reduce": ("A+B+C",) * 3,
    }
    picture = Picture(19.5, 9.6)
    for number, name in enumerate(before):
        x, y = 6.6 * (number % 3), 4.9 * (1 - number // 3)
        picture.text(x + 2.9, y + 4.2, name, fontsize=11, fontweight="bold")
        for rank in range(3):
            row = y + 2.8 - 1.25 * rank
            picture.text(x + 0.35, row + 0.45, f"{rank}")
            picture.box(x + 0.7, row, 1.9, 0.9, before[name][rank], facecolor=COLORS[rank])
            picture.box(x + 3.7, row, 1.9, 0.9, after[name][rank], facecolor=COLORS[rank])
        picture.arrow((x + 2.7, y + 2.0), (x + 3.6, y + 2.0))
    return picture


def draw_synchronous_sgd() -> Picture:
    """Draw one step of synchronous SGD on two ranks."""
    picture = Picture(17, 4.6)
    for rank, y in ((0, 3.0), (1, 0.4)):
        picture.rank(rank, 0.2, y, "own samples")
        picture.box(4.0, y, 2.8, 1.2, f"gradient $g_{rank}$", facecolor=COLORS[rank])
        picture.box(13.6, y, 3.0, 1.2, "the same step", facecolor=COLORS[rank])
        picture.arrow((2.6, y + 0.6), (4.0, y + 0.6))
        picture.arrow((6.8, y + 0.6), (8.4, 2.3))
        picture.arrow((12.0, 2.3), (13.6, y + 0.6))
    picture.box(8.4, 1.7, 3.6, 1.2, "all-reduce\n$(g_0 + g_1) / 2$")
    return picture


def draw_initialization() -> Picture:
    """Draw the store through which ranks find each other, and then their connections."""
    picture = Picture(17.4, 5.2)
    picture.text(4.2, 4.9, "1. Every rank asks the store", fontsize=10, fontweight="bold")
    picture.text(13.4, 4.9, "2. Ranks connect to each other", fontsize=10, fontweight="bold")
    picture.box(1.2, 3.1, 6.0, 1.1, "store\nMASTER_ADDR:MASTER_PORT")
    centers = []
    for rank in range(3):
        picture.rank(rank, 0.2 + 2.8 * rank, 0.5)
        picture.arrow((1.4 + 2.8 * rank, 1.7), (4.2, 3.1))
    for rank, (x, y) in enumerate(((9.8, 0.5), (14.8, 0.5), (12.3, 3.0))):
        picture.rank(rank, x, y)
        centers.append((x + 1.2, y + 0.6))
    for first, second in ((0, 1), (0, 2), (1, 2)):
        picture.arrow(centers[first], centers[second], arrowstyle="<|-|>", shrinkA=36, shrinkB=36)
    return picture


def draw_machines() -> Picture:
    """Draw two machines behind routers, without and with a relay."""
    picture = Picture(22.8, 6.4)
    for x, title, service in (
        (0.2, "direct connections", "store"),
        (11.8, "relay", "store, relay"),
    ):
        picture.text(x + 5.4, 6.1, title, fontsize=10, fontweight="bold")
        for offset, machine in ((0.0, "A"), (7.3, "B")):
            name = f"machine {machine}\n192.168.1.10"
            picture.box(x + offset, 0.2, 3.5, 5.1, name, top=True, facecolor=OUTSIDE)
        # The gap in the router of machine A is the port that it forwards.
        for offset, bottom, height in ((4.1, 0.2, 2.0), (4.1, 3.2, 1.4), (6.3, 0.2, 4.4)):
            picture.box(x + offset, bottom, 0.4, height, facecolor="#cfd8dc")
        picture.text(x + 4.3, 5.0, "router", fontsize=8)
        picture.text(x + 6.5, 5.0, "router", fontsize=8)
        picture.box(x + 0.3, 2.5, 2.9, 0.9, service)
        picture.box(x + 0.3, 0.6, 2.9, 0.9, "rank 0", facecolor=COLORS[0])
        picture.box(x + 7.6, 0.6, 2.9, 0.9, "rank 1", facecolor=COLORS[1])
        style = "-|>" if service == "store" else "<|-|>"
        picture.arrow((x + 7.6, 1.5), (x + 3.2, 3.0), arrowstyle=style)
        picture.text(x + 5.4, 3.7, "forwarded\nport", fontsize=7)
    picture.arrow((3.4, 1.3), (6.5, 1.3), color=FAILED)
    picture.arrow((7.8, 0.7), (4.7, 0.7), color=FAILED)
    picture.text(5.6, 1.0, "no way in", fontsize=7, color=FAILED)
    picture.arrow((13.5, 1.5), (13.5, 2.5), arrowstyle="<|-|>")
    return picture


def draw_parameter_server() -> Picture:
    """Draw a server with a table and two trainers."""
    picture = Picture(13, 5.4)
    picture.box(4.4, 3.7, 4.2, 1.4, "server (rank 2)\nembedding table", facecolor=COLORS[2])
    for rank, x in ((0, 0.4), (1, 8.8)):
        text = f"trainer (rank {rank})\ndense layers, replica"
        picture.box(x, 0.4, 3.8, 1.4, text, facecolor=COLORS[rank])
    picture.arrow((2.4, 1.8), (5.2, 3.7), arrowstyle="<|-|>")
    picture.arrow((10.6, 1.8), (7.8, 3.7), arrowstyle="<|-|>")
    picture.arrow((4.2, 1.1), (8.8, 1.1), "all-reduce of gradients", arrowstyle="<|-|>")
    picture.text(1.8, 2.95, "calls: rows,\ngradients of rows", fontsize=8)
    picture.text(11.2, 2.95, "calls: rows,\ngradients of rows", fontsize=8)
    return picture


def draw_trainer() -> Picture:
    """Draw the steps of a training that is killed and goes on from a checkpoint."""
    picture = Picture(17, 4.0)
    picture.text(1.6, 2.9, "first attempt")
    picture.arrow((3.2, 2.9), (9.4, 2.9))
    picture.text(1.6, 1.0, "second attempt")
    picture.arrow((8.2, 1.0), (16.4, 1.0))
    for step in range(1, 4):
        x = 3.2 + step * 5 / 3
        picture.box(x - 0.45, 3.25, 0.9, 0.6, f"{10 * step}", facecolor=COLORS[2])
    picture.text(9.9, 2.9, "killed at step 35", color=FAILED, ha="left")
    picture.arrow((8.2, 2.8), (8.2, 1.1), linestyle="--")
    picture.text(6.3, 1.9, "checkpoint of step 30", fontsize=8)
    for step in range(4, 8):
        x = 3.2 + step * 5 / 3
        picture.box(x - 0.45, 0.1, 0.9, 0.6, f"{10 * step}", facecolor=COLORS[2])
    return picture


PICTURES = {
    "pictures/architecture": draw_architecture,
    "pictures/memory": draw_memory,
    "tutorial/pictures/collectives": draw_collectives,
    "tutorial/pictures/initialization": draw_initialization,
    "tutorial/pictures/machines": draw_machines,
    "tutorial/pictures/messages": draw_messages,
    "tutorial/pictures/parameter-server": draw_parameter_server,
    "tutorial/pictures/processes": draw_processes,
    "tutorial/pictures/synchronous-sgd": draw_synchronous_sgd,
    "tutorial/pictures/trainer": draw_trainer,
}


def main() -> None:
    """Draw all pictures."""
    directory = Path(sys.argv[1]) if sys.argv[1:] else DIRECTORY
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "phalanx", "font.family": "sans-serif"}
    for name, draw in PICTURES.items():
        path = directory / f"{name}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        draw().save(path)


if __name__ == "__main__":
    main()
