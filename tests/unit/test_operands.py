"""`phalanx.backend.operands`: the conversion of tensors for the core, and rejected tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from phalanx.backend import operands
from phalanx.errors import UsageError


def test_contiguous_tensor_is_used_directly() -> None:
    for tensor in (torch.ones(3, 4), torch.tensor(1), torch.ones(0, 5), torch.ones(8)[2:5]):
        flat = operands.prepare_output(tensor, "op")
        assert flat is tensor
        operands.copy_back(tensor, flat)


def test_other_layouts_are_copied_and_copied_back() -> None:
    base = torch.zeros(4, 6)
    view = base.t()[::2]
    view.copy_(torch.arange(12.0).reshape(3, 4))
    flat = operands.prepare_output(view, "op")
    assert flat.is_contiguous()
    assert torch.equal(flat, view)
    flat += 1
    operands.copy_back(view, flat)
    assert torch.equal(view, torch.arange(12.0).reshape(3, 4) + 1)
    assert (base[:, 1::2] == 0).all()


def test_copy_back_writes_to_leaves_and_inference_tensors() -> None:
    leaf = torch.zeros(4, 3).t().requires_grad_()
    operands.copy_back(leaf, torch.ones(3, 4))
    assert (leaf == 1).all()
    with torch.inference_mode():
        inside = torch.zeros(4, 3).t()
    operands.copy_back(inside, torch.ones(3, 4))
    assert (inside == 1).all()


def test_shared_elements_are_rejected_only_in_outputs() -> None:
    expanded = torch.ones(1, 3).expand(4, 3)
    assert torch.equal(operands.prepare_input(expanded, "op"), torch.ones(4, 3))
    with pytest.raises(UsageError) as caught:
        operands.prepare_output(expanded, "op")
    assert str(caught.value) == (
        "op: elements of the tensor of shape (4, 3) and strides (0, 1) share memory (expand()?): "
        "pass a tensor of its own, as from clone()"
    )


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("taken", (operands.prepare_input, operands.prepare_output))
def test_sparse_and_foreign_tensors_are_rejected(
    taken: Callable[[torch.Tensor, str], torch.Tensor],
) -> None:
    for tensor in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()):
        with pytest.raises(UsageError, match=r"op: got a tensor of layout torch.sparse_.*to_dense"):
            taken(tensor, "op")
    with pytest.raises(UsageError, match=r"op: the tensor is on meta, expected cpu"):
        taken(torch.ones(3, device="meta"), "op")


def test_single_tensor() -> None:
    tensor = torch.ones(1)
    assert operands.single_tensor([tensor], "op") is tensor
    for wrong in ([], [tensor, tensor]):
        with pytest.raises(UsageError, match=f"op: got {len(wrong)} tensors, expected one"):
            operands.single_tensor(wrong, "op")


def test_check_same_kind() -> None:
    like = torch.ones(2, 3)
    operands.check_same_kind([torch.zeros(3, 2), torch.zeros(6), like], like, "op")
    for wrong in (torch.zeros(5), torch.zeros(6, dtype=torch.float64)):
        with pytest.raises(UsageError, match=r"op: tensor 1 of the list is .*float32\[2, 3\]"):
            operands.check_same_kind([like, wrong], like, "op")
    with pytest.raises(UsageError, match=r"op: tensor 0 of the list is on meta.* on cpu"):
        operands.check_same_kind([torch.zeros(6, device="meta")], like, "op")


def test_format_tensor() -> None:
    assert operands.format_tensor(torch.zeros(3, 4)) == "float32[3, 4]"
    assert operands.format_tensor(torch.tensor(True)) == "bool[]"


def test_warning_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "phalanx"):
        operands.warn_once("test", "slow")
        operands.warn_once("test", "slow")
    assert [record.message for record in caplog.records] == ["slow"]
