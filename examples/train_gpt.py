"""A small GPT that learns a text letter by letter, with checkpoints and restart.

    python examples/train_gpt.py --text FILE
    phalanx run --nproc-per-node 2 --max-restarts 3 examples/train_gpt.py --checkpoints runs/gpt

Without --text it learns sums, as "17+25=42;": whatever it says then can be checked. With --parallel
ddp PyTorch's DistributedDataParallel averages the gradients while the backward pass runs, with
--parallel sharded phalanx.parallel.SharedDataParallel keeps parameters and optimizer once for all ranks.
"""

import argparse
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody does
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import phalanx
import phalanx.parallel
from phalanx.train import Trainer


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text: `length` letters, and the ones that follow each, as int64 [length]."""

    def __init__(self, letters: Tensor, length: int) -> None:
        self.letters, self.length = letters, length

    def __len__(self) -> int:
        return (len(self.letters) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.letters[index * self.length :][: self.length + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    """Attention to the letters before, and a layer for each letter."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Take and return [n, length, width]."""
        n, length, width = x.shape
        parts = self.attend(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """From letters to the scores of each next letter."""

    def __init__(self, letters: int, length: int, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.length = length
        self.letter, self.place = nn.Embedding(letters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, width // 32, dropout) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)
        self.head.weight = self.letter.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 if "project" not in name else 0.01)

    def forward(self, letters: Tensor) -> Tensor:
        """Take int64 [n, length]; return scores [n, length, letters]."""
        places = torch.arange(letters.shape[1], device=letters.device)
        return self.head(self.norm(self.blocks(self.letter(letters) + self.place(places))))

    @torch.no_grad()
    def write(self, letters: Tensor, more: int) -> Tensor:
        """Go on after letters [length], with the likeliest letter each time."""
        self.eval()
        for _ in range(more):
            scores = self(letters[None, -self.length :])[0, -1]
            letters = torch.cat([letters, scores.argmax()[None]])
        return letters


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean cross entropy of a letter, in nats."""
    letters, following = batch
    return F.cross_entropy(model(letters).flatten(0, 1), following.flatten())


def sums(count: int) -> str:
    numbers = random.Random(1)
    pairs = [(numbers.randrange(30), numbers.randrange(30)) for _ in range(count)]
    return "".join(f"{a}+{b}={a + b};" for a, b in pairs)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, metavar="FILE", help="a text to learn, UTF-8")
    parser.add_argument("--parallel", choices=["plain", "ddp", "sharded"], default="plain")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="end after so many steps instead")
    parser.add_argument("--global-batch", type=int, default=32, help="of all ranks together")
    parser.add_argument("--length", type=int, default=64, help="letters that it looks back")
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--checkpoints", type=Path, metavar="DIR", help="save here, and go on from it"
    )
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--write", type=int, default=80, help="letters that it writes at the end")
    parser.add_argument("--backend", default="phalanx")
    return parser.parse_args()


def run(options: argparse.Namespace) -> None:
    try:
        text = options.text.read_text() if options.text else sums(20_000)
    except (OSError, UnicodeDecodeError) as error:
        raise phalanx.UsageError(f"--text {options.text}: {error}") from None
    alphabet = sorted(set(text))
    numbers = {letter: number for number, letter in enumerate(alphabet)}
    letters = torch.tensor([numbers[letter] for letter in text])
    cut = len(letters) * 9 // 10
    train, held_out = Text(letters[:cut], options.length), Text(letters[cut:], options.length)
    with phalanx.init(options.backend) as session:
        torch.manual_seed(options.seed)
        shape = options.length, options.width, options.depth
        gpt = GPT(len(alphabet), *shape, dropout=0.1).to(session.device)
        model: nn.Module = gpt
        settings = {"lr": options.lr, "weight_decay": 0.1}
        if options.parallel == "sharded":
            model = phalanx.parallel.SharedDataParallel(gpt)
            optimizer = model.optimizer(torch.optim.AdamW, **settings)
        else:
            if options.parallel == "ddp":
                model = DistributedDataParallel(gpt)
            optimizer = torch.optim.AdamW(gpt.parameters(), **settings)
        result = Trainer(
            model,
            optimizer,
            train,
            loss,
            global_batch=options.global_batch,
            epochs=None if options.steps else options.epochs,
            steps=options.steps,
            clip=1.0,
            evaluate=held_out,
            checkpoints=options.checkpoints,
            checkpoint_every=options.checkpoint_every,
            seed=options.seed,
        ).fit()
        if session.is_main:
            size = sum(parameter.numel() for parameter in gpt.parameters())
            print(f"{size:,} parameters, {result.step} steps on {session.world_size} ranks")
            print(f"loss on held-out text: {result.evaluation['loss']:.4f} nats a letter")
            start = letters[cut : cut + options.length].to(session.device)
            written = gpt.write(start, options.write).tolist()
            print("".join(alphabet[number] for number in written[options.length :]))


def main() -> None:
    try:
        run(parse())
    except phalanx.UsageError as error:
        sys.exit(f"train_gpt: {error}")


if __name__ == "__main__":
    main()
