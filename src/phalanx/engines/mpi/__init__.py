"""MPI, through mpi4py: whichever library `mpirun` belongs to, Open MPI or MPICH, with no rebuild.

`library` finds it and says what is missing. `world` has all processes that `mpirun` has started,
and the one thread of this process that calls MPI. `engine` is one group's engine on it.
"""

from phalanx.engines.mpi.engine import MpiEngine
from phalanx.engines.mpi.world import World, the_world

__all__ = ["MpiEngine", "World", "the_world"]
