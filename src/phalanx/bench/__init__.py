"""Measurements: how fast is this machine, against Gloo, Open MPI, MPICH and its own memory.

- `operations`, `elements`: what is measured, the bytes that it has to move, and what it must give.
- `plan`: what the user asked for, checked.
- `systems`: what is compared, how its processes are started and with which settings.
- `rank`, `work`: what one process of a system runs; `torch_rank`, `mpi_rank` are the two kinds.
- `messages`, `process_set`: how the one parent talks to the processes of a system.
- `measure`: the rounds: the systems take turns. `machine`: memory, caches, versions.
- `figures`: the results and their JSON; `table` and `plot` show them.
- `algorithms`: the same for `phalanx bench --algorithms`.

Nothing here imports torch, MPI or matplotlib until it is needed.
"""
