"""Train a small GPT on the letters of a text, with checkpoints and restarts.

    python examples/train_gpt.py --text FILE
    phalanx run --nproc-per-node 2 --max-restarts 3 examples/train_gpt.py --checkpoints runs/gpt

Without --text it learns sums such as "17+25=42;", so that its output can be checked. With
`--parallel ddp`, PyTorch's DistributedDataParallel averages the gradients during the backward pass.
With `--parallel sharded`, phalanx.parallel.SharedDataParallel holds parameters and optimizer state
once for all ranks of a host. With `--across`, for slow links between hosts, each host makes its own
steps, and all exchange their parameters once in `--every` steps, in 8 bits
(phalanx.parallel.DiLoCo).
"""

import argparse
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import phalanx
import phalanx.parallel
from phalanx.train import Trainer


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Sections of a text: `length` letters and the next letter of each, both int64 [length]."""

    def __init__(self, letters: Tensor, length: int) -> None:
        self.letters, self.length = letters, length

    def __len__(self) -> int:
        return (len(self.letters) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        section = self.letters[index * self.length :][: self.length + 1]
        return section[:-1], section[1:]


class Block(nn.Module):
    """Causal attention, and a feed-forward layer for each letter."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Take and return [n, length, width]."""
        n, length, width = x.shape
        parts = self.query_key_value(self.norm1(x)).view(
            n, length, 3, self.heads, width // self.heads
        )
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A model that returns scores for the letter after each letter."""

    def __init__(self, letters: int, length: int, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.length = length
        self.letter, self.position = nn.Embedding(letters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, width // 32, dropout) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)
        self.head.weight = self.letter.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 if "project" not in name else 0.01)

    def forward(self, letters: Tensor) -> Tensor:
        """Take int64 [n, length]; return scores [n, length, letters]."""
        positions = torch.arange(letters.shape[1], device=letters.device)
        return self.head(self.norm(self.blocks(self.letter(letters) + self.position(positions))))

    @torch.no_grad()
    def generate(self, letters: Tensor, count: int) -> Tensor:
        """Extend letters [length] by the most likely next letters."""
        self.eval()
        for _ in range(count):
            scores = self(letters[None, -self.length :])[0, -1]
            letters = torch.cat([letters, scores.argmax()[None]])
        return letters


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy of a letter, in nats."""
    letters, targets = batch
    return F.cross_entropy(model(letters).flatten(0, 1), targets.flatten())


def sums(count: int) -> str:
    numbers = random.Random(1)
    pairs = [(numbers.randrange(30), numbers.randrange(30)) for _ in range(count)]
    return "".join(f"{a}+{b}={a + b};" for a, b in pairs)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, metavar="FILE", help="the text, in UTF-8")
    parser.add_argument("--parallel", choices=["plain", "ddp", "sharded"], default="plain")
    parser.add_argument("--across", action="store_true", help="over slow links between hosts")
    parser.add_argument("--every", type=int, default=128, help="steps between two exchanges")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="number of steps, instead of --epochs")
    parser.add_argument(
        "--global-batch", type=int, default=32, help="samples in a step on all ranks"
    )
    parser.add_argument("--length", type=int, default=64, help="context length in letters")
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--checkpoints", type=Path, metavar="DIR", help="save here, and resume from here"
    )
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--generate", type=int, default=80, help="letters to generate at the end")
    parser.add_argument("--backend", default="phalanx")
    return parser.parse_args()


def run(options: argparse.Namespace) -> None:
    if options.across and options.parallel != "plain":
        raise phalanx.UsageError(f"--across with --parallel {options.parallel} given, not plain")
    try:
        text = options.text.read_text() if options.text else sums(20_000)
    except (OSError, UnicodeDecodeError) as error:
        raise phalanx.UsageError(f"--text {options.text}: {error}") from None
    alphabet = sorted(set(text))
    numbers = {letter: number for number, letter in enumerate(alphabet)}
    letters = torch.tensor([numbers[letter] for letter in text])
    split = len(letters) * 9 // 10
    train, held_out = Text(letters[:split], options.length), Text(letters[split:], options.length)
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
            if options.across:
                optimizer = phalanx.parallel.DiLoCo(
                    optimizer, options.every, compress="int8", overlap=options.every // 8
                )
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
            start = letters[split : split + options.length].to(session.device)
            generated = gpt.generate(start, options.generate).tolist()
            print("".join(alphabet[number] for number in generated[options.length :]))


def main() -> None:
    try:
        run(parse())
    except phalanx.UsageError as error:
        sys.exit(f"train_gpt: {error}")


if __name__ == "__main__":
    main()
