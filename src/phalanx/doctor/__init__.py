"""Is this machine fit for Phalanx, and the network between machines?

- `finding`: what a check says: a level, a sentence, and what to do next.
- `versions`, `environment`, `machine`, `kernel`, `network`, `libraries`, `devices`: one area each,
  a function `check` that looks and changes nothing. `examination` calls them all.
- `peers`: every pair of hosts probed: whether they reach each other, how late and how fast.
- `show` prints it for people, `report` for programs.

A check tries what Phalanx will do rather than asking for version numbers: it makes a segment, opens
the memory of another process, loads the MPI library.
"""

from phalanx.doctor.examination import examine
from phalanx.doctor.finding import Finding

__all__ = ["Finding", "examine"]
