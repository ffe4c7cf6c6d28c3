"""`phalanx run --hosts`: a launcher on each of many hosts, started over ssh from one shell.

`plan` parses the list of hosts and the other options. `connection` is the ssh connection to one
host and `protocol` its messages. `job` starts all hosts, gathers their output, stops them and
reports the first failure. The remote end, on each host, is
`phalanx.cli.remote_launcher`. The design note on launching gives the reasons.
"""
