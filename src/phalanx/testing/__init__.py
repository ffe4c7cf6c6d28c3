"""What checks an installation or a user's own program.

`Drill` runs a function on ranks of which some die, stop, come late or leave an operation out; see
docs/testing-against-failure.md. Faults are planned with `faults` (`kill`, `crash`, `fail`, `stop`,
`delay`, `skip`) and strike in the rank's own process (`striking`; `arm` does so in a process that
something else has started). Ranks are forked from `fork_server` and watched by `processes`.

`selfcheck` is behind `phalanx test`: every operation that exists, against an oracle, on two ranks.
"""

from phalanx.testing.drill import Drill, Result
from phalanx.testing.faults import Fault, crash, delay, fail, kill, skip, stop
from phalanx.testing.processes import Ended
from phalanx.testing.striking import arm, disarm

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
