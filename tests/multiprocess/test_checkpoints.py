"""Checkpoints of several ranks: saving, loading, and errors that all ranks raise."""

import ctypes
import os
import random
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from phalanx.errors import CheckpointError, UsageError
from phalanx.train import Checkpointer, random_states, restore_random_states
from tests.checkpoint_states import steps
from tests.ranks import RankServer, all_raise

FOLDER = "FOLDER"


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    """Import the modules once instead of in each rank."""
    packages = ("fsdp", "tensor", "checkpoint.state_dict")
    for module in (
        "phalanx.train",
        "torch._dynamo",
        *(f"torch.distributed.{it}" for it in packages),
    ):
        ranks.preload(module)


def make_tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1000, 7), (3,), (), (0, 4), (129, 2, 3), (1, 5000)]
    return {
        f"t{index}": torch.randn(shape, generator=generator) for index, shape in enumerate(shapes)
    }


def equal_tensors(one: Any, other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other)


def save_and_load(seed: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = Path(os.environ[FOLDER])
    tensors = make_tensors(seed)
    for sharded in (False, True):
        checkpoints = Checkpointer(folder / f"sharded-{sharded}", sharded=sharded)
        assert checkpoints.load() is None
        # Without `sharded` only rank 0's state is saved.
        given = tensors if sharded or rank == 0 else {}
        path = checkpoints.save(5, {"tensors": given, "rank": rank})
        found = checkpoints.load(like={"tensors": tensors, "rank": 0})
        assert found is not None
        assert (found.step, found.path, found.world_size) == (5, path, size)
        assert equal_tensors(found.state["tensors"], tensors)
        assert found.state["rank"] == 0
        sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
        assert len(sizes) == (size if sharded else 1)
        if sharded:  # no rank writes much more than its share
            assert max(sizes) < sum(sizes) / size + 4000
        # If one file is damaged, which only one rank reads, all ranks load the previous checkpoint.
        path = checkpoints.save(6, {"tensors": tensors})
        if rank == 0:
            file = max(path.glob("*.safetensors"))
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        dist.barrier()
        found = checkpoints.load()
        assert found is not None
        assert found.step == 5
        # A tensor whose name equals the key of the first rows of another, which two ranks write.
        similar = {"a": torch.arange(4.0), "a[0]": torch.tensor([7.0])}
        checkpoints.save(7, similar)
        found = checkpoints.load()
        assert found is not None
        assert equal_tensors(found.state, similar)


def save_and_load_in_groups(seed: int) -> None:
    """Save and load in the default group, and in a subgroup with a different rank 0."""
    save_and_load(seed)
    members = list(range(1, dist.get_world_size()))
    group = dist.new_group(members)
    folder = Path(os.environ[FOLDER]) / "group"
    if dist.get_rank() in members:
        checkpoints = Checkpointer(folder, group=group, sharded=True)
        checkpoints.save(1, make_tensors(seed))
        found = checkpoints.load()
        assert found is not None
        assert found.world_size == len(members)
        assert equal_tensors(found.state, make_tensors(seed))
    else:
        with pytest.raises(UsageError, match="rank 0 is not a member of the group given"):
            Checkpointer(folder, group=group)


def test_all_ranks_save_and_load(ranks: RankServer) -> None:
    ranks.run(3, save_and_load_in_groups, random.randrange(2**32))


def save_and_load_on_gloo(seed: int) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    method = f"file://{os.environ[FOLDER]}/store"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
    save_and_load(seed)
    dist.destroy_process_group()


def test_other_backend(ranks: RankServer) -> None:
    ranks.run(2, save_and_load_on_gloo, random.randrange(2**32), timeout=None)


def create_before_group(seed: int) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = Path(os.environ[FOLDER])
    own = folder / f"own-{rank}"
    checkpoints = {
        sharded: Checkpointer(folder / str(sharded), sharded=sharded) for sharded in (0, 1)
    }
    own_checkpoints, other_sharded = Checkpointer(own), Checkpointer(own, sharded=True)
    own_checkpoints.save(1, {"rank": rank})
    dist.init_process_group(
        "phalanx", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    for each in checkpoints.values():
        each.save(1, {"tensors": make_tensors(seed), "rank": rank})
        found = each.load()
        assert found is not None
        assert (found.world_size, found.state["rank"]) == (size, 0)
        assert equal_tensors(found.state["tensors"], make_tensors(seed))
    found = own_checkpoints.load()  # now it is rank 0's
    assert found is not None
    assert found.state == {"rank": 0}
    with all_raise(CheckpointError, "^rank 1: .*/own-1 is not the directory that rank 0 sees"):
        other_sharded.load()
    dist.destroy_process_group()
    with pytest.raises(UsageError, match=rf"created by rank {rank} of {size}, whose process group"):
        own_checkpoints.save(2, {})
    assert steps(folder / "0") == steps(folder / "1") == [1]


def test_created_before_process_group(ranks: RankServer) -> None:
    ranks.run(2, create_before_group, random.randrange(2**32), timeout=None)


def check_failures(folder: str) -> None:
    rank = dist.get_rank()
    last = dist.get_world_size() - 1
    own = Path(folder) / str(rank)
    own.mkdir()
    (own / "file").write_text("")
    with all_raise(
        CheckpointError,
        r"^rank 0: cannot write checkpoints to .*/0/file/below: Not a directory: give",
    ):
        Checkpointer(own / "file" / "below")
    with all_raise(
        CheckpointError, rf"^rank .*{last}: .*/{last} is not the directory that rank 0 sees"
    ):
        Checkpointer(own if rank == last else Path(folder) / "0", sharded=True)
    for sharded in (False, True):
        check_failed_saves(Path(folder) / f"{sharded}", sharded)


def check_failed_saves(folder: Path, sharded: bool) -> None:
    rank = dist.get_rank()
    last = dist.get_world_size() - 1
    checkpoints = Checkpointer(folder, sharded=sharded)
    good = {"x": torch.ones(30_000), "y": torch.ones(30_000)}
    checkpoints.save(1, good)
    with all_raise(UsageError, rf"rank {last}: state\['x'\] is a builtins.set"):
        checkpoints.save(2, {"x": set() if rank == last else 1})
    if sharded:
        with all_raise(
            UsageError, r"y is whole F32\[3\] on rank 0 and missing on rank 1, expected"
        ):
            checkpoints.save(
                2, {"x": good["x"], "y": torch.ones(3)} if rank == 0 else {"x": good["x"]}
            )
    writer = last if sharded else 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == writer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    with all_raise(
        CheckpointError,
        f"^rank {writer}: the checkpoint of step 2 was not saved: File too large in {folder}",
    ):
        checkpoints.save(2, good)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(folder) == ["000001-step-1"]
    dist.barrier()
    with all_raise(
        UsageError, r"(?s)does not match this state:.*state\['y'\]: F32\[30000\] in .*, I64"
    ):
        checkpoints.load(like={**good, "y": torch.arange(3) if rank == last else good["y"]})
    found = checkpoints.load()
    assert found is not None
    assert equal_tensors(found.state, good)
    path = checkpoints.save(2, good)
    for name in ("000001-step-1", path.name):
        (folder / name / "manifest.json").unlink(missing_ok=True)
    with all_raise(CheckpointError, "(?s)none of 2 checkpoints is usable.*step-2: .*step-1: "):
        checkpoints.load()


def test_failure_on_one_rank_is_raised_on_all(tmp_path: Path, ranks: RankServer) -> None:
    ranks.run(3, check_failures, str(tmp_path))


def fill_disk(folder: str) -> str:
    """Fill a private file system of a few megabytes."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, recursive_private = 0x00020000, 0x4000 | 0x40000
    for result in (
        libc.unshare(new_mounts),
        libc.mount(b"none", b"/", None, ctypes.c_ulong(recursive_private), None),
        libc.mount(b"none", folder.encode(), b"tmpfs", ctypes.c_ulong(0), b"size=2m"),
    ):
        if result != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    checkpoints = Checkpointer(folder)
    checkpoints.save(1, {"x": torch.ones(200_000)})
    with pytest.raises(CheckpointError, match="No space left on device") as raised:
        checkpoints.save(2, {"x": torch.ones(400_000)})
    assert os.listdir(folder) == ["000001-step-1"]
    checkpoints.save(3, {"x": torch.zeros(200_000)})
    found = checkpoints.load()
    assert found is not None
    assert found.step == 3
    return str(raised.value)


def test_full_disk(tmp_path: Path, ranks: RankServer) -> None:
    if os.geteuid() != 0:
        reason = "needs root to mount a private file system"
        (pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip)(reason)
    (message,) = ranks.run(1, fill_disk, str(tmp_path), timeout=None)
    assert message == (
        f"the checkpoint of step 2 was not saved: No space left on device in {tmp_path}; free disk "
        "space, or keep fewer checkpoints: older checkpoints are unchanged"
    )


def distribute_tensors(seed: int) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = make_tensors(seed)
    state: dict[str, Any] = {"plain": tensors["t0"]}
    for name, dimension in (("t0", 0), ("t1", 0), ("t3", 1), ("t4", 0), ("t4", 2), ("t5", 1)):
        state[f"{name}-{dimension}"] = distribute_tensor(tensors[name], mesh, [Shard(dimension)])
    state["all"] = distribute_tensor(tensors["t4"], mesh, [Replicate()])
    return state


def save_and_load_dtensors(folder: str, seed: int) -> None:
    """Save, then load into the placements of tensors made with another seed."""
    checkpoints = Checkpointer(folder, sharded=True)
    expected = make_tensors(seed)
    like = distribute_tensors(seed + 1)
    if (found := checkpoints.load(like=like)) is not None:  # another world size saved it
        check_distributed(found.state, expected, like)
    state = distribute_tensors(seed)
    checkpoints.save(1, state)
    found = checkpoints.load(like=like)
    assert found is not None
    check_distributed(found.state, expected, like)
    found = checkpoints.load()
    assert found is not None
    assert not any(isinstance(tensor, DTensor) for tensor in found.state.values())
    assert torch.equal(found.state["t4-2"], expected["t4"])
    with all_raise(UsageError, "is a DTensor, of which a rank has only a shard: .*sharded=True"):
        Checkpointer(folder).save(2, state)


def check_distributed(found: Any, expected: dict[str, Tensor], like: dict[str, Any]) -> None:
    assert torch.equal(found["plain"], expected["t0"])
    assert torch.equal(found["all"].to_local(), expected["t4"])
    for name, tensor in like.items():
        if isinstance(tensor, DTensor):
            assert found[name].placements == tensor.placements
            original = expected["t4" if name == "all" else name.partition("-")[0]]
            assert torch.equal(found[name].full_tensor(), original)


def test_dtensors_at_any_world_size(tmp_path: Path, ranks: RankServer) -> None:
    seed = random.randrange(2**32)
    for size in (2, 3):
        ranks.run(size, save_and_load_dtensors, str(tmp_path), seed)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train with the same batch on every rank, so that the world size makes no difference."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(8, 6, dtype=torch.double, generator=generator)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def make_sharded_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5)).double()
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def get_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def resume_training(folder: str) -> dict[str, Tensor]:
    """Resume from the checkpoint for three steps; return the parameters."""
    model, optimizer = make_sharded_model()
    found = Checkpointer(folder, sharded=True).load(like=get_state(model, optimizer))
    assert found is not None
    set_state_dict(
        model,
        optimizer,
        model_state_dict=found.state["model"],
        optim_state_dict=found.state["optimizer"],
    )
    train(model, optimizer, range(3, 6))
    return full_tensors(model)


def full_tensors(model: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Any] = model.state_dict()
    return {name: tensor.full_tensor() for name, tensor in state.items()}


def train_with_fsdp(folder: str) -> dict[str, Tensor]:
    """Train three steps, save, train three more; then repeat the latter from the checkpoint."""
    model, optimizer = make_sharded_model()
    train(model, optimizer, range(3))
    Checkpointer(folder, sharded=True).save(3, get_state(model, optimizer))
    train(model, optimizer, range(3, 6))
    assert equal_tensors(resume_training(folder), full_tensors(model))
    return full_tensors(model)


def test_fsdp_resumes_at_any_world_size(tmp_path: Path, ranks: RankServer) -> None:
    uninterrupted = ranks.run(2, train_with_fsdp, str(tmp_path), limit=100)[0]
    resumed = ranks.run(3, resume_training, str(tmp_path), limit=100)[0]
    # Gradients are averaged over more ranks, which rounds differently.
    assert all(torch.allclose(resumed[name], uninterrupted[name], atol=1e-9) for name in resumed)


def draw_on_each_rank(resume: bool, folder: str) -> list[Any]:
    rank = dist.get_rank()
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    checkpoints = Checkpointer(folder)
    if resume:
        found = checkpoints.load()
        assert found is not None
        assert restore_random_states(found.state["random"]) == (rank < 2)
    else:
        checkpoints.save(1, {"random": random_states()})
    return [random.random(), np.random.random(), torch.rand(3).tolist()]


def test_random_states_of_each_rank(tmp_path: Path, ranks: RankServer) -> None:
    before = ranks.run(2, draw_on_each_rank, False, str(tmp_path))
    after = ranks.run(3, draw_on_each_rank, True, str(tmp_path))
    assert before[0] != before[1]
    assert after[:2] == before
