"""A small Llama for one process: the model, its configuration and its weights.

`tensor_parallel.py` splits it over ranks; nothing here knows of ranks. The modules have the names
of Hugging Face's checkpoints, so a directory with `config.json` and `*.safetensors` can be loaded.
"""

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx

Weights = Callable[[str, torch.Size], Tensor]
"""A function that returns the whole tensor of a parameter, by its name and shape."""


@dataclass(frozen=True)
class Config:
    """The shape of a Llama, by the names of `config.json`."""

    vocab_size: int = 32_000
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int = 4
    head_dim: int = 64
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False

    @classmethod
    def read(cls, path: Path) -> "Config":
        """Read and check a `config.json`; raise UsageError if this model cannot represent it."""
        try:
            given = json.loads(path.read_text())
            if not isinstance(given, dict):
                raise ValueError("not a JSON object")
            return cls.parse(given)
        except (OSError, ValueError) as error:
            raise phalanx.UsageError(f"{path}: {error}") from None

    @classmethod
    def parse(cls, given: dict[str, Any]) -> "Config":
        """Check the contents of a `config.json`; raise ValueError if they are not supported."""
        # transformers 5 has moved the settings of the rotation into a dictionary.
        rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
        for name, value, supported in (
            ("model_type", given.get("model_type"), "llama"),
            ("rope_type", rope.get("rope_type", rope.get("type", "default")), "default"),
            ("hidden_act", given.get("hidden_act", "silu"), "silu"),
            ("attention_bias", given.get("attention_bias", False), False),
            ("mlp_bias", given.get("mlp_bias", False), False),
            ("quantization_config", given.get("quantization_config"), None),
        ):
            if value != supported:
                raise ValueError(f"{name} is {value!r}; only {supported!r} is supported")
        optional = {
            "num_key_value_heads": given.get("num_attention_heads"),
            "rms_norm_eps": 1e-6,
            "rope_theta": rope.get("rope_theta", cls.rope_theta),
            "tie_word_embeddings": False,
        }
        given = {**optional, **{name: each for name, each in given.items() if each is not None}}
        hidden, heads = given.get("hidden_size"), given.get("num_attention_heads")
        if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            given.setdefault("head_dim", hidden // heads)
        for field in fields(cls):
            value, kind = given.get(field.name), type(field.default)
            is_number = not isinstance(value, bool) and isinstance(value, int | kind) and value > 0
            if not (isinstance(value, bool) if kind is bool else is_number):
                expected = "true or false" if kind is bool else f"a positive {kind.__name__}"
                raise ValueError(f"{field.name} is {value!r}, expected {expected}")
        config = cls(**{field.name: given[field.name] for field in fields(cls)})
        if config.num_attention_heads % config.num_key_value_heads or config.head_dim % 2:
            raise ValueError(
                f"num_attention_heads is {config.num_attention_heads}, num_key_value_heads "
                f"{config.num_key_value_heads} and head_dim {config.head_dim}: expected that the "
                "second divides the first, and an even head_dim"
            )
        return config


class Cache:
    """The keys and values of all tokens so far, for one layer: two of [n, heads, tokens, width]."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.keys = self.values = torch.empty(0)

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens; return those of all tokens."""
        if self.length == 0:  # the number of heads may be that of a rank's share
            n, heads, _, width = keys.shape
            self.keys = keys.new_empty(n, heads, self.capacity, width)
            self.values = torch.empty_like(self.keys)
        start, self.length = self.length, self.length + keys.shape[2]
        self.keys[:, :, start : self.length] = keys
        self.values[:, :, start : self.length] = values
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


class Attention(nn.Module):
    """Causal attention; groups of query heads share a head of keys and values."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None) -> Tensor:
        """Take and return [n, new tokens, hidden]."""
        # The heads are counted by the tensors: with tensor parallelism, a rank has some of them.
        queries, keys, values = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
        if cache is not None:
            keys, values = cache.extend(keys, values)
        y = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=x.shape[1] > 1, enable_gqa=True
        )
        return self.o_proj(y.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of elements by an angle that grows with the position (rotary embedding)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class MLP(nn.Module):
    """The feed-forward layer, with SwiGLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return [n, tokens, hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and a feed-forward layer, each added to its input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None) -> Tensor:
        """Take and return [n, new tokens, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A Llama that returns the logits of the token after the last one."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, caches: list[Cache] | None = None) -> Tensor:
        """Take int64 [n, new tokens]; return [n, vocabulary].

        Without caches, the tokens are the whole text. With caches, the first call gives the prompt,
        and each further one a token.
        """
        start = caches[0].length if caches else 0
        x = self.embed_tokens(tokens)
        positions = torch.arange(start, start + tokens.shape[1])
        width = self.config.head_dim
        frequencies = self.config.rope_theta ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(positions, frequencies)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for number, layer in enumerate(self.layers):
            x = layer(x, cos, sin, caches[number] if caches else None)
        return self.lm_head(self.norm(x[:, -1]))


def random_weights(seed: int) -> Weights:
    """Return random weights, the same for a parameter in every process."""

    def weights(name: str, shape: torch.Size) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape)  # of a norm
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        scale = 1.0 if name.startswith("embed") else shape[1] ** -0.5
        return torch.randn(shape, generator=generator) * scale

    return weights


def checkpoint_weights(directory: Path, config: Config) -> Weights:
    """Return the weights in the safetensors files of a directory."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise phalanx.UsageError(
            "a checkpoint is read with safetensors, which is not installed: pip install safetensors"
        ) from None
    files = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            opened = safe_open(path, framework="pt")
        except Exception as error:  # noqa: BLE001 - the type depends on the version
            raise phalanx.UsageError(f"{path}: {error}") from None
        files.update(dict.fromkeys(opened.keys(), opened))
    if not files:
        raise phalanx.UsageError(f"{directory}: no *.safetensors in it")

    def weights(name: str, shape: torch.Size) -> Tensor:
        if name.startswith("lm_head") and config.tie_word_embeddings:
            name = "embed_tokens.weight"
        key = name if name.startswith("lm_head") else f"model.{name}"
        if key not in files:
            raise phalanx.UsageError(f"{directory}: tensor {key} is missing")
        tensor: Tensor = files[key].get_tensor(key)
        if tensor.shape != shape:
            raise phalanx.UsageError(
                f"{directory}: {key} has the shape {list(tensor.shape)}, config.json asks for "
                f"{list(shape)}"
            )
        return tensor

    return weights
