"""A group whose ranks are on several hosts, with the methods of a native group.

Inside of a host there is the native group, between hosts an engine. `group` is what the backend
holds in the place of the native one; `collectives` composes each operation of steps in memory and
steps between hosts, `messages` has send and recv. `links` sends and receives with the limits that
every wait has here: deadline, Ctrl-C, a group that is broken; `story` is how ranks of other hosts
hear why. Whom a rank talks to follows from `topology.Layout`: where all hosts have equally many
ranks each one with its counterparts (its rail), else the lowest rank of each host.
"""

from phalanx.hosts.group import HostsGroup

__all__ = ["HostsGroup"]
