"""Checks of this machine and of the network between machines, behind `phalanx doctor`.

- `finding`: the result of a check: a level, a sentence, and advice.
- `machine`, `kernel`, `network`, `software`: checks of one or more areas each, which change
  nothing. `run_checks` calls them all.
- `peers`: probes of every pair of hosts: reachability, latency and bandwidth.
- `report` prints the findings and the network for people, and formats them for programs.

A check tries the calls that Phalanx makes rather than comparing version numbers: it creates a
segment, opens the memory of another process and loads the MPI library.
"""

from phalanx.doctor import software
from phalanx.doctor.finding import Finding

__all__ = ["Finding", "run_checks"]


def run_checks() -> list[Finding]:
    """Run all checks of this machine in this process; takes some seconds and changes nothing."""
    found = software.check_versions()
    if any(finding.level == "problem" for finding in found):
        return found  # the other checks need torch.distributed and the core
    from phalanx.doctor import kernel, machine, network

    return [
        *found,
        *software.check_environment(),
        *machine.check_resources(),
        *kernel.check(),
        *network.check(),
        *software.check_libraries(),
        *machine.check_gpus(),
    ]
