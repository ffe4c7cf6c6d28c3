"""MPI, through mpi4py: whichever library `mpirun` belongs to, Open MPI or MPICH, with no rebuild.

`library` finds it and says what is missing. `wire` is what is said and carried through it, `world`
the one thread that calls it, `protocol` the messages. `engine` is one group's engine: a `peer` for
each other rank, a `transfer` for all that is under way.
"""

from phalanx.engines.mpi.engine import MpiEngine
from phalanx.engines.mpi.protocol import MOST_TEXT
from phalanx.engines.mpi.world import World, the_world

__all__ = ["MOST_TEXT", "MpiEngine", "World", "the_world"]
