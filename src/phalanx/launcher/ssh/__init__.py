"""`phalanx run --hosts`: a launcher on each of many hosts, started over ssh from one shell.

`plan` parses the list of hosts and the other options. `connection` is the ssh connection to one
host. `job` starts all hosts, gathers their output, stops them and reports the first failure. The
remote end, on each host, is `phalanx.cli.remote_launcher`. The design note on launching gives the
reasons.

The local launcher sends the message `start` once, then `stop` with a signal, and empty lines as
heartbeats. The host sends `hello`, `output` and `end`. The environment, the arguments and the job's
secrets therefore appear on no command line and need no shell quoting.
"""

HEARTBEAT_SECONDS = 5.0
"""Seconds between two heartbeats of the local launcher."""
HEARTBEAT_TIMEOUT = 60.0
"""Seconds without a heartbeat after which a host considers the local launcher lost."""
