"""Add numbers of all ranks."""

import torch
import torch.distributed as dist

import phalanx

with phalanx.init() as session:
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    assert tensor[0] == session.world_size
