"""Explanations of jobs on several simulated hosts.

On real hosts, each host has the flight recorders of its own ranks; see
docs/design/hierarchical.md.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

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

EXPECTED = {
    "recv": "Rank 0 (pid N) waited for a message that no rank sent: recv float32[3] from rank 3",
    "branch": "Rank 2 (pid N) took a different branch than the others",
    "killed": "Rank 3 (pid N) was killed by SIGKILL",
}


@pytest.mark.parametrize("scenario", EXPECTED)
def test_the_root_cause_is_named(tmp_path: Path, scenario: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [PHALANX, "run", "--nproc-per-node", "4"]
    ended = subprocess.run(
        [*command, "--simulate-hosts", "2", str(script), scenario],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert ended.returncode != 0
    before, _, after = EXPECTED[scenario].partition("(pid N)")
    explanation = ended.stderr.partition("\nJob ")[2]
    matching = [line for line in explanation.splitlines() if line.startswith(before)]
    assert len(matching) == 1, ended.stderr
    assert after in matching[0]
