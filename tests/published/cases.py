"""Which examples there are, and how each is run here."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CASES", "Case"]


@dataclass(frozen=True)
class Case:
    """An example, as it is run here.

    Attributes:
        name: For the table.
        folder: Its folder in `distributed/rpc`.
        what: What it does.
        commands: What is started, all at the same time: the script and its arguments.
        values: Globals that are set, to make it short: expressions by name.
        needs: What it imports besides torch.
        digits: Whether it reads MNIST from the folder beside its own.
        stand_ins: What is stood in for, in words.
        tolerance: By how much the last losses may differ, relative to PyTorch's; 0: no loss and no
            line that it prints differs.
        is_random: Whether weights and data are drawn; not where threads decide in which order, or
            where they are what memory happened to hold.
        fails_there: What it may fail with on PyTorch's RPC, if it does: it is run on ours alone.
        accelerators: How many it is told that there are; tensors stay on the CPU all the same.
    """

    name: str
    folder: str
    what: str
    commands: tuple[tuple[str, ...], ...]
    values: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    digits: bool = False
    stand_ins: str = "-"
    tolerance: float = 0.0
    is_random: bool = True
    accelerators: int = 0
    fails_there: str = ""


_SERVER = "rpc_parameter_server.py"

CASES = (
    Case(
        "batch: parameter server",
        "batch",
        "a server that updates a ResNet50 when the gradients of 5 trainers are there",
        (("parameter_server.py",),),
        {"batch_size": "4", "image_w": "32", "image_h": "32", "num_batches": "4"},
        ("torchvision",),
        stand_ins="GPU; 4 images of 32 x 32; a lock",
    ),
    Case(
        "batch: reinforce",
        "batch",
        "CartPole; the agent answers all observers at once, or one by one",
        (("reinforce.py", "--num-episode", "3"),),
        needs=("gymnasium",),
        stand_ins="GPU",
    ),
    Case(
        "rl",
        "rl",
        "CartPole; an agent, observers that ask it what to do",
        (("main.py", "--log-interval", "1"),),
        {"count": "lambda first: range(first, first + 12)"},
        ("gymnasium",),
        stand_ins="12 episodes",
    ),
    Case(
        "parameter_server",
        "parameter_server",
        "a ConvNet on the server, a trainer of digits",
        (
            (_SERVER, "--rank", "0", "--world_size", "2"),
            (_SERVER, "--rank", "1", "--world_size", "2"),
        ),
        needs=("torchvision",),
        digits=True,
        stand_ins="MNIST: made up",
    ),
    Case(
        "parameter_server, 2 trainers",
        "parameter_server",
        "the same with two trainers that don't wait for one another",
        tuple((_SERVER, "--rank", f"{rank}", "--world_size", "3") for rank in range(3)),
        needs=("torchvision",),
        digits=True,
        stand_ins="MNIST: made up",
        fails_there="modified by an inplace operation",
    ),
    Case(
        "rnn",
        "rnn",
        "embedding and decoder on the server, an LSTM on the trainer",
        (("main.py",),),
        stand_ins="dropout off, weights and data counted",
        is_random=False,
    ),
    Case(
        "pipeline",
        "pipeline",
        "ResNet50 in two parts on two workers, in 1, 2, 4, 8 micro-batches",
        (("main.py",),),
        {"batch_size": "8", "image_w": "64", "image_h": "64"},
        ("torchvision",),
        stand_ins="2 GPUs; 8 images of 64 x 64",
    ),
    Case(
        "ddp_rpc",
        "ddp_rpc",
        "embeddings on a server, DDP on two trainers, a master that drives them",
        (("main.py",),),
        stand_ins="2 GPUs",
        tolerance=0.1,
        accelerators=2,
    ),
)
