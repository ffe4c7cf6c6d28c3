"""The soak test: random operations of a process group, each of them checked.

    make soak ARGS="--operations 100000 --nproc-per-node 2-8"

`plan` draws operations from a seed: operation N of a seed is the same on every rank and in every
run, regardless of earlier operations, so a failure can be repeated alone. `operations` and
`messages` run each kind by the public functions of `torch.distributed`. Every rank can compute the
inputs of all others from the seed (`memory`), so each rank checks its own results without
communication. `rank` runs a plan on one rank, with several pending operations that it waits for in
its own random order. The command line is in `__main__`.

No plan can deadlock: all ranks run it in the same order, so the first unfinished operation never
waits for a later one.
"""
