"""The MPI engine, through mpi4py: the library of `mpirun`, Open MPI or MPICH, without a rebuild.

`library` finds the MPI library and reports a missing one. `wire` sends and receives through it,
`world` has the only thread that calls it, and `protocol` defines the messages. `engine` is the
engine of one group, with a `peer` for each rank and a `transfer` for each send or receive.
"""

from phalanx.engines.mpi.engine import MpiEngine
from phalanx.engines.mpi.protocol import MOST_TEXT
from phalanx.engines.mpi.world import World, the_world

__all__ = ["MOST_TEXT", "MpiEngine", "World", "the_world"]
