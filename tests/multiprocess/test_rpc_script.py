"""Scripts that start the workers of `phalanx.rpc` themselves, like PyTorch's examples."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from phalanx import rpc
from phalanx.errors import PeerLost
from tests.ranks import RankServer

SCRIPT = """
import os
import sys

import torch
import torch.multiprocessing as mp
import phalanx.rpc as rpc

server = None


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, x):
        self.count += 1
        return x + self.count


def get_server():
    global server
    if not server:
        server = Net()
    return server


def call_method(method, rref, *args):
    return method(rref.local_value(), *args)


def run(rank, size):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", sys.argv[1]
    rpc.init_rpc(name=f"w{rank}", rank=rank, world_size=size)
    if rank == 1:
        for count in (1, 2):  # the same server both times
            net = rpc.remote("w0", get_server)
            out = rpc.rpc_sync(net.owner(), call_method, args=[Net.forward, net, torch.zeros(2)])
            assert out.tolist() == [count] * 2, out
        assert server is None
        print("done", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run, args=(2,), nprocs=2, join=True)
"""


def test_script_with_its_own_functions(tmp_path: Path, port: int) -> None:
    (tmp_path / "main.py").write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, "main.py", str(port)],
        cwd=tmp_path,
        timeout=90,
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


# ---- the launcher reports the first worker that fails ----


def fail_first() -> None:
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"w{rank}")
    first = os.pidfd_open(rpc.rpc_sync("w0", os.getpid))
    dist.barrier()
    if rank == 0:
        rpc.shutdown(graceful=False)  # as in a process that has raised an exception
        time.sleep(0.5)  # the exit is slow
        os._exit(3)
    with pytest.raises(PeerLost, match="'w0'"):
        rpc.shutdown()
    assert select.select([first], [], [], 0)[0], "this worker would have been reported instead"


def test_first_failure_exits_first(ranks: RankServer) -> None:
    exits = ranks.start(3, fail_first).join()
    assert [each.code for each in exits] == [3, 0, 0], exits
