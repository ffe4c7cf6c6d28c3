"""Root-cause analysis: from a job to a diagnosis, its description and suggested fixes.

`wait_for_graph` reconstructs the state of all ranks at the moment that explains the failure,
including the wait-for graph; `exit_reasons` determines how each rank ended. `diagnosis` defines the
result, and the class `Rule`, which detects, describes and remedies one kind of it. `rules` tries
the rules in order, causes before their consequences. They are grouped by topic: `lost_ranks`,
`blocked_ranks`, `deadlocks`, `mismatches`, `messages` and `pending_calls` (remote calls).
`formatting` formats ranks, operations and times, and escapes text from the job.
"""

from phalanx.observe.diagnosis.diagnosis import Diagnosis, Kind, Side
from phalanx.observe.diagnosis.rules import (
    diagnose,
    diagnose_graph,
    suggest_fixes,
    write_sentences,
)
from phalanx.observe.diagnosis.wait_for_graph import WaitForGraph

__all__ = [
    "Diagnosis",
    "Kind",
    "Side",
    "WaitForGraph",
    "diagnose",
    "diagnose_graph",
    "suggest_fixes",
    "write_sentences",
]
