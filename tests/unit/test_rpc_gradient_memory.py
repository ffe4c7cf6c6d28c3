"""Gradients of served parameters have memory of their own, whatever in-place work is done on them.

Random graphs of served parameters, and optimizers that change gradients in place, against one
process whose gradients are copied after each backward pass. (PyTorch's own accumulation shares
memory between a parameter's gradient and that of a view.)
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

from phalanx.rpc.autograd.accumulation import ensure_owned
from phalanx.rpc.autograd.gradients import Root
from tests.rpc_worlds import Program, World, workers

SIZE = 4


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def served(seed: int) -> list[Tensor]:
    """Parameters of a server: square, so that they mix; one is laid out by columns."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64) for _ in range(4)]
    made[1] = made[1].t()
    return [each.requires_grad_() for each in made]


class Kept(torch.autograd.Function):
    """The identity, whose backward pass keeps the gradient that it returns."""

    gradients: list[Tensor] = []  # noqa: RUF012 - of the class, on purpose

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        Kept.gradients.append(gradient)
        return gradient


def terms(choose: random.Random, parameters: Sequence[Tensor], x: Tensor) -> Tensor:
    """A sum whose backward pass gives several parameters the same memory, or odd layouts."""
    one, other = choose.choice(parameters), choose.choice(parameters)
    forms: list[Callable[[], Tensor]] = [
        lambda: one + other + x,
        lambda: (one + other) * x,
        lambda: one.sum() * x,
        lambda: one.t() + other,
        lambda: one.reshape(-1).view(SIZE, SIZE) + other,
        lambda: torch.cat([one, other])[:SIZE] * 2 + x,
        lambda: one[0] + x,
        lambda: Kept.apply(one) + other,  # type: ignore[no-untyped-call]
        lambda: one.diagonal() + other.mean(0) + x,
        lambda: (
            nn.functional.embedding(torch.tensor([0, 1, 1, 3]), one, sparse=True) + x
            if one.is_contiguous()
            else one + x
        ),
    ]
    return choose.choice(forms)()


def serve(parameters: Sequence[Tensor], seed: int) -> Program:
    def run(_world: World, _me: int, arguments: Sequence[Tensor]) -> list[Tensor]:
        choose = random.Random(seed)
        total = arguments[0] + 0
        for _ in range(choose.randint(1, 4)):
            total = total + terms(choose, parameters, arguments[0])
        return [total]

    return run


def work_in_place(gradient: Tensor) -> None:
    """What optimizers and clipping do to a gradient."""
    if gradient.is_sparse:
        gradient.mul_(0.5)
    else:
        gradient.clamp_(-0.5, 0.5).mul_(0.5).add_(0.125)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), passes=st.integers(1, 3), mixed=st.booleans())
def test_in_place_work_on_gradients(
    seed: int, passes: int, mixed: bool, pool: ThreadPoolExecutor
) -> None:
    Kept.gradients.clear()
    parameters, alone = served(seed), served(seed)
    x = torch.randn(SIZE, SIZE, dtype=torch.float64)
    oracle: list[Tensor | None] = [None] * len(alone)
    with workers(2, 0, pool) as world:
        graph = world.graphs[1]
        if mixed:
            graph.accumulated_parameters.mark(parameters, True)
        for step in range(passes):
            program = serve(parameters, seed + step)
            (result,) = world.call(0, 1, program, [x])
            result.square().sum().backward()
            del result
            serve(alone, seed + step)(world, 0, [x])[0].square().sum().backward()
            for at, parameter in enumerate(alone):
                if parameter.grad is not None:
                    new = parameter.grad.to_dense().clone()
                    oracle[at] = new if oracle[at] is None else oracle[at] + new
                parameter.grad = None
        kept = graph.gradients.peek(Root(0))
        found = [each.grad if mixed else kept.get(each) for each in parameters]
        before = [gradient.clone() for gradient in Kept.gradients]
        for gradient, expected in zip(found, oracle, strict=True):
            if gradient is None:
                assert expected is None
                continue
            assert expected is not None
            torch.testing.assert_close(gradient.to_dense(), expected, msg="before in-place work")
        check_memory(found, parameters, [x, *Kept.gradients])
        expected_after = []
        for gradient, expected in zip(found, oracle, strict=True):
            if gradient is not None and expected is not None:
                like = gradient.detach().clone()
                work_in_place(like)
                expected_after.append(like)
        changed = [gradient for gradient in found if gradient is not None]
        for gradient in changed:
            work_in_place(gradient)
        for gradient, expected in zip(changed, expected_after, strict=True):
            torch.testing.assert_close(gradient.to_dense(), expected.to_dense())
        for gradient, expected in zip(Kept.gradients, before, strict=True):
            assert torch.equal(gradient, expected)


def check_memory(
    gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], others: Sequence[Tensor]
) -> None:
    seen = {each.untyped_storage().data_ptr() for each in others}
    for gradient, parameter in zip(gradients, parameters, strict=True):
        if gradient is None:
            continue
        for part in parts(gradient):
            address = part.untyped_storage().data_ptr()
            assert address not in seen, "two tensors share memory"
            seen.add(address)
        if not gradient.is_sparse:
            assert gradient.stride() == parameter.stride()


def parts(gradient: Tensor) -> list[Tensor]:
    return [gradient._indices(), gradient._values()] if gradient.is_sparse else [gradient]


def test_the_sum_of_two_parameters_and_of_all_elements(pool: ThreadPoolExecutor) -> None:
    for function in (lambda p, q, x: p + q + x, lambda p, q, x: p.sum() + q.sum() + x):
        p, q = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)

        def program(
            _world: World, _me: int, given: Sequence[Tensor], function: Any = function
        ) -> list[Tensor]:
            return [function(p, q, given[0])]  # noqa: B023 - called in this round

        with workers(2, 0, pool) as world:
            (result,) = world.call(0, 1, program, [torch.zeros(3)])
            result.sum().backward()
            for parameter, gradient in world.graphs[1].gradients.peek(Root(0)).items():
                parameter.data -= gradient.clamp_(-0.5, 0.5).mul_(0.5)
        assert p.tolist() == q.tolist() == [0.75] * 3


def test_a_gradient_that_nothing_else_refers_to_is_not_copied() -> None:
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


def test_rows_that_are_changed_after_the_backward_pass(pool: ThreadPoolExecutor) -> None:
    weight = torch.zeros(9, 2, requires_grad=True)
    rows = torch.tensor([1, 2, 7])

    def program(_world: World, _me: int, _given: Sequence[Tensor]) -> list[Tensor]:
        return [nn.functional.embedding(rows, weight, sparse=True)]

    with workers(2, 0, pool) as world:
        (result,) = world.call(0, 1, program, [])
        result.sum().backward()
        rows.fill_(0)
        (found,) = world.graphs[1].gradients.take(Root(0), [weight])
    assert found is not None
    assert found.to_dense()[:, 0].nonzero().flatten().tolist() == [1, 2, 7]
