"""Root-cause analysis: from a job to a diagnosis, independent of any wording.

`exit_reasons` determines how each rank ended. `wait_for_graph` reconstructs the state of all ranks
at the moment that explains the failure, including the wait-for graph. `rules` checks for one kind
of cause after another, causes before their consequences. `blocked_ranks` follows the wait-for graph
to the ranks that block the others, `deadlocks` finds its cycles, `messages` finds unmatched
messages, and `pending_calls` finds pending remote calls. `diagnosis` defines the result.
"""

from phalanx.observe.diagnosis.diagnosis import Diagnosis, Kind, Side
from phalanx.observe.diagnosis.rules import diagnose, diagnose_graph
from phalanx.observe.diagnosis.wait_for_graph import WaitForGraph

__all__ = ["Diagnosis", "Kind", "Side", "WaitForGraph", "diagnose", "diagnose_graph"]
