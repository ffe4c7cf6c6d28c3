import os
import subprocess
import sys
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.errors import UsageError
from tests.seeds import fresh_seed

BACKEND = "phalanx"
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def alone(monkeypatch):
    for name in PLACE:
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    if dist.is_initialized():
        dist.destroy_process_group()


def test_alone_is_rank_0_of_1(alone):
    with phalanx.init(BACKEND, timeout=30, device="cpu") as session:
        assert (session.rank, session.world_size) == (0, 1)
        assert (session.local_rank, session.local_world_size) == (0, 1)
        assert (session.is_main, session.backend) == (True, BACKEND)
        assert session.device == torch.device("cpu")
        tensor = torch.full((3,), 7.0)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [7, 7, 7]
    assert not dist.is_initialized()
    session.close()  # a second time does nothing


def test_leave_after_an_exception(alone):
    with pytest.raises(KeyError), phalanx.init(BACKEND, timeout=timedelta(seconds=30)):
        raise KeyError
    assert not dist.is_initialized()


def test_use_an_existing_group_and_keep_it(alone):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with phalanx.init("phalanx", device="cpu") as session:
        assert session.backend == "gloo"
        assert (session.rank, session.world_size) == (0, 1)
    assert dist.is_initialized()


@pytest.mark.slow
def test_a_model_outlives_its_session_on_gloo():
    """A thread of Gloo still needs the GIL when the model of a left group is destroyed."""
    program = """
import sys, threading
import torch
import torch.distributed as dist
import phalanx

started, proceed = threading.Event(), threading.Event()

def block_thread(_):
    # If the operation has ended already, the callback runs in the main thread.
    if threading.current_thread() is not threading.main_thread():
        started.set()
        proceed.wait()

with phalanx.init("gloo"):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    while not started.wait(0.01):
        dist.all_reduce(torch.ones(1 << 20), async_op=True).get_future().then(block_thread)
sys.setswitchinterval(1000)  # the thread gets the GIL only if this one releases it
proceed.set()
del model
print("ended")
"""
    environment = {name: value for name, value in os.environ.items() if name not in PLACE}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.stdout, ended.returncode) == ("ended\n", 0), ended.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize("nprocs", [2, 4])
def test_ranks_of_a_launched_job(nprocs):
    seed, backend = fresh_seed(), BACKEND

    def rank_of_many():
        import numpy as np
        import torch
        import torch.distributed as dist

        import phalanx

        with phalanx.init(backend, timeout=60, device="cpu") as session:
            data = np.random.default_rng(seed + session.rank).standard_normal(1001)
            tensor = torch.from_numpy(data.astype(np.float32))
            dist.all_reduce(tensor)
            place = (session.rank, session.world_size, session.local_rank, session.is_main)
        return place, tensor.numpy(), dist.is_initialized()

    results = phalanx.launch(rank_of_many, nprocs, timeout=90)
    expected = sum(np.random.default_rng(seed + r).standard_normal(1001) for r in range(nprocs))
    for rank, (place, total, initialized) in enumerate(results):
        assert place == (rank, nprocs, rank, rank == 0)
        assert not initialized
        np.testing.assert_allclose(total, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"MASTER_ADDR": "localhost"}, "lacks RANK, WORLD_SIZE, MASTER_PORT"),
        (
            dict(zip(PLACE, ("2", "2", "0", "2", "localhost", "1234"), strict=True)),
            "RANK=2 and WORLD_SIZE=2",
        ),
        (
            dict(zip(PLACE, ("0", "2", "x", "2", "localhost", "1234"), strict=True)),
            "LOCAL_RANK='x'",
        ),
    ],
)
def test_bad_environment(alone, environ, message):
    for name, value in environ.items():
        alone.setenv(name, value)
    with pytest.raises(UsageError, match=message):
        phalanx.init(BACKEND)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"backend": "glo"},
            "backend is 'glo': 'glo' does not exist; expected one of .*did you mean 'gloo'",
        ),
        ({"backend": 3}, "backend is 3"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": float("inf")}, "timeout is inf"),
        ({"timeout": "soon"}, "timeout is 'soon'"),
        ({"timeout": timedelta(0)}, "greater than 0"),
        ({"device": "gpu9"}, "device is 'gpu9'"),
    ],
)
def test_bad_arguments(alone, arguments, message):
    with pytest.raises(UsageError, match=message):
        phalanx.init(**{"backend": BACKEND, **arguments})
    assert not dist.is_initialized()


def test_only_available_backends_are_offered(alone):
    with pytest.raises(UsageError) as caught:
        phalanx.init("phalnx")
    message, _, hint = str(caught.value).rpartition("; ")
    assert hint == "did you mean 'phalanx'?"
    offered = message.partition("; expected one of ")[2].split(", ")
    assert {"phalanx", "gloo"} <= {*offered}
    for name in ("nccl", "mpi", "ucc", "xccl"):
        available = getattr(dist, f"is_{name}_available")()
        assert (name in offered) is available
        if not available:
            with pytest.raises(UsageError, match=f"'{name}' is not part of this build of PyTorch"):
                phalanx.init(name)


def test_gpu_of_the_local_rank(alone):
    chosen = []
    alone.setattr(torch.cuda, "is_available", lambda: True)
    alone.setattr(torch.cuda, "device_count", lambda: 2)
    alone.setattr(torch.cuda, "set_device", chosen.append)
    alone.setattr("phalanx.launcher.init._form_group", lambda *args: None)
    alone.setattr(dist, "get_backend", lambda: "nccl")
    place = dict(zip(PLACE, ("5", "8", "3", "4", "localhost", "1234"), strict=True))
    for name, value in place.items():
        alone.setenv(name, value)
    assert phalanx.init("nccl").device == torch.device("cuda", 1)
    assert phalanx.init("nccl", device="cuda").device == torch.device("cuda", 1)
    assert phalanx.init("nccl", device="cuda:0").device == torch.device("cuda", 0)
    assert chosen == [torch.device("cuda", index) for index in (1, 1, 0)]
    assert phalanx.init("nccl", device="cpu").device == torch.device("cpu")
    with pytest.raises(UsageError, match="expected cuda:0 to cuda:1"):
        phalanx.init("nccl", device="cuda:2")


def test_missing_cuda(alone):
    alone.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="CUDA isn't available here"):
        phalanx.init(BACKEND, device="cuda")
    assert os.environ.get("RANK") is None
