"""Probes between hosts: reachability, latency and bandwidth of every pair.

- `probes`: the measurement of one pair, over TCP or between two ranks of one host.
- `agents`: the commands that a host carries out, and the interface that sends them to a host, with
  an implementation in a thread. `ranks` sends them through the store of a job, `ssh` through a
  shell on another machine.
- `links`: the schedule of the pairs, such that no pair disturbs another, the measurements, and the
  findings about them. `methods` has the times of exchanges over a slow link.

The measurements use plain sockets rather than a process group. A group fails as a whole if two of
its ranks do not reach each other, which would leave the other pairs unknown.
"""
