"""`phalanx bench --algorithms`: the all-reduces of `phalanx.parallel` beside each backend's own.

It is the measurement of everything else, with several ways to do one operation on the processes of
each system, for several world sizes one after another. `record` stores the reports, `table` and
`plot` show them. docs/algorithms.md says what to learn from them.
"""
