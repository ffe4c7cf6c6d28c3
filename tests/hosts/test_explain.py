"""A job on several hosts is explained as one on a single host is: here on hosts that are simulated.

Flight recorders of real hosts lie on their hosts; see docs/design/hierarchical.md.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PHALANX = str(Path(sys.executable).with_name("phalanx"))
LIMIT = 90

SCRIPT = """
import os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist

seconds = 5 if sys.argv[1] == "recv" else 60
dist.init_process_group("phalanx", timeout=timedelta(seconds=seconds))
rank, tensor = dist.get_rank(), torch.zeros(3)
dist.all_reduce(tensor)
if sys.argv[1] == "recv":
    dist.recv(tensor, 3, tag=7) if rank == 0 else dist.barrier()
elif sys.argv[1] == "branch":
    dist.all_reduce(torch.zeros(4)) if rank == 2 else dist.broadcast(tensor, 0)
else:
    if rank == 3 and sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(tensor)
"""

FINDINGS = {
    "recv": "Rank 0 (pid N) waited for a message that nobody sent: recv float32[3] from rank 3",
    "branch": "Rank 2 (pid N) took another branch than the others",
    "killed": "Rank 3 (pid N) was killed by SIGKILL",
}


@pytest.mark.parametrize("what", FINDINGS)
def test_what_went_wrong(tmp_path: Path, what: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [PHALANX, "run", "--nproc-per-node", "4"]
    ended = subprocess.run(
        [*command, "--simulate-hosts", "2", str(script), what],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert ended.returncode != 0
    before, _, after = FINDINGS[what].partition("(pid N)")
    story = ended.stderr.partition("\nJob ")[2]
    told = [line for line in story.splitlines() if line.startswith(before)]
    assert len(told) == 1, ended.stderr
    assert after in told[0]
