"""Fault-injection drivers: many kills, mismatches and operations; `tests/fault` has a few cases.

    make faults ARGS="kills --count 1000"
    make faults ARGS="desyncs --count 500"
    make faults ARGS="operations --count 10000000"
    make faults ARGS="training --count 200"
    make faults ARGS=matrix

`pool` keeps rank processes that run one trial after another and replaces those that die. `calls`
has one call of each operation. `kills` and `desyncs` each draw trials from a seed, run them on the
ranks of a pool, and check the exception of every rank. `endurance` runs small operations for a long
time and watches memory and descriptors (`leaks`). `training` kills runs of the trainer and restarts
them. `matrix` runs the cases of `faults` and `fault_*` under `phalanx run` and judges
`phalanx explain`. `tables` shows and records results. The command line is in `__main__`.

Trial N of a seed is the same in every run, regardless of earlier trials, so a failure can be
repeated.
"""
