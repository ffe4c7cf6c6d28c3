"""Tests of an installation, and fault injection for user programs.

`FaultRunner` runs a function on ranks and injects faults: a rank dies, stops, arrives late or skips
an operation. `faults` defines the faults (`kill`, `crash`,
`fail`, `stop`, `delay`, `skip`) and injects them in the rank's own process; `enable_faults` does so
in a process that another launcher has started. `fork_server` forks the ranks, and `processes`
watches them.

`selfcheck` implements `phalanx test`: it compares the operations with a reference, on two ranks by
default.
"""

from phalanx.testing.fault_runner import FaultRunner, Result
from phalanx.testing.faults import (
    Fault,
    crash,
    delay,
    disable_faults,
    enable_faults,
    fail,
    kill,
    skip,
    stop,
)
from phalanx.testing.processes import RankResult

__all__ = [
    "Fault",
    "FaultRunner",
    "RankResult",
    "Result",
    "crash",
    "delay",
    "disable_faults",
    "enable_faults",
    "fail",
    "kill",
    "skip",
    "stop",
]
