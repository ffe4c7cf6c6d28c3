"""Train a pipeline of two stages with two replicas, on four ranks.

    phalanx run --nproc-per-node 4 examples/pipeline.py

Ranks 0 and 1 are one pipeline, ranks 2 and 3 the other:

              stage 0          stage 1
    replica 0  rank 0  ------>  rank 1    first half of each batch
                 |                |
    replica 1  rank 2  ------>  rank 3    second half

The stages exchange the activations and gradients of one microbatch after another. The replicas
exchange the gradients of the parameters. The pipeline is PyTorch's
`torch.distributed.pipelining`; `phalanx.init` and `average_gradients` are from Phalanx.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import phalanx
from phalanx.parallel import average_gradients

STAGES = REPLICAS = 2
MICROBATCHES = 4
WIDTH = 32
SCHEDULES = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}


def new_stage(number: int) -> nn.Module:
    """Return one half of the network, the same in both replicas."""
    torch.manual_seed(number)
    if number == 0:
        return nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    """Return points of the plane, and the targets: the sines of the products of coordinates."""
    points = torch.rand(size, 2, generator=torch.Generator().manual_seed(step)) * 4 - 2
    return points, torch.sin(points[:, :1] * points[:, 1:])


def train(mesh: DeviceMesh, schedule_name: str, steps: int, size: int) -> None:
    """Run on every rank: train this rank's stage."""
    number, replica = mesh.get_local_rank("stage"), mesh.get_local_rank("replica")
    module = new_stage(number)
    stage = pipelining.PipelineStage(
        module, number, STAGES, torch.device("cpu"), group=mesh.get_group("stage")
    )
    schedule = SCHEDULES[schedule_name](stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        points, targets = (part.chunk(REPLICAS)[replica] for part in batch(step, size))
        optimizer.zero_grad()
        if number == 0:
            schedule.step(points)
        else:
            losses: list[Tensor] = []
            schedule.step(target=targets, losses=losses)
            report_loss(step, steps, torch.stack(losses).mean(), mesh)
        average_gradients(module, mesh.get_group("replica"))
        optimizer.step()


def report_loss(step: int, steps: int, loss: Tensor, mesh: DeviceMesh) -> None:
    """Print the loss of the whole batch in some steps; all last stages must call it."""
    if step == 1 or step % (steps // 5 or 1) == 0:
        loss = loss.detach() / REPLICAS
        dist.all_reduce(loss, group=mesh.get_group("replica"))
        phalanx.report(step=step, loss=float(loss))
        if mesh.get_local_rank("replica") == 0:
            print(f"step {step}: loss {float(loss):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train two replicas of a pipeline of two stages.")
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), default="1f1b")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (200)")
    parser.add_argument("--batch", type=int, default=128, help="rows of a global batch (128)")
    parser.add_argument("--backend", choices=["phalanx", "gloo"], default="phalanx")
    options = parser.parse_args()
    parts = REPLICAS * MICROBATCHES
    if options.steps < 1 or options.batch < 1 or options.batch % parts:
        parser.error(
            f"--steps {options.steps} --batch {options.batch} given, expected at least one step, "
            f"and a batch that {REPLICAS} replicas times {MICROBATCHES} microbatches divide "
            f"evenly: a multiple of {parts}"
        )
    with phalanx.init(options.backend) as session:
        if session.world_size != STAGES * REPLICAS:
            parser.error(
                f"{session.world_size} ranks, expected {STAGES * REPLICAS}: "
                "phalanx run --nproc-per-node 4 examples/pipeline.py"
            )
        shape, names = (REPLICAS, STAGES), ("replica", "stage")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        train(mesh, options.schedule, options.steps, options.batch)


if __name__ == "__main__":
    main()
