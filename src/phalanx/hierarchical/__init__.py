"""Groups whose ranks are on several hosts, with the methods of a native group.

Ranks of one host communicate through a native group in shared memory, ranks of different hosts
through a transport. `group` replaces the native group in the backend. `data_movement` and
`reductions` compose each collective of steps in memory and steps between hosts. `execution` runs
the steps, with the limits of every wait: the deadline, Ctrl-C and a broken group. `compression`
sends reductions in fewer bits; `encoding` chooses them, by the links that `bandwidth` measures, and
keeps what is lost. `links` counts the bytes of each link for `phalanx watch`. `messages` has
send and recv, and matches messages with recvs. `fingerprint` describes an operation to the ranks of
other hosts. `failure` detects lost ranks and reports failures on all hosts. The peers of a rank
follow from `topology.Layout`. If all hosts have equally many ranks, each rank communicates with its
counterparts (its rail); otherwise the lowest rank of each host does.
"""

from phalanx.hierarchical.group import HierarchicalGroup, form_group

__all__ = ["HierarchicalGroup", "form_group"]
