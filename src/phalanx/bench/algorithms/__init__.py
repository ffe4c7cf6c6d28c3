"""`phalanx bench --algorithms`: the all-reduces of `phalanx.parallel` beside each backend's own.

The measurement is that of `phalanx.bench`, but with several algorithms for one operation on the
processes of each system, and for several world sizes one after another. `record` stores the
reports, `table` and `plot` show them. docs/algorithms.md interprets the results.
"""
