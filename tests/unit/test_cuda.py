"""The routing of CUDA tensors, with stand-ins for GPUs and NCCL."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import DistError, HashStore

from phalanx.backend import cuda
from phalanx.backend.execution import DONE
from phalanx.backend.process_group import ProcessGroup
from phalanx.errors import PeerLost, UsageError
from phalanx.recorder import torch_recorder
from phalanx.topology import HostLink

SINGLE = (
    "all_gather_single",
    "_allgather_base",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
)


class FakeNcclGroup:
    """A stand-in for a ProcessGroupNCCL."""

    def __init__(self, child: cuda.NcclChild) -> None:
        self.place = (child.rank, len(child.members))
        self.ended: list[str] = []

    def shutdown(self) -> None:
        self.ended.append("shutdown")

    def abort(self) -> None:
        self.ended.append("abort")


def make_child(
    store: Any, rank: int, size: int, *, timeout: timedelta = timedelta(seconds=60), **options: Any
) -> cuda.NcclChild:
    return cuda.NcclChild(store, rank, "pair", range(size), timeout, FakeNcclGroup, **options)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the identifier of a device be its number; number 9 has no NCCL."""
    monkeypatch.setattr(torch_recorder, "start", lambda: None)
    monkeypatch.setattr(torch_recorder, "_hidden_groups", {})
    monkeypatch.setattr(
        cuda, "device_id", lambda device: "" if device.index == 9 else str(device.index)
    )


def request_groups(numbers: list[int], peers: dict[int, int] | None = None) -> list[Any]:
    """Request the group of every rank with a tensor on the device of that number."""
    store, answers = HashStore(), [None] * len(numbers)

    def on_rank(rank: int) -> None:
        child = make_child(store, rank, len(numbers))
        peer = None if peers is None else peers[rank]
        answers[rank] = child.group_for(torch.device("cuda", numbers[rank]), peer)

    used = range(len(numbers)) if peers is None else peers
    threads = [threading.Thread(target=on_rank, args=(rank,)) for rank in used]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return answers


@pytest.mark.usefixtures("devices")
def test_nccl_if_each_rank_has_a_device() -> None:
    answers = request_groups([0, 1, 2])
    assert [answer.place for answer in answers] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("numbers", [[0, 0], [0, 1, 0], [0, 9], [9, 9]])
def test_memory_if_a_device_is_shared_or_nccl_is_missing(numbers: list[int]) -> None:
    assert request_groups(numbers) == [None] * len(numbers)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([0, 1, 0], r"rank 1/3: transport is 'nccl', but ranks 0, 2 use one GPU \(0\): give each"),
        ([0, 9, 1], "rank 1/3: transport is 'nccl', but rank 1 has no NCCL: install"),
    ],
)
def test_required_nccl_never_uses_memory(numbers: list[int], words: str) -> None:
    store = HashStore()
    for rank in (0, 2):
        store.set(f"phalanx/cuda/{rank}", str(numbers[rank]))
    child = make_child(store, 1, 3)
    child.required = True
    with pytest.raises(UsageError, match=words):
        child.group_for(torch.device("cuda", numbers[1]))


@pytest.mark.usefixtures("devices")
def test_message_involves_two_ranks_only() -> None:
    first, absent, last = request_groups([0, 0, 1], peers={0: 2, 2: 0})
    assert first.place == (0, 3)
    assert last.place == (2, 3)
    assert absent is None


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(("numbers", "by_nccl"), [([0, 0, 1], "rank 2"), ([0, 0, 0], "")])
def test_recv_from_any_rank_is_rejected_with_nccl(numbers: list[int], by_nccl: str) -> None:
    store = HashStore()
    children = [make_child(store, rank, 3) for rank in range(len(numbers))]
    for child, number in zip(children, numbers, strict=True):
        child._publish(cuda.device_id(torch.device("cuda", number)))
    if by_nccl:
        with pytest.raises(UsageError, match=f"messages of {by_nccl} go through NCCL"):
            children[0].check_any_source(torch.device("cuda", numbers[0]))
    else:
        children[0].check_any_source(torch.device("cuda", numbers[0]))


@pytest.mark.usefixtures("devices")
def test_the_wait_for_a_peer_is_bounded() -> None:
    child = make_child(HashStore(), 0, 2, timeout=timedelta(milliseconds=50))
    with pytest.raises(DistError):
        child.group_for(torch.device("cuda", 0))


@pytest.mark.usefixtures("devices")
def test_the_child_ends_with_its_group() -> None:
    child = make_child(HashStore(), 0, 1)
    child.shutdown()
    made = child.group_for(torch.device("cuda", 0))
    assert made is child.group_for(torch.device("cuda", 0))
    assert torch_recorder._hidden_groups == {"pair": [0]}  # its records are kept
    child.shutdown()
    child.abort()
    assert torch_recorder._hidden_groups == {}
    assert made.ended == ["shutdown", "abort"]


class Tensor(torch.Tensor):
    """A tensor that pretends to be on a GPU."""

    is_cuda = True  # type: ignore[assignment]


class Group:
    """A stand-in for a Phalanx group whose NCCL child handles tensors on a GPU."""

    _nccl: Any
    link = HostLink()

    def allreduce(self, tensors: list[torch.Tensor]) -> str:
        return "memory"

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> str:
        return "memory"

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> str:
        return "memory"


class Child:
    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[int | None] = []

    def group_for(self, _device: torch.device, peer: int | None) -> Any:
        self.asked.append(peer)
        return self.answer

    def check_any_source(self, _device: torch.device) -> None:
        self.asked.append(-1)


class Nccl:
    """A stand-in for PyTorch's NCCL backend, which has some methods under former names only."""

    def allreduce(self, tensors: list[torch.Tensor]) -> str:
        return "nccl"

    recv = allreduce

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> Any:
        output.copy_(source)
        return DONE


def test_operations_are_delegated_by_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    operations = "allreduce", "recv", "recv_anysource"
    group = cuda.delegate_cuda(*operations)(type("Handing", (Group,), {}))()
    on_gpu = torch.ones(2).as_subclass(Tensor)
    group._nccl = Child(None)
    assert group.allreduce([on_gpu]) == "memory"
    group._nccl = Child(Nccl())
    assert group.allreduce([on_gpu]) == "nccl"
    assert group.allreduce([[torch.ones(2)], [on_gpu]]) == "nccl"
    assert group._nccl.asked == [None, None]
    assert group.allreduce([torch.ones(2)]) == "memory"
    assert group.recv_anysource([on_gpu], 0) == "memory"
    assert group._nccl.asked == [None, None, -1]
    warnings: list[str] = []
    monkeypatch.setattr(cuda, "warn_once", lambda _key, text: warnings.append(text))
    group.link = HostLink("gloo", "int8")
    assert group.allreduce([torch.ones(2)]) == "memory"
    assert not warnings
    assert group.allreduce([on_gpu]) == "nccl"
    assert "NCCL sends float32" in warnings[0]


def test_methods_with_other_names_in_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    members = {name: vars(ProcessGroup)[name] for name in SINGLE}
    handing = type("Handing", (Group,), members)
    group = cuda.delegate_cuda("all_gather_single", "all_gather_single_coalesced")(handing)()
    group._nccl = Child(Nccl())
    for name in SINGLE:
        output, source = torch.zeros(2).as_subclass(Tensor), torch.rand(2).as_subclass(Tensor)
        if "coalesced" in name:
            getattr(group, name)([output], [source], None)
        else:
            getattr(group, name)(output, source, None)
        assert torch.equal(output, source), name


@pytest.mark.usefixtures("devices")
def test_a_peer_that_has_ended_is_not_waited_for() -> None:
    child = make_child(HashStore(), 0, 2, has_gone=bool)
    with pytest.raises(PeerLost, match="rank 1 has ended before its first operation on a CUDA"):
        child.group_for(torch.device("cuda", 0))


def test_a_build_without_cuda_wraps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert cuda.delegate_cuda("allreduce")(Group).allreduce is Group.allreduce


def test_tensors_are_found_in_lists_of_lists() -> None:
    on_gpu = torch.ones(2).as_subclass(Tensor)
    assert cuda.find_cuda_tensor([[[torch.ones(1)], [on_gpu]], 3]) is on_gpu
    assert cuda.find_cuda_tensor([torch.ones(1), None, [torch.ones(1)]]) is None
