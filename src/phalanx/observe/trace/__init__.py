"""All ranks of a job on one timeline: the file that `phalanx trace` writes.

`timeline` arranges the operations of a rank on tracks, whatever the format; `writing` writes them
for Perfetto.
"""

from phalanx.observe.trace.timeline import Timeline, timeline
from phalanx.observe.trace.writing import Written, check, write

__all__ = ["Timeline", "Written", "check", "timeline", "write"]
