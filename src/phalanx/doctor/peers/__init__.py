"""Probes between hosts: reachability, latency and bandwidth of every pair.

- `tcp_probe`: measurement of one pair over TCP. `memory`: measurement of two ranks of one host.
- `worker`: the commands that a host carries out. `agents`: the interface that sends commands to a
  host, with an implementation in a thread. `ranks` sends them through the store of a job, `ssh`
  through a shell on another machine.
- `round_robin`: the schedule of the pairs, such that no pair disturbs another.
- `links`: the measurements and the findings about them; `matrix` prints the measurements.

The measurements use plain sockets rather than a process group. A group fails as a whole if two of
its ranks do not reach each other, which would leave the other pairs unknown.
"""
