"""Readers of a job's records: `phalanx explain`, `watch` and `trace`.

`job_reader` turns a job's directory into the plain objects of `model`, with `flight_recorders` and
`torch_jobs`, which also reads dumps of PyTorch's Flight Recorder from elsewhere. `exit_reasons`
determines how each rank ended, and `wait_for_graph` which rank waits for which. From them, `kinds`
determines the ranks at fault and describes the cause, and `explain` adds a table of the ranks.
`watch` evaluates a live view, which `watch_table` renders, and `trace` writes a timeline. Both use
`wait_time`, the time that a rank spent waiting for others.

Readers never disturb the job and validate everything that they read. The backend uses only `model`,
`flight_recorders` and `formatting`, to describe the peers of an operation that fails.
"""
