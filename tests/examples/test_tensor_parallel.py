"""tensor_parallel.py and its model llama.py, compared with a forward pass that is written anew.

The oracle computes the logits of every text from the beginning, without a cache, with explicit
softmax, complex rotations and one loop over the heads.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.docs.fences import read_fences
from tests.ranks import RankServer

pytestmark = pytest.mark.slow

SHAPE = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
}
PROMPT, COUNT = [3, 1, 4, 1, 5], 12
MODES = ("local", "prepared", "dtensor")


@pytest.fixture(scope="module")
def examples(repository: Path) -> Path:
    return repository / "examples"


@pytest.fixture
def llama(examples: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(examples)
    return importlib.import_module("llama")


def parameters(seed: int = 1, **changes: Any) -> dict[str, Tensor]:
    """Random weights by the names of Hugging Face's checkpoints."""
    shape = {**SHAPE, **changes}
    hidden, inner, width = (shape[n] for n in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (shape[f"num_{n}_heads"] * width for n in ("attention", "key_value"))
    shapes = {
        "embed_tokens": (shape["vocab_size"], hidden),
        "norm": (hidden,),
        "lm_head": (shape["vocab_size"], hidden),
    }
    for number in range(shape["num_hidden_layers"]):
        for name, size in {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            shapes[f"layers.{number}.{name}"] = size
    random = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(size, generator=random) for name, size in shapes.items()}
    return {
        (f"{name}.weight" if name == "lm_head" else f"model.{name}.weight"): (
            1 + 0.1 * value if value.dim() == 1 else value * value.shape[1] ** -0.5
        )
        for name, value in values.items()
    }


def oracle(weights: dict[str, Tensor], text: list[int], **changes: Any) -> Tensor:
    """Return the logits of the token after a text."""
    shape = {**SHAPE, **changes}
    w = {name.removesuffix(".weight").removeprefix("model."): t for name, t in weights.items()}
    width, heads = shape["head_dim"], shape["num_attention_heads"]
    group = heads // shape["num_key_value_heads"]
    turns = shape["rope_theta"] ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(len(text))[:, None] * turns

    def norm(x: Tensor, scale: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + shape["rms_norm_eps"]).sqrt() * scale

    def rotated(x: Tensor) -> Tensor:
        turned = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones(()), angles)
        return torch.cat([turned.real, turned.imag], dim=-1)

    x = w["embed_tokens"][text]
    for number in range(shape["num_hidden_layers"]):
        layer = f"layers.{number}."
        y = norm(x, w[layer + "input_layernorm"])
        query, key, value = (y @ w[f"{layer}self_attn.{n}_proj"].T for n in "qkv")
        outputs = []
        for head in range(heads):
            own = slice(head * width, (head + 1) * width)
            shared = slice(head // group * width, (head // group + 1) * width)
            scores = rotated(query[:, own]) @ rotated(key[:, shared]).T / width**0.5
            later = torch.ones_like(scores).triu(1).bool()
            outputs.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ value[:, shared])
        x = x + torch.cat(outputs, dim=-1) @ w[layer + "self_attn.o_proj"].T
        y = norm(x, w[layer + "post_attention_layernorm"])
        gate, up = (y @ w[f"{layer}mlp.{n}_proj"].T for n in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ w[layer + "mlp.down_proj"].T
    return norm(x[-1], w["norm"]) @ w["lm_head"].T


def generate_in_every_mode(examples: Path, directory: Path) -> dict[str, tuple[list[int], Tensor]]:
    """Run on a rank: return the tokens and the logits before each of them, by mode."""
    sys.path.insert(0, str(examples))
    llama = importlib.import_module("llama")
    example = importlib.import_module("tensor_parallel")
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    mesh = example.init_device_mesh("cpu", (ranks,)) if ranks > 1 else None
    config = llama.Config.read(directory / "config.json")
    results = {}
    for mode in MODES:
        weights = llama.checkpoint_weights(directory, config)
        model = example.build(config, weights, torch.float32, mesh)
        if mode != "dtensor":
            prepared = mode == "prepared"
            kind = example.PreparedCollectives if prepared else example.Collectives
            collectives = kind()
            example.use_local_tensors(model, collectives)
        generator = example.Generator(model, PROMPT, len(PROMPT) + COUNT)
        logits = []
        for _ in range(COUNT):
            generator.step()
            logits.append(generator.logits.clone())
        if mode != "dtensor":  # two in each layer, and that of the logits
            expected = 0 if ranks == 1 else COUNT * (2 * config.num_hidden_layers + 1)
            assert len(collectives.times) == expected
        results[mode] = (generator.tokens, torch.stack(logits))
    return results


def save(directory: Path, weights: dict[str, Tensor], **config: Any) -> None:
    """Write a checkpoint of two files."""
    safetensors = pytest.importorskip("safetensors.torch")
    names = sorted(weights)
    for number, part in enumerate((names[::2], names[1::2])):
        tensors = {name: weights[name] for name in part}
        safetensors.save_file(tensors, directory / f"model-{number}.safetensors")
    (directory / "config.json").write_text(json.dumps({**SHAPE, **config}))


@pytest.fixture(scope="module", autouse=True)
def dtensor_loaded(ranks: RankServer) -> None:
    """Imported once, not by each rank."""
    ranks.preload("torch.distributed.tensor.parallel")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_tokens_and_logits_equal_those_of_the_oracle(
    ranks: RankServer, examples: Path, tmp_path: Path, size: int
) -> None:
    weights = parameters()
    save(tmp_path, weights)
    tokens, logits = list(PROMPT), []
    for _ in range(COUNT):
        logits.append(oracle(weights, tokens))
        tokens.append(int(logits[-1].argmax()))
    assert len(set(tokens[len(PROMPT) :])) > 2  # the text depends on the context
    for results in ranks.run(size, generate_in_every_mode, examples, tmp_path):
        for mode in MODES:
            assert results[mode][0] == tokens, mode
            torch.testing.assert_close(results[mode][1], torch.stack(logits), msg=mode)


def test_tied_embeddings(ranks: RankServer, examples: Path, tmp_path: Path) -> None:
    weights = parameters()
    del weights["lm_head.weight"]
    save(tmp_path, weights, tie_word_embeddings=True)
    tied = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    for results in ranks.run(2, generate_in_every_mode, examples, tmp_path):
        tokens, logits = results["local"]
        torch.testing.assert_close(logits[-1], oracle(tied, tokens[:-1]))


@pytest.mark.long
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_those_of_transformers(
    ranks: RankServer, examples: Path, tmp_path: Path, tied: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    shape = {name: value for name, value in SHAPE.items() if name != "model_type"}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**shape, tie_word_embeddings=tied)
    )
    model.save_pretrained(tmp_path)
    for results in ranks.run(2, generate_in_every_mode, examples, tmp_path):
        for tokens, logits in results.values():
            with torch.no_grad():
                expected = model(torch.tensor([tokens[:-1]])).logits[0, len(PROMPT) - 1 :]
            torch.testing.assert_close(logits, expected)


def start(examples: Path, *options: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    launcher = [] if ranks == 1 else ["-m", "phalanx", "run", "--nproc-per-node", str(ranks)]
    script = str(examples / "tensor_parallel.py")
    command = [sys.executable, *launcher, script, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def small_config(directory: Path, **changes: Any) -> list[str]:
    path = directory / "config.json"
    path.write_text(json.dumps({**SHAPE, **changes}))
    return ["--config", str(path), "--tokens", "9"]


def test_every_number_of_ranks_prints_the_same_tokens(examples: Path, tmp_path: Path) -> None:
    options = small_config(tmp_path)
    lines = []
    for size in (1, 2):
        result = start(examples, *options, ranks=size)
        assert (result.returncode, result.stderr) == (0, "")
        lines.append([line.removeprefix("[rank 0] ") for line in result.stdout.splitlines()])
    alone, split = lines
    assert alone[0] == split[0].replace("ranks: 2", "ranks: 1")
    assert re.fullmatch(r"[\d,]+ parameters, float32, ranks: 1", alone[0])
    assert alone[1] == split[1]
    assert re.fullmatch(r"tokens:( \d+){9}", alone[1])
    speed = r"first token after [\d.]+ s, then [\d.]+ tokens/s"
    assert re.fullmatch(speed, alone[2])
    assert re.fullmatch(speed + r", [\d.]+% of the time in collectives", split[2])


@pytest.mark.parametrize(
    "options",
    [("--backend", "gloo"), ("--mode", "prepared", "--dtype", "bfloat16"), ("--mode", "dtensor")],
)
def test_options(examples: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    result = start(examples, *small_config(tmp_path), *options, ranks=2)
    assert result.returncode == 0, result.stderr
    assert "tokens/s" in result.stdout


def test_heads_that_the_ranks_do_not_divide(examples: Path, tmp_path: Path) -> None:
    changes = {"num_key_value_heads": 2}
    result = start(examples, *small_config(tmp_path, **changes), ranks=4)
    assert result.returncode != 0
    message = (
        "tensor_parallel: 4 ranks cannot split a model with num_key_value_heads 2: the number of "
        "ranks must divide it. Smaller numbers that do: 1, 2"
    )
    assert message in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompt", "1,x"), "--prompt 1,x: expected numbers of tokens"),
        (("--prompt", "32000"), "from 0 to 31999"),
        (("--tokens", "1"), "--tokens 1 given, expected at least 2"),
        (("--config", "absent.json"), "absent.json"),
    ],
)
def test_invalid_options(examples: Path, options: tuple[str, str], message: str) -> None:
    result = start(examples, *options)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; only 'llama' is supported"),
        ({"hidden_size": None}, "hidden_size is None, expected a positive int"),
        ({"hidden_size": 31.5}, "hidden_size is 31.5, expected a positive int"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a positive int"),
        ({"vocab_size": True}, "vocab_size is True, expected a positive int"),
        ({"rope_theta": "x"}, "rope_theta is 'x', expected a positive float"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, expected true or false"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": 5}, "head_dim 5"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type is 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type is 'llama3'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"quantization_config": {}}, "quantization_config is {}"),
    ],
)
def test_unsupported_configurations(
    llama: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    small_config(tmp_path, **changes)
    with pytest.raises(RuntimeError, match=re.escape(message)) as raised:
        llama.Config.read(tmp_path / "config.json")
    assert str(raised.value).startswith(str(tmp_path / "config.json"))


@pytest.mark.parametrize("text", ["[1]", "{", "\udc80"])
def test_configurations_that_are_no_json_objects(llama: Any, tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(RuntimeError, match=r"config\.json"):
        llama.Config.read(path)


def test_defaults_of_a_configuration(llama: Any) -> None:
    optional = {"num_key_value_heads", "head_dim", "rope_theta"}
    given = {name: value for name, value in SHAPE.items() if name not in optional}
    config = llama.Config.parse({**given, "rope_parameters": {"rope_theta": 5e5}})
    assert (config.num_key_value_heads, config.head_dim, config.rope_theta) == (8, 4, 5e5)


def test_damaged_checkpoints(llama: Any, tmp_path: Path) -> None:
    weights = parameters()
    del weights["model.norm.weight"]
    save(tmp_path, weights)
    config = llama.Config.read(tmp_path / "config.json")
    read = llama.checkpoint_weights(tmp_path, config)
    with pytest.raises(RuntimeError, match=r"tensor model\.norm\.weight is missing"):
        read("norm.weight", torch.Size([32]))
    with pytest.raises(RuntimeError, match=r"shape \[96, 32\], config.json asks for \[96, 64\]"):
        read("embed_tokens.weight", torch.Size([96, 64]))
    (tmp_path / "model-1.safetensors").write_bytes(b"damaged")
    with pytest.raises(RuntimeError, match=r"model-1\.safetensors: "):
        llama.checkpoint_weights(tmp_path, config)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(RuntimeError, match=r"no \*\.safetensors"):
        llama.checkpoint_weights(tmp_path, config)


def test_safetensors_is_not_installed(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(RuntimeError, match="pip install safetensors"):
        llama.checkpoint_weights(tmp_path, llama.Config())


def test_the_guide_shows_parts_of_the_example(examples: Path) -> None:
    program = (examples / "tensor_parallel.py").read_text()
    page = examples.parent / "docs/tensor-parallelism.md"
    blocks = [fence.text for fence in read_fences(page) if fence.language == "python"]
    assert blocks
    for block in blocks:
        assert block in program
