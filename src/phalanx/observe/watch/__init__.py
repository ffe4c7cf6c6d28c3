"""What a job does just now: what `phalanx watch` shows.

`view` looks at one reading of a job: what each rank is in, how fast it is, whom it waits for, and
which rank holds up the others. `table` makes of it a table that fits the terminal. Nothing here
reads the job, or knows of time that passes: that is the command's part.
"""

from phalanx.observe.watch.table import render
from phalanx.observe.watch.view import (
    WINDOW,
    Row,
    Straggler,
    View,
    as_json,
    ending,
    has_failed,
    history,
    view,
)

__all__ = [
    "WINDOW",
    "Row",
    "Straggler",
    "View",
    "as_json",
    "ending",
    "has_failed",
    "history",
    "render",
    "view",
]
