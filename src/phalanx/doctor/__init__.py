"""Checks of this machine and of the network between machines, behind `phalanx doctor`.

- `finding`: the result of a check: a level, a sentence, and advice.
- `environment`, `machine`, `kernel`, `network`, `software`: checks of one or two areas each, which
  change nothing. `checks` calls them all.
- `peers`: probes of every pair of hosts: reachability, latency and bandwidth.
- `report` prints the findings and the network for people, and formats them for programs.

A check tries the calls that Phalanx makes rather than comparing version numbers: it creates a
segment, opens the memory of another process and loads the MPI library.
"""

from phalanx.doctor.checks import run_checks
from phalanx.doctor.finding import Finding

__all__ = ["Finding", "run_checks"]
