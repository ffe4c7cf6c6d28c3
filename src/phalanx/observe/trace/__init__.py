"""A timeline of all ranks of a job: the file that `phalanx trace` writes.

`timeline` arranges the operations of a rank on tracks, independently of the file format. `writer`
writes them for Perfetto.
"""

from phalanx.observe.trace.timeline import Timeline, build_timeline
from phalanx.observe.trace.writer import OperationCounts, check, write

__all__ = ["OperationCounts", "Timeline", "build_timeline", "check", "write"]
