"""The MPI transport, through mpi4py: the library of `mpirun`, Open MPI or MPICH, without a rebuild.

`messages` loads the MPI library, defines the messages, and sends and receives them through the
library. `progress_thread` has the only thread that calls it.
`transport` is the transport of one group.
"""

from phalanx.transports.mpi.messages import MAX_EAGER_BYTES
from phalanx.transports.mpi.progress_thread import MpiProgressThread, get_progress_thread
from phalanx.transports.mpi.transport import MpiTransport

__all__ = ["MAX_EAGER_BYTES", "MpiProgressThread", "MpiTransport", "get_progress_thread"]
