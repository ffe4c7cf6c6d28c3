"""Train a network on handwritten digits by synchronous SGD, written by hand.

phalanx run --nproc-per-node 2 synchronous_sgd.py
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import phalanx
from phalanx.data import load_digits

GLOBAL_BATCH = 64


def partition(count: int, rank: int, world_size: int) -> Tensor:
    """Return the indices of this rank's samples, as many on every rank."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))  # same on all ranks
    return order[rank::world_size][: count // world_size]


def average_by_all_reduce(model: nn.Module) -> None:
    """Replace each gradient by its mean over the ranks."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= dist.get_world_size()


def average_by_reduce_and_broadcast(model: nn.Module) -> None:
    """Do the same through rank 0."""
    for parameter in model.parameters():
        dist.reduce(parameter.grad, dst=0, op=dist.ReduceOp.SUM)
        parameter.grad /= dist.get_world_size()
        dist.broadcast(parameter.grad, src=0)


def train(seed: int, average: Callable[[nn.Module], None]) -> tuple[float, float]:
    """Return the accuracy on held-out digits, and the difference of the replicas."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels = load_digits()
    held_out = slice(1500, None)
    own = partition(1500, rank, world_size)

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(10):
        for batch in own.split(GLOBAL_BATCH // world_size):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            average(model)
            optimizer.step()
    with torch.no_grad():
        correct = (model(images[held_out]).argmax(dim=1) == labels[held_out]).float()
    return correct.mean().item(), difference_of_replicas(model)


def difference_of_replicas(model: nn.Module) -> float:
    """Return the largest difference between the same parameter of two ranks."""
    highest = parameters_to_vector(model.parameters()).detach()
    lowest = highest.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    return (highest - lowest).max().item()


if __name__ == "__main__":
    with phalanx.init(*sys.argv[1:2]) as session:
        runs = {
            "all-reduce": (1, average_by_all_reduce),
            "reduce and broadcast": (1, average_by_reduce_and_broadcast),
            "replicas that start differently": (1 + session.rank, average_by_all_reduce),
        }
        for name, (seed, average) in runs.items():
            accuracy, difference = train(seed, average)
            if session.is_main:
                print(f"{name}: accuracy {accuracy:.0%}, replicas differ by {difference:.2g}")
