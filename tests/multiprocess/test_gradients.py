"""`average_gradients` against numpy in float64, and against one process with the whole batch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import phalanx
from phalanx.data import per_rank_batch_size
from phalanx.errors import UsageError
from phalanx.parallel import average_gradients, average_gradients_per_parameter
from tests.seeds import fresh_seed

BACKENDS = ("gloo", "phalanx")
WORLD_SIZES = (1, 2, 3, 4)
TIMEOUT = 100.0

# Dtypes, bytes of a bucket (None: one all-reduce per parameter), gradients missing, weights given.
Case = tuple[str, int | None, bool, bool]

# Odd sizes, one of them empty and one without dimensions.
SHAPES = [(3, 5), (), (7,), (1,), (0, 4), (2, 3, 4, 5), (257,), (31, 33)]
MIXED = [torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float32]
MIXED += [torch.float16, torch.complex64, torch.float64]
SAME = [torch.float32] * len(SHAPES)
# Whether a rank lacks the gradient of parameter 0, 1, ...: no rank, some ranks, all ranks.
MISSING: list[Callable[[int, int], bool]] = [
    lambda rank, world_size: False,
    lambda rank, world_size: rank == 0,
    lambda rank, world_size: True,
    lambda rank, world_size: rank != world_size - 1,
    lambda rank, world_size: rank % 2 == 1,
]


def random_gradient(seed: int, rank: int, index: int) -> Any:
    """The gradient of one parameter on one rank, in numpy: float64, or complex128."""
    generator = np.random.default_rng([seed, rank, index])
    real, imaginary = generator.standard_normal((2, *SHAPES[index]))
    return real + 1j * imaginary


def cast(values: Any, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.asarray(values if dtype.is_complex else values.real)).to(dtype)


def parameters_with_gradients(
    seed: int, dtypes: list[torch.dtype], missing: bool
) -> list[nn.Parameter]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parameters = []
    for index, (shape, dtype) in enumerate(zip(SHAPES, dtypes, strict=True)):
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype))
        if not (missing and MISSING[index % len(MISSING)](rank, world_size)):
            parameter.grad = cast(random_gradient(seed, rank, index), dtype)
        parameters.append(parameter)
    return parameters


def oracle(seed: int, dtypes: list[torch.dtype], missing: bool, weights: list[float]) -> list[Any]:
    """Sum the gradients of the ranks in float64, after rounding to the dtype; None: no gradient."""
    expected: list[Any] = []
    for index, dtype in enumerate(dtypes):
        absent = MISSING[index % len(MISSING)] if missing else MISSING[0]
        present = [rank for rank in range(len(weights)) if not absent(rank, len(weights))]
        by_rank = {rank: cast(random_gradient(seed, rank, index), dtype) for rank in present}
        wide = torch.complex128 if dtype.is_complex else torch.float64
        terms = [by_rank[rank].to(wide).numpy() * weights[rank] for rank in present]
        expected.append(sum(terms) if terms else None)
    return expected


def uneven_weights(world_size: int) -> list[float]:
    whole = sum(range(world_size)) or 1
    return [rank / whole for rank in range(world_size)] if world_size > 1 else [1.0]


# --- functions that the ranks run; each returns the values that the tests check ------------------


def run_averages(seed: int) -> dict[Case, list[Tensor | None]]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results: dict[Case, list[Tensor | None]] = {}
    for name, dtypes in (("same", SAME), ("mixed", MIXED)):
        for bucket_bytes in (0, 100, 2000, 25 * 2**20):
            for missing in (False, True):
                for weights in (None, uneven_weights(world_size)):
                    parameters = parameters_with_gradients(seed, dtypes, missing)
                    weight = None if weights is None else weights[rank]
                    average_gradients(parameters, weight=weight, bucket_bytes=bucket_bytes)
                    case = (name, bucket_bytes, missing, weights is not None)
                    results[case] = [parameter.grad for parameter in parameters]
        for weights in (None, uneven_weights(world_size)):
            parameters = parameters_with_gradients(seed, dtypes, False)
            weight = None if weights is None else weights[rank]
            average_gradients_per_parameter(parameters, weight=weight)
            case = (name, None, False, weights is not None)
            results[case] = [parameter.grad for parameter in parameters]
    return results


def small_network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 5), nn.Tanh()
    return nn.Sequential(*layers, nn.Linear(5, 1)).double()


def whole_batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = np.random.default_rng([seed, 99])
    inputs, targets = generator.standard_normal((13, 2, 6, 6)), generator.standard_normal((13, 1))
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def run_step(seed: int, average: Callable[..., None]) -> list[Tensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = [per_rank_batch_size(13, world_size, other) for other in range(world_size)]
    share = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    inputs, targets = (tensor[share] for tensor in whole_batch(seed))
    model = small_network(seed)
    nn.functional.mse_loss(model(inputs), targets).backward()
    average(model, weight=sizes[rank] / 13)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def run_layouts() -> dict[str, Any]:
    """Average non-contiguous gradients; the values of rank r are 0, 1, 2, ... times r + 1."""
    times = dist.get_rank() + 1
    transposed = nn.Parameter(torch.empty(3, 5))
    transposed.grad = (torch.arange(15.0) * times).view(5, 3).t()
    channels_last = nn.Parameter(torch.empty(2, 3, 4, 5))
    values = (torch.arange(120.0) * times).view(2, 3, 4, 5)
    channels_last.grad = values.contiguous(memory_format=torch.channels_last)
    strided = nn.Parameter(torch.empty(4))
    memory = torch.full((8,), -1.0)
    strided.grad = memory[::2]
    strided.grad.copy_(torch.arange(4.0) * times)
    before = [channels_last.grad, strided.grad]
    # Also one that is alone in its bucket.
    average_gradients([transposed, channels_last, strided])
    average_gradients_per_parameter([transposed])
    return {
        "transposed": transposed.grad,
        "channels_last": channels_last.grad,
        "strides": channels_last.grad.stride(),
        "strided": strided.grad,
        "memory": memory,
        "in place": channels_last.grad is before[0] and strided.grad is before[1],
    }


def run_counts() -> dict[str, Any]:
    """Count all-reduces and their elements, by a wrapper of `all_reduce`."""
    parameters = [nn.Parameter(torch.empty(n)) for n in (10, 20, 30, 1000, 5)]
    sizes: list[int] = []
    real = dist.all_reduce

    def all_reduce(tensor: Tensor, **options: Any) -> Any:
        sizes.append(tensor.numel())
        return real(tensor, **options)

    def count(average: Callable[..., None], **options: Any) -> list[int]:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        sizes.clear()
        average(parameters, **options)
        return list(sizes)

    dist.all_reduce = all_reduce  # type: ignore[assignment]
    try:
        return {
            "one bucket": count(average_gradients),
            "small buckets": count(average_gradients, bucket_bytes=160),
            "per parameter": count(average_gradients_per_parameter),
        }
    finally:
        dist.all_reduce = real  # type: ignore[assignment]


def run_special() -> dict[str, Any]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tied = nn.Parameter(torch.empty(3))
    tied.grad = torch.full((3,), rank + 1.0)
    average_gradients([tied, tied])
    alone = nn.Parameter(torch.empty(3))
    alone.grad = torch.full((3,), rank + 1.0)
    average_gradients(alone)
    frozen = nn.Parameter(torch.empty(3), requires_grad=False)
    # The last rank's NaN is ignored, and the rank gets the gradient of the other ranks.
    poisoned = nn.Parameter(torch.empty(3))
    last = rank == world_size - 1 and world_size > 1
    poisoned.grad = torch.full((3,), torch.nan if last else 2.0)
    counting_ranks = max(1, world_size - 1)
    average_gradients([poisoned, frozen], weight=0.0 if last else 1 / counting_ranks)
    return {
        "tied": tied.grad,
        "alone": alone.grad,
        "poisoned": poisoned.grad,
        "frozen": frozen.grad,
    }


def run_group() -> dict[str, Any]:
    """Average in a group without rank 0, on which an error says that it is not a member."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return {}
    group = dist.new_group(list(range(1, world_size)))
    parameter = nn.Parameter(torch.empty(3))
    parameter.grad = torch.full((3,), float(rank))
    message = ""
    try:
        average_gradients([parameter], group)  # type: ignore[arg-type]
    except UsageError as error:
        message = str(error)
    return {"message": message, "gradient": parameter.grad}


def run_errors() -> dict[str, str]:
    """Make every invalid call on every rank; the group must stay usable."""
    parameter = nn.Parameter(torch.empty(3))
    sparse = nn.Embedding(4, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    calls: dict[str, Callable[[], None]] = {
        "no gradient": lambda: average_gradients([parameter]),
        "weight": lambda: average_gradients([parameter], weight=16),
        "negative weight": lambda: average_gradients([parameter], weight=-0.5),
        "none given": lambda: average_gradients(nn.ReLU()),
        "sparse": lambda: average_gradients(sparse),
        "sparse per parameter": lambda: average_gradients_per_parameter(sparse),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except UsageError as error:
            messages[name] = str(error)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    messages["sum of ones"] = str(tensor.item())
    return messages


def run_all(backend: str, seed: int) -> dict[str, Any]:
    with phalanx.init(backend, device="cpu", timeout=TIMEOUT / 2):
        return {
            "averages": run_averages(seed),
            "step": run_step(seed, average_gradients),
            "step per parameter": run_step(seed, average_gradients_per_parameter),
            "layouts": run_layouts(),
            "counts": run_counts(),
            "special": run_special(),
            "group": run_group(),
            "errors": run_errors(),
        }


# --- the tests ----------------------------------------------------------------------------------

World = tuple[int, list[dict[str, Any]]]


@pytest.fixture(
    scope="module",
    params=[(backend, world_size) for backend in BACKENDS for world_size in WORLD_SIZES],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def world(request: pytest.FixtureRequest) -> World:
    """The seed, and the results of all ranks, of one launch."""
    backend, world_size = request.param
    seed = fresh_seed()
    return seed, phalanx.launch(run_all, world_size, (backend, seed), timeout=TIMEOUT)


@pytest.mark.sampled(3)
def test_averages_equal_oracle(world: World) -> None:
    seed, ranks = world
    for result in ranks:
        assert len(result["averages"]) == 36
        for case, gradients in result["averages"].items():
            name, _, missing, weighted = case
            dtypes = SAME if name == "same" else MIXED
            weights = uneven_weights(len(ranks)) if weighted else [1 / len(ranks)] * len(ranks)
            expected = oracle(seed, dtypes, missing, weights)
            for index, (gradient, value) in enumerate(zip(gradients, expected, strict=True)):
                context = f"seed {seed}, {case}, parameter {index}"
                if value is None:
                    assert gradient is None, context
                    continue
                assert gradient.dtype == dtypes[index], context
                # Each term and each sum is rounded once; terms reach about 4.
                bound = 4 * (len(ranks) + 1) * torch.finfo(dtypes[index]).eps
                np.testing.assert_allclose(
                    gradient.to(torch.complex128).numpy(),
                    value,
                    rtol=0,
                    atol=bound,
                    err_msg=context,
                )


@pytest.mark.sampled(3)
def test_every_rank_has_the_same_bits(world: World) -> None:
    seed, (first, *others) = world
    for other in others:
        for case, gradients in first["averages"].items():
            for own_value, other_value in zip(gradients, other["averages"][case], strict=True):
                assert (own_value is None) == (other_value is None)
                assert own_value is None or torch.equal(own_value, other_value), (
                    f"seed {seed}, {case}"
                )


@pytest.mark.parametrize("key", ["step", "step per parameter"])
def test_uneven_batches_give_gradient_of_whole_batch(world: World, key: str) -> None:
    seed, ranks = world
    inputs, targets = whole_batch(seed)
    model = small_network(seed)
    nn.functional.mse_loss(model(inputs), targets).backward()
    for result in ranks:
        for gradient, parameter in zip(result[key], model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-10, atol=1e-12)


def test_non_contiguous_gradients(world: World) -> None:
    _, ranks = world
    mean = sum(range(1, len(ranks) + 1)) / len(ranks)
    for rank, result in enumerate(ranks):
        layouts = result["layouts"]
        values = torch.arange(120.0) * mean
        torch.testing.assert_close(layouts["transposed"], values[:15].view(5, 3).t())
        torch.testing.assert_close(layouts["channels_last"], values.view(2, 3, 4, 5))
        torch.testing.assert_close(layouts["strided"], values[:4])
        assert layouts["strides"] == (60, 1, 15, 3)
        assert layouts["memory"][1::2].tolist() == [-1.0] * 4, f"rank {rank} wrote between elements"
        assert layouts["in place"]


def test_number_of_all_reduces(world: World) -> None:
    _, ranks = world
    for result in ranks:
        counts = result["counts"]
        # Five more elements are the presence of each gradient.
        assert counts["one bucket"] == [5 + 10 + 20 + 30 + 1000 + 5]
        # At most 40 elements in a bucket; a larger gradient is reduced alone.
        assert counts["small buckets"] == [1000, 5 + 10 + 20, 30 + 5] or (
            counts["small buckets"] == [5 + 10 + 20, 1000, 30 + 5]
        )
        assert counts["per parameter"] == [10, 20, 30, 1000, 5]


def test_tied_single_frozen_and_ignored(world: World) -> None:
    _, ranks = world
    mean = sum(range(1, len(ranks) + 1)) / len(ranks)
    for result in ranks:
        special = result["special"]
        torch.testing.assert_close(special["tied"], torch.full((3,), mean))
        torch.testing.assert_close(special["alone"], torch.full((3,), mean))
        torch.testing.assert_close(special["poisoned"], torch.full((3,), 2.0))
        assert special["frozen"] is None


def test_group(world: World) -> None:
    _, ranks = world
    if len(ranks) == 1:
        assert ranks[0]["group"] == {}
        return
    assert "not a member of the group" in ranks[0]["group"]["message"]
    mean = sum(range(1, len(ranks))) / (len(ranks) - 1)
    for result in ranks[1:]:
        assert result["group"]["message"] == ""
        torch.testing.assert_close(result["group"]["gradient"], torch.full((3,), mean))


def test_invalid_calls(world: World) -> None:
    _, ranks = world
    for result in ranks:
        errors = result["errors"]
        assert "no rank has a gradient" in errors["no gradient"]
        assert "loss.backward()" in errors["no gradient"]
        assert "weight 16 given, expected 0 to 1" in errors["weight"]
        assert "weight -0.5 given" in errors["negative weight"]
        assert "no parameter that requires a gradient given" in errors["none given"]
        assert "parameter 0 [4, 2] has a gradient of layout torch.sparse_coo" in errors["sparse"]
        assert "sparse=False" in errors["sparse per parameter"]
        assert errors["sum of ones"] == str(float(len(ranks)))


def test_without_a_process_group() -> None:
    with pytest.raises(UsageError, match=r"no process group: call phalanx.init\(\)"):
        average_gradients([nn.Parameter(torch.empty(1))])
