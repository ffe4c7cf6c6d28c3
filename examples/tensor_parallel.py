"""Generate tokens with a Llama whose layers are split over ranks: tensor parallelism on CPUs.

    python examples/tensor_parallel.py
    phalanx run --nproc-per-node 2 examples/tensor_parallel.py
    phalanx run --nproc-per-node 2 examples/tensor_parallel.py --checkpoint DIR --prompt 1,3,5

To generate a token, a process reads all weights from memory, which takes most of the time. Two
ranks read half of them each, at the same time. Each rank has a core:

    rank 0   heads 0 to 5    o_proj --+          half of gate, up    down --+
         x --                     all_reduce -- x                       all_reduce -- x
    rank 1   heads 6 to 11   o_proj --+          half of gate, up    down --+

The price is two all-reduces of a few KB in each layer. They take microseconds in shared memory, and
much longer through a network stack: compare with `--backend gloo`.

The weights are random and the same for any number of ranks, and so are the tokens, except that a
near tie of two tokens may go the other way, since sums are rounded in a different order. With
--checkpoint, a Llama is read from a directory with config.json and *.safetensors.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from llama import Cache, Config, Llama, Weights, checkpoint_weights, random_weights
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import phalanx

# A column-wise layer computes some of its outputs on each rank. A row-wise layer takes them as its
# inputs, and its output is the sum over the ranks. The logits are gathered.
PLAN: dict[str, Any] = {
    "layers.*.self_attn.q_proj": ColwiseParallel(),
    "layers.*.self_attn.k_proj": ColwiseParallel(),
    "layers.*.self_attn.v_proj": ColwiseParallel(),
    "layers.*.self_attn.o_proj": RowwiseParallel(),
    "layers.*.mlp.gate_proj": ColwiseParallel(),
    "layers.*.mlp.up_proj": ColwiseParallel(),
    "layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}
MODES = ("local", "prepared", "dtensor")


class Collectives:
    """The collectives of the model, as forward hooks of its layers, and the seconds of each."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.times: list[float] = []

    def sum(self, _layer: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        """Add up the outputs of a row-wise layer."""
        start = time.perf_counter()
        output = self.all_reduce(output)
        self.times.append(time.perf_counter() - start)
        return output

    def gather(self, _layer: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        """Concatenate the outputs of a column-wise layer."""
        start = time.perf_counter()
        parts = self.all_gather(output)
        self.times.append(time.perf_counter() - start)
        return parts.movedim(0, -2).flatten(-2)

    def all_reduce(self, part: Tensor) -> Tensor:
        """Return the sum of the parts of all ranks."""
        dist.all_reduce(part, group=self.group)
        return part

    def all_gather(self, part: Tensor) -> Tensor:
        """Return the parts of all ranks, [ranks, ...]."""
        parts = part.new_empty(dist.get_world_size(self.group), *part.shape)
        dist.all_gather(list(parts), part, group=self.group)
        return parts


class PreparedCollectives(Collectives):
    """The same with `phalanx.prepare`, which reads the arguments of a call only once.

    A prepared operation always uses the same tensors: its result is valid until it runs again.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self.sums: dict[torch.Size, tuple[Tensor, Any]] = {}
        self.gathers: dict[torch.Size, tuple[Tensor, Tensor, Any]] = {}

    def all_reduce(self, part: Tensor) -> Tensor:
        """Return the sum of the parts of all ranks."""
        if part.shape not in self.sums:
            total = torch.empty_like(part)
            operation = phalanx.prepare(dist.all_reduce, total, group=self.group)
            self.sums[part.shape] = total, operation
        total, operation = self.sums[part.shape]
        total.copy_(part)
        operation()
        return total

    def all_gather(self, part: Tensor) -> Tensor:
        """Return the parts of all ranks, [ranks, ...]."""
        if part.shape not in self.gathers:
            parts = part.new_empty(dist.get_world_size(self.group), *part.shape)
            own = torch.empty_like(part)
            operation = phalanx.prepare(dist.all_gather, list(parts), own, group=self.group)
            self.gathers[part.shape] = own, parts, operation
        own, parts, operation = self.gathers[part.shape]
        own.copy_(part)
        operation()
        return parts


def build(config: Config, weights: Weights, dtype: torch.dtype, mesh: DeviceMesh | None) -> Llama:
    """Return the model; with a mesh, the share of this rank, as DTensors."""
    model = build_empty(config, mesh)
    for name, parameter in list(model.named_parameters()):
        value = weights(name, parameter.shape).to(dtype)
        if isinstance(parameter, DTensor):
            # Every rank has the whole tensor for a moment, so nothing is sent.
            value = distribute_tensor(
                value, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        set_parameter(model, name, value)
    return model


def build_empty(config: Config, mesh: DeviceMesh | None) -> Llama:
    """Return the model with parameters that have a shape, but no memory."""
    with torch.device("meta"):
        model = Llama(config).eval()
    if mesh is not None:
        check_ranks(config, mesh.size())
        parallelize_module(model, mesh, PLAN, src_data_rank=None)
    return model


def set_parameter(model: Llama, name: str, value: Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))


def check_ranks(config: Config, ranks: int) -> None:
    """Raise UsageError if the model cannot be split over so many ranks."""
    split = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    counts = {name: getattr(config, name) for name in split}
    for name, count in counts.items():
        if count % ranks:
            possible = [n for n in range(1, ranks) if all(c % n == 0 for c in counts.values())]
            raise phalanx.UsageError(
                f"{ranks} ranks cannot split a model with {name} {count}: the number of ranks must "
                f"divide it. Smaller numbers that do: {', '.join(map(str, possible))}"
            )


def use_local_tensors(model: Llama, collectives: Collectives) -> None:
    """Replace the layers that hold DTensors by plain ones on this rank's share of the weights.

    They compute the same. But each operation on DTensors derives the placement of its result in
    Python, which costs more than the collectives when a single token is generated.
    """
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and isinstance(layer.weight, DTensor):
            share = layer.weight.to_local()
            local = nn.Linear(share.shape[1], share.shape[0], bias=False, device="meta")
            local.weight = nn.Parameter(share, requires_grad=False)
            if layer.weight.placements == (Shard(1),):
                local.register_forward_hook(collectives.sum)
            elif name == "lm_head":
                local.register_forward_hook(collectives.gather)
            model.set_submodule(name, local)


class Generator:
    """Greedy generation: each next token is the most likely one.

    Args:
        model: The model, the same on all ranks.
        prompt: The first tokens, at least one.
        capacity: The largest number of tokens, with the prompt.
    """

    def __init__(self, model: Llama, prompt: list[int], capacity: int) -> None:
        self.model, self.tokens = model, list(prompt)
        self.caches = [Cache(capacity) for _ in model.layers]
        self.logits = torch.empty(0)

    @torch.no_grad()
    def step(self) -> None:
        """Append a token."""
        new_tokens = torch.tensor([self.tokens[self.caches[0].length :]])
        self.logits = self.model(new_tokens, self.caches)[0]
        self.tokens.append(int(self.logits.argmax()))


def use_one_core(session: phalanx.Session) -> None:
    """Give this rank one thread, and a core of its own if there are as many cores as ranks."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= session.local_world_size:
        os.sched_setaffinity(0, {cores[session.local_rank]})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="directory of a Llama of Hugging Face"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="a config.json, for random weights of its shape"
    )
    parser.add_argument("--prompt", default="1,3,5", help="numbers of tokens (%(default)s)")
    parser.add_argument("--tokens", type=int, default=50, help="tokens to generate (%(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="local",
        help="local: plain tensors and dist.all_reduce. prepared: the same with phalanx.prepare. "
        "dtensor: PyTorch's DTensor at every step (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1, help="of random weights (%(default)s)")
    parser.add_argument("--backend", choices=["phalanx", "gloo"], default="phalanx")
    return parser.parse_args()


def run(options: argparse.Namespace) -> None:
    if options.checkpoint:
        config = Config.read(options.checkpoint / "config.json")
        weights = checkpoint_weights(options.checkpoint, config)
    else:
        config = Config.read(options.config) if options.config else Config()
        weights = random_weights(options.seed)
    try:
        prompt = [int(number) for number in options.prompt.split(",")]
    except ValueError:
        prompt = []
    if not prompt or not all(0 <= token < config.vocab_size for token in prompt):
        raise phalanx.UsageError(
            f"--prompt {options.prompt}: expected numbers of tokens with commas between them, "
            f"from 0 to {config.vocab_size - 1}"
        )
    if options.tokens < 2:
        raise phalanx.UsageError(f"--tokens {options.tokens} given, expected at least 2")
    with phalanx.init(options.backend) as session:
        use_one_core(session)
        ranks = session.world_size
        mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None
        model = build(config, weights, getattr(torch, options.dtype), mesh)
        count = sum(parameter.numel() for parameter in model.parameters())
        collectives = (PreparedCollectives if options.mode == "prepared" else Collectives)()
        if options.mode != "dtensor":
            use_local_tensors(model, collectives)
        generator = Generator(model, prompt, len(prompt) + options.tokens)
        begin = time.perf_counter()
        generator.step()  # reads the prompt
        first = time.perf_counter()
        collectives.times.clear()
        for _ in range(options.tokens - 1):
            generator.step()
        seconds = time.perf_counter() - first
        if session.is_main:
            print(f"{count:,} parameters, {options.dtype}, ranks: {ranks}")
            print(f"tokens: {' '.join(map(str, generator.tokens[len(prompt) :]))}")
            speed = f"{(options.tokens - 1) / seconds:.1f} tokens/s"
            if collectives.times:
                speed += f", {sum(collectives.times) / seconds:.1%} of the time in collectives"
            print(f"first token after {first - begin:.3f} s, then {speed}")


def main() -> None:
    try:
        run(parse())
    except phalanx.UsageError as error:
        sys.exit(f"tensor_parallel: {error}")


if __name__ == "__main__":
    main()
