"""The examples, and how each is run."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CASES", "Case"]


@dataclass(frozen=True)
class Case:
    """An example and the settings of its run.

    Attributes:
        name: Name in the table.
        folder: Folder in `distributed/rpc`.
        description: What the example does.
        commands: Processes that are started at the same time: script and arguments of each.
        values: Expressions by the name of a global variable, which shorten the example.
        needs: Packages that the example imports besides torch.
        needs_digits: Whether the example reads MNIST from the folder beside its own.
        substitutes: Description of what is replaced.
        tolerance: Allowed relative difference of the last losses; 0 if no loss and no printed line
            may differ.
        is_random: Whether weights and data are random; false if threads would decide the order of
            draws, or if the data would be uninitialized memory.
        failure_on_pytorch: Error that may occur on PyTorch's RPC; the example then runs only on
            Phalanx.
        accelerators: Number of accelerators that the example sees; tensors stay on the CPU.
    """

    name: str
    folder: str
    description: str
    commands: tuple[tuple[str, ...], ...]
    values: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    needs_digits: bool = False
    substitutes: str = "-"
    tolerance: float = 0.0
    is_random: bool = True
    accelerators: int = 0
    failure_on_pytorch: str = ""


_SERVER = "rpc_parameter_server.py"

CASES = (
    Case(
        "batch: parameter server",
        "batch",
        "a server that updates a ResNet50 when the gradients of 5 trainers have arrived",
        (("parameter_server.py",),),
        {"batch_size": "4", "image_w": "32", "image_h": "32", "num_batches": "4"},
        ("torchvision",),
        substitutes="GPU; 4 images of 32 x 32; a lock",
    ),
    Case(
        "batch: reinforce",
        "batch",
        "CartPole; the agent answers all observers at once, or one by one",
        (("reinforce.py", "--num-episode", "3"),),
        needs=("gymnasium",),
        substitutes="GPU",
    ),
    Case(
        "rl",
        "rl",
        "CartPole; an agent, observers that ask it what to do",
        (("main.py", "--log-interval", "1"),),
        {"count": "lambda first: range(first, first + 12)"},
        ("gymnasium",),
        substitutes="12 episodes",
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
        needs_digits=True,
        substitutes="synthetic MNIST",
    ),
    Case(
        "parameter_server, 2 trainers",
        "parameter_server",
        "the same with two trainers that do not wait for each other",
        tuple((_SERVER, "--rank", f"{rank}", "--world_size", "3") for rank in range(3)),
        needs=("torchvision",),
        needs_digits=True,
        substitutes="synthetic MNIST",
        failure_on_pytorch="modified by an inplace operation",
    ),
    Case(
        "rnn",
        "rnn",
        "embedding and decoder on the server, an LSTM on the trainer",
        (("main.py",),),
        substitutes="dropout off, weights and data deterministic",
        is_random=False,
    ),
    Case(
        "pipeline",
        "pipeline",
        "ResNet50 in two parts on two workers, in 1, 2, 4, 8 micro-batches",
        (("main.py",),),
        {"batch_size": "8", "image_w": "64", "image_h": "64"},
        ("torchvision",),
        substitutes="2 GPUs; 8 images of 64 x 64",
    ),
    Case(
        "ddp_rpc",
        "ddp_rpc",
        "embeddings on a server, DDP on two trainers, a master that drives them",
        (("main.py",),),
        substitutes="2 GPUs",
        tolerance=0.1,
        accelerators=2,
    ),
)
