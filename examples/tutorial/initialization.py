"""Form the same group in three ways: by the environment, by TCP and by a file.

python initialization.py
"""

import os
import socket
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import phalanx  # registers the backend "phalanx"


def free_port() -> int:
    """Return a TCP port of this machine that no program uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def count_ranks(rank: int, world_size: int, urls: list[str], backend: str) -> None:
    """Form a group by each URL, and count its ranks."""
    for url in urls:
        dist.init_process_group(backend, init_method=url, rank=rank, world_size=world_size)
        count = torch.ones(1)
        dist.all_reduce(count)
        if rank == 0:
            print(f"{url.partition(':')[0]}: {count.item():g} ranks on {dist.get_backend()}")
        dist.destroy_process_group()


if __name__ == "__main__":
    if not hasattr(sys.modules["__main__"], "__file__"):
        sys.exit("mp.spawn needs a file, not a notebook: python initialization.py")
    world_size = int(sys.argv[1]) if sys.argv[1:] else 2
    backend = sys.argv[2] if sys.argv[2:] else "phalanx"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory() as folder:
        urls = ["env://", f"tcp://127.0.0.1:{free_port()}", f"file://{folder}/rendezvous"]
        mp.spawn(count_ranks, (world_size, urls, backend), nprocs=world_size)
    print(f"phalanx {phalanx.__version__}: all groups were formed")
