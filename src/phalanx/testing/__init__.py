"""Tests of an installation, and fault injection for user programs.

`Drill` runs a function on ranks and injects faults: a rank dies, stops, arrives late or skips an
operation; see docs/testing-against-failure.md. `faults` defines the faults (`kill`, `crash`,
`fail`, `stop`, `delay`, `skip`). `striking` injects them in the rank's own process; `arm` does so
in a process that another launcher has started. `fork_server` forks the ranks, and `processes`
watches them.

`selfcheck` implements `phalanx test`: it compares the operations with a reference, on two ranks by
default.
"""

from phalanx.testing.fault_run import Drill, Result
from phalanx.testing.faults import Fault, crash, delay, fail, kill, skip, stop
from phalanx.testing.injector import arm, disarm
from phalanx.testing.processes import Ended

__all__ = [
    "Drill",
    "Ended",
    "Fault",
    "Result",
    "arm",
    "crash",
    "delay",
    "disarm",
    "fail",
    "kill",
    "skip",
    "stop",
]
