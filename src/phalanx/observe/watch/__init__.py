"""The live view of a job that `phalanx watch` shows.

`view` evaluates one reading of a job: the activity and speed of each rank, the ranks that it waits
for, and the rank that delays the others. `table` renders the result as a table that fits the
terminal. Reading the job and refreshing the view are left to the command.
"""

from phalanx.observe.watch.table import render
from phalanx.observe.watch.view import (
    WINDOW,
    Row,
    Straggler,
    View,
    as_json,
    build_view,
    get_history_length,
    get_outcome,
    has_failed,
)

__all__ = [
    "WINDOW",
    "Row",
    "Straggler",
    "View",
    "as_json",
    "build_view",
    "get_history_length",
    "get_outcome",
    "has_failed",
    "render",
]
