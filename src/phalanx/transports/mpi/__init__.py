"""The MPI transport, through mpi4py: the library of `mpirun`, Open MPI or MPICH, without a rebuild.

`library` finds the MPI library and reports a missing one. `wire` sends and receives through it,
`world` has the only thread that calls it, and `protocol` defines the messages. `transport` is the
transport of one group, with a `peer` for each rank and a `transfer` for each send or receive.
"""

from phalanx.transports.mpi.progress_thread import World, the_world
from phalanx.transports.mpi.protocol import MOST_TEXT
from phalanx.transports.mpi.transport import MpiTransport

__all__ = ["MOST_TEXT", "MpiTransport", "World", "the_world"]
