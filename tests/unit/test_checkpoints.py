"""Checkpoints in one process: saving and loading."""

import hashlib
import os
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from phalanx.checkpoints import checkpointer, files
from phalanx.checkpoints.safetensors import DTYPES, read_tensors
from phalanx.errors import UsageError
from phalanx.train import Checkpointer, random_states, restore_random_states
from tests.checkpoint_states import check_numbered, numbered, random_tensor, same, same_bits

# The tests make their own folders: Hypothesis runs one test function many times.
FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
tensors = st.builds(random_tensor, st.sampled_from(list(DTYPES)), shapes)
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None))
)
states = st.dictionaries(
    st.text() | st.integers(),
    st.recursive(
        scalars | tensors,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=4)
        ),
        max_leaves=12,
    ),
    max_size=4,
)


@FOLDER
@given(state=states, step=st.integers(0, 10**12))
def test_saved_state_is_loaded(
    state: dict[str, Any], step: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("state")
    checkpoints = Checkpointer(folder)
    assert checkpoints.load() is None
    path = checkpoints.save(step, state)
    loaded = checkpoints.load(like=state)
    assert loaded is not None
    assert (loaded.step, loaded.path, loaded.world_size) == (step, path, 1)
    assert same(loaded.state, state)
    shutil.rmtree(folder)


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
def test_safetensors_library_reads_files(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {
        f"{index}": random_tensor(dtype, shape)
        for index, shape in enumerate([(3, 5), (), (0,), (64,)])
    }
    path = Checkpointer(tmp_path).save(1, state) / "state-00000.safetensors"
    read = safetensors.torch.load_file(path)
    assert read.keys() == state.keys()
    assert all(same_bits(read[name], state[name]) for name in state)
    written = safetensors.torch.save(state)
    buffer = torch.frombuffer(bytearray(written), dtype=torch.uint8)
    read_back = read_tensors(buffer)
    assert all(same_bits(read_back[name], state[name]) for name in state)


def test_views_and_tied_tensors(tmp_path: Path) -> None:
    base = torch.randn(40, 30)
    complex_tensor = torch.randn(4, dtype=torch.complex64)
    model = nn.Linear(5, 5)
    state = {
        "transposed": base.t(),
        "strided": base[::3, 1::2],
        "expanded": torch.randn(1, 3).expand(50, 3),
        "conjugate": complex_tensor.conj(),
        "negative": complex_tensor.conj().imag,
        "trained": model.weight,
        "model": model.state_dict(),
        "again": [base, base],
        "part": torch.empty(10**6)[:3].fill_(7),
    }
    checkpoints = Checkpointer(tmp_path)
    path = checkpoints.save(0, state)
    loaded = checkpoints.load()
    assert loaded is not None
    assert same(loaded.state, state)
    # Each tensor is written once, and a view without the rest of its base.
    assert sum(file.stat().st_size for file in path.iterdir()) < 30_000
    assert loaded.state["trained"] is loaded.state["model"]["weight"]
    assert loaded.state["again"][0] is loaded.state["again"][1]
    for tensor in (loaded.state["transposed"], loaded.state["part"], loaded.state["strided"]):
        assert tensor.data_ptr() % 64 == tensor.storage_offset() == 0
        tensor.add_(1)  # in separate memory
    assert same(loaded.state["again"][0], base)


def test_sha256sum_verifies_checkpoint(tmp_path: Path) -> None:
    path = Checkpointer(tmp_path).save(3, numbered(3))
    check = ["sha256sum", "--strict", "-c", "SHA256SUMS"]
    output = subprocess.run(check, cwd=path, capture_output=True, text=True, check=True).stdout
    assert output.count("OK") == len(list(path.iterdir())) - 1


def test_keep_and_foreign_files(tmp_path: Path) -> None:
    """The last `keep` checkpoints remain, and files that are not checkpoints."""
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".saving-mine").mkdir()
    foreign_directory = tmp_path / "000002-step-7"
    foreign_directory.mkdir()
    (foreign_directory / "results.csv").write_text("mine too")
    leftover = tmp_path / ".saving-000001-step-1-0123abcd"
    leftover.mkdir()
    (leftover / "state-00000.safetensors").write_text("half")
    checkpoints = Checkpointer(tmp_path, keep=2)
    names = [checkpoints.save(step, numbered(step)).name for step in (10, 20, 5, 5)]
    checkpoints._directory.wait_for_removals()
    assert names == ["000003-step-10", "000004-step-20", "000005-step-5", "000006-step-5"]
    foreign = {"notes.txt", ".saving-mine", "000002-step-7"}
    assert set(os.listdir(tmp_path)) == {*names[2:], *foreign}
    assert (foreign_directory / "results.csv").read_text() == "mine too"
    check_numbered(checkpoints.load(), 5)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([], "state is a list, expected a dict"),
        ({"a": {"b": object()}}, r"state['a']['b'] is a builtins.object, expected a tensor"),
        ({"a": b"bytes"}, "state['a'] is a builtins.bytes"),
        ({"a": np.ones(3)}, "state['a'] is a numpy.ndarray"),
        ({(1, 2): 3}, "state has the key (1, 2), a tuple, expected str or int"),
        ({True: 3}, "state has the key True, a bool"),
        (
            {"a": torch.ones(2, dtype=torch.complex128)},
            "torch.complex128, which safetensors does not",
        ),
        ({"a": torch.ones(2, 2).to_sparse()}, "state['a'] is a sparse_coo tensor"),
        ({"a": [torch.ones(2, device="meta")]}, "state['a'][0] is a meta tensor"),
    ],
)
def test_unsupported_values(state: Any, message: str, tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    with pytest.raises(UsageError, match=re.escape(message)):
        checkpoints.save(1, state)
    assert os.listdir(tmp_path) == []


def test_state_that_contains_itself(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": []}
    state["a"].append(state)
    with pytest.raises(UsageError, match="contains itself"):
        Checkpointer(tmp_path).save(1, state)


def test_invalid_arguments(tmp_path: Path) -> None:
    for keep in (0, -1, 1.5, True):
        with pytest.raises(UsageError, match=r"keep .* given, expected an integer of at least 1"):
            Checkpointer(tmp_path, keep=keep)  # type: ignore[arg-type]
    for step in (-1, 2.0, True, None):
        with pytest.raises(UsageError, match=r"step .* given, expected an integer of at least 0"):
            Checkpointer(tmp_path).save(step, {})  # type: ignore[arg-type]


def test_like_lists_all_differences(tmp_path: Path) -> None:
    state = {
        "model": {"a": torch.ones(2, 3), "b": torch.ones(4), "c": 1},
        "optimizer": {"state": {0: torch.ones(2)}, "groups": [{"lr": 0.1}]},
    }
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, state)
    # Missing optimizer state and different plain values are not differences.
    assert same(getattr(checkpoints.load(like={"model": state["model"]}), "state", None), state)
    new_state = {**state, "optimizer": {"state": {}, "groups": [{"lr": 0.5}]}}
    assert same(getattr(checkpoints.load(like=new_state), "state", None), state)
    other = {
        "model": {"a": torch.ones(3, 2), "b": torch.ones(4).half(), "d": torch.ones(())},
        "optimizer": {"state": torch.ones(1), "groups": [1, 2]},
    }
    with pytest.raises(UsageError, match="of step 1 does not match this state") as raised:
        checkpoints.load(like=other)
    assert [line.strip() for line in str(raised.value).splitlines()[1:-1]] == [
        "state['model']['d']: missing in the checkpoint",
        "state['model']['c']: in the checkpoint only",
        "state['model']['a']: F32[2, 3] in the checkpoint, F32[3, 2] here",
        "state['model']['b']: F32[4] in the checkpoint, F16[4] here",
        "state['optimizer']['state']: a dict in the checkpoint, F32[1] here",
        "state['optimizer']['groups']: 1 items in the checkpoint, 2 here",
    ]


def test_parts_of_all_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are in order, however parts are split into batches."""
    monkeypatch.setattr(files, "BATCH", 1000)
    monkeypatch.setattr(files, "BUFFERS", 3)
    monkeypatch.setattr(files, "SMALL", 300)
    monkeypatch.setattr(files, "BACKLOG", 2)
    lengths = [random.choice([0, 1, 7, 299, 300, 301, 999, 1000, 1001, 5432]) for _ in range(200)]
    parts = [os.urandom(length) for length in lengths]
    content = b"".join(parts)
    length, digest = files.write_file(tmp_path / "file", parts)
    assert (tmp_path / "file").read_bytes() == content
    assert (length, digest) == (len(content), hashlib.sha256(content).hexdigest())
    read = files.read_verified(tmp_path / "file", length, digest)
    assert read.numpy().tobytes() == content


def test_parallel_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer, "FILE_BYTES", 10_000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    state = {f"{index}": torch.randn(index * 100) for index in range(20)}
    checkpoints = Checkpointer(tmp_path)
    path = checkpoints.save(1, state)
    loaded = checkpoints.load(like=state)
    assert loaded is not None
    assert same(loaded.state, state)
    written = [safetensors.torch.load_file(file) for file in path.glob("*.safetensors")]
    assert len(written) == 3
    # Each tensor is whole in one file.
    merged = {name: tensor for file in written for name, tensor in file.items()}
    assert same({name: merged[name] for name in state}, state)
    assert sum(map(len, written)) == len(state)


def test_random_states_are_restored(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        return [
            random.random(),
            random.gauss(0, 1),
            np.random.standard_normal(3).tolist(),
            torch.randn(5).tolist(),
            torch.randperm(7).tolist(),
        ]

    draw()  # leaves half a pair of normal numbers in the generator
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, {"random": random_states()})
    first = draw()
    loaded = checkpoints.load()
    assert loaded is not None
    assert restore_random_states(loaded.state["random"])
    assert draw() == first


def test_missing_random_states(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UsageError, match="the list that random_states returned"):
        restore_random_states([{"torch": 1}])
    assert not restore_random_states([])
    assert "rank 0 has no random state in this list of 0" in caplog.text


def test_optimizer_resumes(tmp_path: Path) -> None:
    """A resumed training makes the same steps."""

    def train(steps: int, checkpoint: Any = None) -> list[float]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
        if checkpoint is not None:
            for name, part in parts.items():
                part.load_state_dict(checkpoint.state[name])
            restore_random_states(checkpoint.state["random"])
        losses = []
        for step in range(steps):
            if step == 5 and checkpoint is None:
                state = {name: part.state_dict() for name, part in parts.items()}
                Checkpointer(tmp_path).save(step, {**state, "random": random_states()})
            loss = model(torch.randn(6, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        return losses

    content = train(10)
    assert train(5, Checkpointer(tmp_path).load()) == content[5:]
