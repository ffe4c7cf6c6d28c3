"""The soak: random operations of a process group, checked one by one, for as long as you like.

    make soak ARGS="--operations 100000 --ranks 2-8"

`plan` draws operations from a seed: operation N of a seed is the same on every rank and in every
run, whatever ran before it, so a failure can be repeated alone. `operations` carries each kind out
by the public functions of `torch.distributed`. Every rank can make the inputs of all others out of
the seed (`memory`), so each checks its own results alone, with numpy, and no check depends on what
it checks. `rank` runs a plan on one rank, with several operations outstanding that are waited for
in an order of its own. The command line is in `__main__`.

No plan can deadlock: all ranks go through it in the same order, so the first operation that has not
ended never waits for a later one.
"""
