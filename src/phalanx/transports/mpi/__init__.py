"""The MPI transport, through mpi4py: the library of `mpirun`, Open MPI or MPICH, without a rebuild.

`library` finds the MPI library and reports a missing one. `messages` sends and receives through it,
`progress_thread` has the only thread that calls it, and `protocol` defines the messages.
`transport` is the transport of one group, with a `peer` for each rank and a `transfer` for each
send or receive.
"""

from phalanx.transports.mpi.progress_thread import MpiProgressThread, get_progress_thread
from phalanx.transports.mpi.protocol import MAX_EAGER_BYTES
from phalanx.transports.mpi.transport import MpiTransport

__all__ = ["MAX_EAGER_BYTES", "MpiProgressThread", "MpiTransport", "get_progress_thread"]
