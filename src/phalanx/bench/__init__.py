"""Benchmarks of Phalanx against Gloo, Open MPI, MPICH and the memory bandwidth of this machine.

- `operations`, `elements`: the measured operations, their memory traffic and expected results.
- `plan`: the validated request of the user.
- `systems`: the compared systems, the commands that start their processes, and their settings.
- `rank`, `work`: the program of one process of a system; `torch_rank` and `mpi_rank` implement the
  two kinds of systems.
- `messages`, `process_set`: communication between the parent and the processes of a system.
- `measure`: the rounds, in which the systems take turns. `machine`: memory, caches, versions.
- `figures`: the results and their JSON; `table` and `plot` show them.
- `algorithms`: the results of `phalanx bench --algorithms`.

Nothing here imports torch, MPI or matplotlib until it is needed.
"""
