"""Who is to blame: from a job to a verdict, without a word of prose.

`endings` says how each rank ended. `waits` puts the ranks at one moment, the one that explains the
rest, with the graph of who waits for whom. `finders` asks for one cause after another, causes
before what follows from them; `holdups` follows the waits to their end, `circles` finds those that
have none, `messages` those that no message ends. What comes out is a `verdict`.
"""

from phalanx.observe.culprit.finders import find, find_in
from phalanx.observe.culprit.verdict import Kind, Side, Verdict
from phalanx.observe.culprit.waits import Scene

__all__ = ["Kind", "Scene", "Side", "Verdict", "find", "find_in"]
