"""Benchmarks of Phalanx against Gloo, Open MPI, MPICH and the memory bandwidth of this machine.

- `operations`: the measured operations, their memory traffic, inputs and expected results.
- `plan`: the validated request of the user.
- `systems`: the compared systems, the commands that start their processes, and their settings.
- `rank`, `timed_operation`: the program of one process of a system; `torch_rank` and `mpi_rank`
  implement the two kinds of systems.
- `messages`, `process_pool`: communication between the parent and the processes of a system.
- `measurement`: the rounds, in which the systems take turns. `machine`: memory, caches, versions.
- `results`: the results and their JSON; `table` and `plot` show them.

With `phalanx bench --algorithms`, the systems run the all-reduces of `phalanx.parallel` beside
their own, for several world sizes one after another. The page "All-reduce algorithms" of the
documentation interprets the results.

The processes of MPI do not import torch, and nothing here imports MPI or matplotlib until it is
needed.
"""
