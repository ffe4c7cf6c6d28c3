"""Records of the activity of ranks: always written, read on demand.

Every rank keeps a flight recorder: a file in its job's directory (`job_directory`) to which the
native core writes each operation. The file outlives all processes of the job. `recorder` creates it
and, with `exception_hook`, adds data that the core does not have: training progress and how the
process ends. A launcher writes its log with `launcher_log_writer`. The backend and the launchers
use only these modules, `recorder_reader`, which reads one flight recorder, `model`, the plain
objects that describe ranks, and `escape`, which makes text safe for a terminal.

The other modules read. `job_reader` turns a job's directory into objects of `model`. `exit_reasons`
determines how each rank ended, and `wait_for_graph` which rank waits for which. From them,
`diagnosis` determines the ranks at fault and describes the cause, and `explain` adds a table of the
ranks. `watch` evaluates a live view, which `watch_table` renders, and `trace` writes a timeline.
Both use `wait_time`, the time that a rank spent waiting for others.
Readers never disturb the job and validate everything that they read.
"""
