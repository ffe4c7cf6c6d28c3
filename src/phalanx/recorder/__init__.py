"""Records that ranks and launchers write about themselves: always, in their job's directory.

Every rank keeps a flight recorder: a file in its job's directory (`job_directory`) to which the
native core writes each operation. The file outlives all processes of the job. `flight_recorder`
creates it and, with `exception_hook`, adds data that the core does not have: training progress and
how the process ends. `torch_recorder` keeps PyTorch's record of groups on other backends. A
launcher writes its log with `launcher_log_writer`.

`phalanx.diagnosis` reads all of it. Here only `recorder_file` reads, for the last process of a job
without a launcher, which removes the directory of a job that has ended well.
"""
