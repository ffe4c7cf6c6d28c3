"""Train a little, until rank 1 is killed."""

import os
import signal

import torch
import torch.distributed as dist

import phalanx

with phalanx.init() as session:
    for step in range(1, 100):
        gradient = torch.ones(1000)
        kill = session.rank == 1 and step == 8 and os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(gradient)
        phalanx.report(step=step)
