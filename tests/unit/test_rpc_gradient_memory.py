"""Gradients of a server's parameters do not share memory, so that they may be changed in place.

The tests compare random graphs of parameters, and optimizers that change gradients in place, with
one process whose gradients are copied after each backward pass. (PyTorch's own accumulation shares
memory between the gradients of a parameter and of a view.)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from phalanx.rpc.autograd.gradients import Root, ensure_owned
from tests.rpc_worlds import Program, SingleProcess, workers

SIZE = 4


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def make_parameters(seed: int) -> list[Tensor]:
    """Return square parameters, so that they can be combined; one is column-major."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [
        torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64) for _ in range(4)
    ]
    parameters[1] = parameters[1].t()
    return [each.requires_grad_() for each in parameters]


class RecordingIdentity(torch.autograd.Function):
    """The identity, whose backward pass keeps the gradient that it returns."""

    gradients: list[Tensor] = []  # noqa: RUF012 - intentionally shared by the class

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        RecordingIdentity.gradients.append(gradient)
        return gradient


def make_term(choose: random.Random, parameters: Sequence[Tensor], x: Tensor) -> Tensor:
    """Return a sum whose backward pass yields shared memory or unusual layouts of gradients."""
    first, second = choose.choice(parameters), choose.choice(parameters)
    terms: list[Callable[[], Tensor]] = [
        lambda: first + second + x,
        lambda: (first + second) * x,
        lambda: first.sum() * x,
        lambda: first.t() + second,
        lambda: first.reshape(-1).view(SIZE, SIZE) + second,
        lambda: torch.cat([first, second])[:SIZE] * 2 + x,
        lambda: first[0] + x,
        lambda: RecordingIdentity.apply(first) + second,  # type: ignore[no-untyped-call]
        lambda: first.diagonal() + second.mean(0) + x,
        lambda: (
            nn.functional.embedding(torch.tensor([0, 1, 1, 3]), first, sparse=True) + x
            if first.is_contiguous()
            else first + x
        ),
    ]
    return choose.choice(terms)()


def make_program(parameters: Sequence[Tensor], seed: int) -> Program:
    def run(_world: SingleProcess, _rank: int, arguments: Sequence[Tensor]) -> list[Tensor]:
        choose = random.Random(seed)
        total = arguments[0] + 0
        for _ in range(choose.randint(1, 4)):
            total = total + make_term(choose, parameters, arguments[0])
        return [total]

    return run


def change_in_place(gradient: Tensor) -> None:
    """Change a gradient in place, as optimizers and clipping do."""
    if gradient.is_sparse:
        gradient.mul_(0.5)
    else:
        gradient.clamp_(-0.5, 0.5).mul_(0.5).add_(0.125)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), passes=st.integers(1, 3), mixed=st.booleans())
def test_in_place_changes_of_gradients(
    seed: int, passes: int, mixed: bool, pool: ThreadPoolExecutor
) -> None:
    RecordingIdentity.gradients.clear()
    parameters, reference = make_parameters(seed), make_parameters(seed)
    x = torch.randn(SIZE, SIZE, dtype=torch.float64)
    oracle: list[Tensor | None] = [None] * len(reference)
    with workers(2, 0, pool) as world:
        graph = world.graphs[1]
        if mixed:
            graph.accumulated_parameters.mark(parameters, True)
        for step in range(passes):
            program = make_program(parameters, seed + step)
            (result,) = world.call(0, 1, program, [x])
            result.square().sum().backward()
            del result
            make_program(reference, seed + step)(world, 0, [x])[0].square().sum().backward()
            for index, parameter in enumerate(reference):
                if parameter.grad is not None:
                    gradient = parameter.grad.to_dense().clone()
                    oracle[index] = gradient if oracle[index] is None else oracle[index] + gradient
                parameter.grad = None
        kept = graph.gradients.peek(Root(0))
        gradients = [each.grad if mixed else kept.get(each) for each in parameters]
        recorded = [gradient.clone() for gradient in RecordingIdentity.gradients]
        for gradient, expected in zip(gradients, oracle, strict=True):
            if gradient is None:
                assert expected is None
                continue
            assert expected is not None
            torch.testing.assert_close(gradient.to_dense(), expected, msg="before in-place changes")
        check_memory(gradients, parameters, [x, *RecordingIdentity.gradients])
        expected_after = []
        for gradient, expected in zip(gradients, oracle, strict=True):
            if gradient is not None and expected is not None:
                changed_copy = gradient.detach().clone()
                change_in_place(changed_copy)
                expected_after.append(changed_copy)
        changed = [gradient for gradient in gradients if gradient is not None]
        for gradient in changed:
            change_in_place(gradient)
        for gradient, expected in zip(changed, expected_after, strict=True):
            torch.testing.assert_close(gradient.to_dense(), expected.to_dense())
        for gradient, expected in zip(RecordingIdentity.gradients, recorded, strict=True):
            assert torch.equal(gradient, expected)


def check_memory(
    gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], others: Sequence[Tensor]
) -> None:
    addresses = {each.untyped_storage().data_ptr() for each in others}
    for gradient, parameter in zip(gradients, parameters, strict=True):
        if gradient is None:
            continue
        for part in get_parts(gradient):
            address = part.untyped_storage().data_ptr()
            assert address not in addresses, "two tensors share memory"
            addresses.add(address)
        if not gradient.is_sparse:
            assert gradient.stride() == parameter.stride()


def get_parts(gradient: Tensor) -> list[Tensor]:
    return [gradient._indices(), gradient._values()] if gradient.is_sparse else [gradient]


def test_sums_of_two_parameters_and_of_all_elements(pool: ThreadPoolExecutor) -> None:
    for function in (lambda p, q, x: p + q + x, lambda p, q, x: p.sum() + q.sum() + x):
        p, q = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)

        def program(
            _world: SingleProcess, _rank: int, given: Sequence[Tensor], function: Any = function
        ) -> list[Tensor]:
            return [function(p, q, given[0])]  # noqa: B023 - called in this round

        with workers(2, 0, pool) as world:
            (result,) = world.call(0, 1, program, [torch.zeros(3)])
            result.sum().backward()
            for parameter, gradient in world.graphs[1].gradients.peek(Root(0)).items():
                parameter.data -= gradient.clamp_(-0.5, 0.5).mul_(0.5)
        assert p.tolist() == q.tolist() == [0.75] * 3


def test_unshared_gradient_is_not_copied() -> None:
    parameter = torch.randn(3, 5, requires_grad=True)
    gradients = list(torch.autograd.grad(parameter.square().sum(), [parameter]))
    address = gradients[0].data_ptr()
    ((_, gradient),) = ensure_owned([parameter], gradients)
    assert gradient.data_ptr() == address
    table = nn.EmbeddingBag(9, 3, mode="sum", sparse=True)
    rows = torch.tensor([[1, 2], [3, 3]])
    gradients = list(torch.autograd.grad(table(rows).square().sum(), [table.weight]))
    address = gradients[0]._values().data_ptr()
    ((_, gradient),) = ensure_owned([table.weight], gradients)
    assert gradient._values().data_ptr() == address
    assert gradient._indices().data_ptr() != rows.data_ptr()


def test_indices_changed_after_the_backward_pass(pool: ThreadPoolExecutor) -> None:
    weight = torch.zeros(9, 2, requires_grad=True)
    rows = torch.tensor([1, 2, 7])

    def program(_world: SingleProcess, _rank: int, _given: Sequence[Tensor]) -> list[Tensor]:
        return [nn.functional.embedding(rows, weight, sparse=True)]

    with workers(2, 0, pool) as world:
        (result,) = world.call(0, 1, program, [])
        result.sum().backward()
        rows.fill_(0)
        (gradients,) = world.graphs[1].gradients.take(Root(0), [weight])
    assert gradients is not None
    assert gradients.to_dense()[:, 0].nonzero().flatten().tolist() == [1, 2, 7]
