"""Wrong arguments raise UsageError at once on their rank, and the group stays usable."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.errors import UsageError
from tests.ranks import RankServer


def options(kind: str, **values: Any) -> Any:
    made = getattr(dist, f"{kind}Options")()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def world() -> Any:
    return dist.group.WORLD


def sparse() -> Tensor:
    return torch.eye(3).to_sparse()


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def freed(tensor: Tensor) -> Tensor:
    """Free the memory of a tensor, as FSDP does."""
    tensor.untyped_storage().resize_(0)
    return tensor


def zeros(*shape: int, **kwargs: Any) -> Tensor:
    return torch.zeros(*shape, **kwargs)


# Each call, and a pattern of its message: the value that was given and the one that was expected.
CASES: dict[str, tuple[Callable[[], object], str]] = {
    "root too large": (
        lambda: world().broadcast([zeros(3)], options("Broadcast", rootRank=2)),
        r"broadcast: root 2, expected a rank from 0 to 1",
    ),
    "root negative": (
        lambda: world().reduce([zeros(3)], options("Reduce", rootRank=-1)),
        r"reduce: root -1, expected a rank from 0 to 1",
    ),
    "root of gather": (
        lambda: world().gather([[]], [zeros(3)], options("Gather", rootRank=7)),
        r"gather: root 7, expected a rank from 0 to 1",
    ),
    "root of scatter": (
        lambda: world().scatter([zeros(3)], [[]], options("Scatter", rootRank=7)),
        r"scatter: root 7, expected a rank from 0 to 1",
    ),
    "destination": (lambda: world().send([zeros(3)], 2, 0), r"send: rank 2, expected .* 0 to 1"),
    "source": (lambda: world().recv([zeros(3)], -3, 0), r"recv: rank -3, expected .* 0 to 1"),
    "tag": (lambda: world().send([zeros(3)], 1, -1), r"send: tag -1, expected 0 to"),
    "float8": (
        lambda: dist.all_reduce(zeros(3, dtype=torch.float8_e4m3fn)),
        r"all_reduce: torch.float8_e4m3fn is not supported; expected one of: bool, uint8",
    ),
    "float8 sent": (
        lambda: dist.send(zeros(3, dtype=torch.float8_e5m2), 1 - dist.get_rank()),
        r"send: torch.float8_e5m2 is not supported",
    ),
    "quantized": (lambda: dist.all_reduce(quantized()), r"all_reduce: .*qint8 is not supported"),
    "quantized broadcast": (lambda: dist.broadcast(quantized(), 0), r"broadcast: .*qint8"),
    "bitwise on floats": (
        lambda: dist.all_reduce(zeros(3), dist.ReduceOp.BXOR),
        r"all_reduce: BXOR has no meaning for float32; expected one of: SUM, PRODUCT, MIN, MAX",
    ),
    "average of truths": (
        lambda: dist.all_reduce(zeros(3, dtype=torch.bool), dist.ReduceOp.AVG),
        r"all_reduce: AVG has no meaning for bool; expected one of: SUM",
    ),
    "reduce, bitwise on floats": (
        lambda: dist.reduce(zeros(3), 0, dist.ReduceOp.BAND),
        r"reduce: BAND has no meaning for float32",
    ),
    "minimum of complex": (
        lambda: world().allreduce(
            [zeros(3, dtype=torch.complex64)],
            options("Allreduce", reduceOp=dist.ReduceOp.MIN),
        ),
        r"all_reduce: MIN has no meaning for complex64",
    ),
    "premultiplied integers": (
        lambda: dist.all_reduce(zeros(3, dtype=torch.int32), dist._make_nccl_premul_sum(2.0)),
        r"all_reduce: PREMUL_SUM needs floats, got int32\[3\]",
    ),
    "meta": (
        lambda: dist.all_reduce(zeros(3, device="meta")),
        r"all_reduce: the tensor is on meta, expected cpu",
    ),
    "meta sent": (
        lambda: dist.send(zeros(3, device="meta"), 1 - dist.get_rank()),
        r"send: the tensor is on meta, expected cpu",
    ),
    "meta gathered": (
        lambda: dist.all_gather([zeros(3, device="meta")] * 2, zeros(3)),
        r"all_gather: tensor 0 of the list is on meta, the tensor of this rank on cpu",
    ),
    "sparse": (
        lambda: dist.broadcast(sparse(), 0),
        r"broadcast: got a tensor of layout torch.sparse_coo, expected a dense one: to_dense",
    ),
    "sparse CSR": (lambda: dist.broadcast(torch.eye(3).to_sparse_csr(), 0), r"sparse_csr.*dense"),
    "sparse received": (
        lambda: dist.recv(sparse(), 1 - dist.get_rank()),
        r"recv: got a tensor of layout",
    ),
    "freed": (
        lambda: dist.all_reduce(freed(zeros(3))),
        r"all_reduce: the memory of the tensor, float32\[3\], was freed .*: allocate it again",
    ),
    "freed and transposed": (
        lambda: dist.all_gather([zeros(4, 2), zeros(4, 2)], freed(zeros(2, 4).t())),
        r"all_gather: the memory of the tensor, float32\[4, 2\], was freed",
    ),
    "freed, to be received": (
        lambda: dist.recv(freed(zeros(3)), 1 - dist.get_rank()),
        r"recv: the memory of the tensor, float32\[3\], was freed",
    ),
    "freed, in a list": (
        lambda: dist.all_gather([zeros(3), freed(zeros(3))], zeros(3)),
        r"all_gather: the memory of the tensor, float32\[3\], was freed",
    ),
    "list too short": (
        lambda: dist.all_gather([zeros(3)], zeros(3)),
        r"all_gather: got 1 outputs, expected one per rank, 2",
    ),
    "list too long": (
        lambda: dist.all_gather([zeros(3)] * 3, zeros(3)),
        r"all_gather: got 3 outputs, expected one per rank, 2",
    ),
    "gather's list": (
        lambda: dist.gather(zeros(3), [zeros(3)], dist.get_rank()),
        r"gather: got 1 outputs, expected one per rank, 2",
    ),
    "scatter's list": (
        lambda: dist.scatter(zeros(3), [zeros(3)] * 3, dist.get_rank()),
        r"scatter: got 3 inputs, expected one per rank, 2",
    ),
    "sizes in a list": (
        lambda: dist.all_gather([zeros(3), zeros(4)], zeros(3)),
        r"all_gather: tensor 1 of the list is float32\[4\], expected float32\[3\]",
    ),
    "dtypes in a list": (
        lambda: world().scatter(
            [zeros(3)],
            [[zeros(3), zeros(3, dtype=torch.float64)]],
            options("Scatter", rootRank=dist.get_rank()),
        ),
        r"scatter: tensor 1 of the list is float64\[3\], expected float32\[3\]",
    ),
    "reduce_scatter's list": (
        lambda: dist.reduce_scatter(zeros(3), [zeros(3)]),
        r"reduce_scatter: got 1 inputs, expected one per rank, 2",
    ),
    "own part of reduce_scatter's list": (
        lambda: dist.reduce_scatter(zeros(3), [zeros(3), zeros(4)]),
        r"reduce_scatter: tensor 1 of the list is float32\[4\], expected float32\[3\]",
    ),
    "dtypes in reduce_scatter's list": (
        lambda: world().reduce_scatter([zeros(3)], [[zeros(3), zeros(3, dtype=torch.float64)]]),
        r"reduce_scatter: tensor 1 of the list is float64\[3\], expected float32\[3\]",
    ),
    "devices in reduce_scatter's list": (
        lambda: dist.reduce_scatter(zeros(3), [zeros(3, device="meta"), zeros(3)]),
        r"reduce_scatter: tensor 0 of the list is on meta, the tensor of this rank on cpu",
    ),
    "reduce_scatter, bitwise on floats": (
        lambda: dist.reduce_scatter(zeros(3), [zeros(3)] * 2, dist.ReduceOp.BOR),
        r"reduce_scatter: BOR has no meaning for float32",
    ),
    "reduce_scatter, average of large unsigned integers": (
        lambda: dist.reduce_scatter_tensor(
            zeros(3, dtype=torch.uint16), zeros(6, dtype=torch.uint16), dist.ReduceOp.AVG
        ),
        r"reduce_scatter_single: AVG has no meaning for uint16",
    ),
    "reduce_scatter_tensor's size": (
        lambda: dist.reduce_scatter_tensor(zeros(3), zeros(7)),
        r"reduce_scatter_single: the input float32\[7\] has 7 elements, expected 6: 2 times those",
    ),
    "reduce_scatter_tensor's dtypes": (
        lambda: dist.reduce_scatter_tensor(zeros(3), zeros(6, dtype=torch.float64)),
        r"reduce_scatter_single: the output is float32\[3\] on cpu, the input float64\[6\] on cpu",
    ),
    "all_gather's outputs, repeated": (
        lambda: dist.all_gather([zeros(3)] * 2, zeros(3)),
        r"all_gather: tensors of the list of outputs share memory",
    ),
    "all_gather's outputs, overlapping views": (
        lambda: dist.all_gather(list(zeros(5).unfold(0, 3, 2)), zeros(3)),
        r"all_gather: tensors of the list of outputs share memory",
    ),
    "all_gather's outputs, repeated and transposed": (
        lambda: dist.all_gather([zeros(2, 3).t()] * 2, zeros(3, 2)),
        r"all_gather: tensors of the list of outputs share memory",
    ),
    "gather's outputs, repeated": (
        lambda: dist.gather(zeros(3), [zeros(3)] * 2, dist.get_rank()),
        r"gather: tensors of the list of outputs share memory",
    ),
    "all_to_all's outputs, repeated": (
        lambda: dist.all_to_all([zeros(3)] * 2, [zeros(3), zeros(3)]),
        r"all_to_all: tensors of the list of outputs share memory",
    ),
    "all_gather_coalesced's outputs, repeated": (
        lambda: world().allgather_coalesced([[zeros(3)]] * 2, [zeros(3)]),
        r"all_gather_coalesced: tensors of the list of outputs share memory",
    ),
    "all_reduce_coalesced's tensors, repeated": (
        lambda: world().allreduce_coalesced([zeros(3)] * 2),
        r"all_reduce_coalesced: tensors of the list of outputs share memory",
    ),
    "all_gather_into_tensor's size": (
        lambda: dist.all_gather_into_tensor(zeros(5), zeros(3)),
        r"all_gather_single: the output float32\[5\] has 5 elements, expected 6: 2 times those",
    ),
    "all_gather_into_tensor's device": (
        lambda: dist.all_gather_into_tensor(zeros(6, device="meta"), zeros(3)),
        r"all_gather_single: the output is float32\[6\] on meta, the input float32\[3\] on cpu",
    ),
    "all_gather_into_tensor, expanded": (
        lambda: dist.all_gather_into_tensor(zeros(1).expand(6), zeros(3)),
        r"all_gather_single: elements of the tensor .* share memory",
    ),
    "all_to_all's outputs": (
        lambda: dist.all_to_all([zeros(3)], [zeros(3)] * 2),
        r"all_to_all: got 1 outputs, expected one per rank, 2",
    ),
    "all_to_all's inputs": (
        lambda: dist.all_to_all([zeros(3)] * 2, [zeros(3)] * 3),
        r"all_to_all: got 3 inputs, expected one per rank, 2",
    ),
    "dtypes in all_to_all's lists": (
        lambda: world().alltoall([zeros(3)] * 2, [zeros(3), zeros(3, dtype=torch.int32)]),
        r"all_to_all: tensor 1 of the list is int32\[3\], expected torch.float32",
    ),
    "devices in all_to_all's lists": (
        lambda: dist.all_to_all([zeros(3), zeros(3, device="meta")], [zeros(3)] * 2),
        r"all_to_all: tensor 1 of the list is on meta, the tensor of this rank on cpu",
    ),
    "what a rank gives to itself": (
        lambda: dist.all_to_all([zeros(3), zeros(3)], [zeros(3), zeros(4)]),
        r"all_to_all: tensor 1 of the list is float32\[3\], expected float32\[4\]",
    ),
    "rows that can't be shared equally": (
        lambda: dist.all_to_all_single(zeros(5), zeros(5)),
        r"all_to_all_single: the input float32\[5\] has 5 rows, which 2 ranks cannot share equally",
    ),
    "splits that don't sum up": (
        lambda: dist.all_to_all_single(zeros(5, 2), zeros(5, 2), [2, 3], [2, 2]),
        r"input_split_sizes are \[2, 2\], expected 2 integers, .* to the 5 rows of the input",
    ),
    "output's splits that don't sum up": (
        lambda: dist.all_to_all_single(zeros(4), zeros(5), [2, 3], [2, 3]),
        r"output_split_sizes are \[2, 3\], expected 2 integers, .* to the 4 rows of the output",
    ),
    "a split too few": (
        lambda: dist.all_to_all_single(zeros(5), zeros(5), [5], [2, 3]),
        r"output_split_sizes are \[5\], expected 2 integers, one per rank",
    ),
    "a negative split": (
        lambda: dist.all_to_all_single(zeros(5), zeros(5), [2, 3], [6, -1]),
        r"input_split_sizes are \[6, -1\], expected 2 integers",
    ),
    "a fraction of a row": (
        lambda: dist.all_to_all_single(zeros(5), zeros(5), [2, 3], [2.5, 2.5]),
        r"input_split_sizes are \[2.5, 2.5\], expected 2 integers",
    ),
    "splits for oneself": (
        lambda: dist.all_to_all_single(zeros(5), zeros(5), [3, 2], [2, 3]),
        r"all_to_all_single: rank 1 sends itself 3 elements and receives 2",
    ),
    "dtypes of all_to_all_single": (
        lambda: world().all_to_all_single(zeros(4), zeros(4, dtype=torch.int32), [], []),
        r"all_to_all_single: the output is float32\[4\] on cpu, the input int32\[4\] on cpu",
    ),
    "coalesced, bitwise on floats": (
        lambda: world().allreduce_coalesced(
            [zeros(2), zeros(3)], options("AllreduceCoalesced", reduceOp=dist.ReduceOp.BAND)
        ),
        r"all_reduce_coalesced: BAND has no meaning for float32",
    ),
    "coalesced, the second on meta": (
        lambda: world().allreduce_coalesced([zeros(2), zeros(2, device="meta")]),
        r"all_reduce_coalesced: the tensor is on meta, expected cpu",
    ),
    "coalesced, too few outputs": (
        lambda: world().all_gather_single_coalesced([zeros(2)], [zeros(1), zeros(1)]),
        r"all_gather_single_coalesced: got 1 outputs for 2 inputs",
    ),
    "coalesced, too few lists": (
        lambda: world().allgather_coalesced([[zeros(2)]], [zeros(2)]),
        r"all_gather_coalesced: got 1 lists of outputs, expected one per rank, 2",
    ),
    "coalesced, the second too small": (
        lambda: world().reduce_scatter_single_coalesced([zeros(2)] * 2, [zeros(4), zeros(2)]),
        r"reduce_scatter_single_coalesced: the input float32\[2\] has 2 elements, expected 4",
    ),
    "several tensors": (
        lambda: world().allreduce([zeros(3), zeros(3)]),
        r"all_reduce: got 2 tensors, expected one",
    ),
}


def reject(name: str) -> None:
    """Make a wrong call on one rank only; afterwards both ranks use the group as usual."""
    call, message = CASES[name]
    if dist.get_rank() == 1:
        with pytest.raises(UsageError, match=message):
            call()
    group_works()


def group_works() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [world_size] * 5
    received = torch.zeros(2)
    dist.isend(torch.full((2,), float(rank)), (rank + 1) % world_size)
    dist.recv(received, (rank - 1) % world_size)
    assert received.tolist() == [(rank - 1) % world_size] * 2


def objects_that_cannot_be_pickled() -> None:
    """Pickle raises on the rank that has the object, before any communication."""
    rank = dist.get_rank()
    calls: list[Callable[[object], object]] = [
        lambda it: dist.all_gather_object([None] * 2, it),
        lambda it: dist.gather_object(it, [None] * 2 if rank == 1 else None, 1),
        lambda it: dist.broadcast_object_list([it], 1),
        lambda it: dist.scatter_object_list([None], [it, it] if rank == 1 else None, 1),
        lambda it: dist.send_object_list([it], 0),
    ]
    for call in calls:
        if rank == 1:
            with pytest.raises((TypeError, AttributeError, pickle.PicklingError), match="pickle"):
                call(threading.Lock())
        group_works()


def test_objects_that_cannot_be_pickled(ranks: RankServer) -> None:
    ranks.run(2, objects_that_cannot_be_pickled)


def reject_all(names: list[str]) -> None:
    for name in names:
        reject(name)


@pytest.mark.parametrize("name", CASES)
def test_wrong_arguments(ranks: RankServer, name: str) -> None:
    ranks.run(2, reject, name)


def test_many_errors_in_one_group(ranks: RankServer) -> None:
    ranks.run(2, reject_all, list(CASES))


def uncaught() -> None:
    dist.broadcast(torch.zeros(3, device="meta"), 0)


def test_uncaught_error_exits_with_one_message(ranks: RankServer) -> None:
    for rank in ranks.start(2, uncaught).join():
        assert rank.code == 1
        last = rank.stderr.strip().splitlines()[-1]
        assert last.endswith(
            "UsageError: broadcast: the tensor is on meta, expected cpu (or cuda): "
            "move it there first"
        )


def use_after_destroy() -> str:
    group = dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
    messages = []
    for call in (
        lambda: group.allreduce([torch.ones(1)]),
        lambda: group.barrier(),
        lambda: group.send([torch.ones(1)], 1 - int(group.rank()), 0),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        messages.append(str(caught.value))
    group.shutdown()
    group.abort()
    return messages[0]


def test_use_after_leaving(ranks: RankServer) -> None:
    for message in ranks.run(2, use_after_destroy):
        assert "left" in message
        assert "destroy_process_group" in message
