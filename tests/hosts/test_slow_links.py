"""Training over links that fail, with hosts that come and go, and whose clocks are off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.test_networks import MISSING, REASON

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "hosts_come_and_go.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_hosts_come_and_go(tmp_path: Path) -> None:
    """The program checks that the parameters are the same on all hosts after each exchange."""
    if MISSING or os.geteuid() != 0:
        (pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip)(REASON)
    command = [
        *(sys.executable, str(PROGRAM), "--hosts", "3", "--events", "3", "--width", "300"),
        *("--outage", "20", "--restart", "--clocks", "7200", "--folder", str(tmp_path / "logs")),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for kind in ("outage", "restart"):
        assert f'"{kind}_seconds"' in ended.stdout, ended.stdout
