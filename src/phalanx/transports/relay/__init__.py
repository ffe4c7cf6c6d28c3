"""The relay transport: one process that all ranks can reach forwards their messages, by ZeroMQ.

For hosts that cannot reach each other, behind NATs or firewalls. All bytes go through the process
that runs the relay. They are encrypted, and only processes with the job's key can connect.
`transport` is the transport of one group, with a `peer` for each rank. `connection` is the
connection of a process, which its groups share, and `server` the relay itself. `frames` defines the
protocol, `sockets` sets the options of ZeroMQ, `keys` derives the CURVE keys from the job's key,
and `discovery` starts or finds the relay.
"""

from phalanx.transports.relay.transport import RelayTransport

__all__ = ["RelayTransport"]
