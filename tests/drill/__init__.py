"""Drivers of what `tests/fault` has a few cases of: many deaths, many desyncs, many operations.

    make drill ARGS="kills --count 1000"
    make drill ARGS="desyncs --count 500"
    make drill ARGS="operations --count 10000000"
    make drill ARGS="training --count 200"

`pool` keeps rank processes that carry out one trial after another; one that dies is forked anew.
`calls` has one call of each operation. `kills` and `desyncs` each draw trials from a seed, run them
on the ranks of a pool, and judge what every rank says; `operations` runs small operations for a
long time, and watches memory and descriptors (`leaks`); `training` kills runs of the trainer, and
starts them again. `tables` shows and records results. The command line is in `__main__`.

Trial N of a seed is the same in every run, whatever ran before it, so a failure can be repeated.
"""
