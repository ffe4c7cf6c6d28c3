"""The relay transport: one process that all ranks can reach forwards their messages, by ZeroMQ.

For hosts that cannot reach each other, behind NATs or firewalls. All bytes go through the process
that runs the relay. They are encrypted, and only processes with the job's key can connect.
`transport` is the transport of one group. `connection` is the connection of a process, which its
groups share, and `server` the relay itself. `frames` defines the protocol, `sockets` sets the
options and keys of ZeroMQ's sockets, and `discovery` starts or finds the relay.
"""

from phalanx.transports.relay.transport import RelayTransport

__all__ = ["RelayTransport"]
