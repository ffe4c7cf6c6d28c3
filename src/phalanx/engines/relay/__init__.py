"""The relay: one rank that all others reach, by ZeroMQ, and that passes on what they say.

For hosts that can't reach each other, behind NATs or firewalls. All bytes go through the rank that
has the relay, encrypted and from processes that have the job's key. `engine` is a group's end,
`line` a process's connection, which its groups share, `server` the relay itself. `words` is what
they say to each other, `keys` how the job's key becomes those of CURVE, `place` where the relay is.
"""

from phalanx.engines.relay.engine import RelayEngine

__all__ = ["RelayEngine"]
