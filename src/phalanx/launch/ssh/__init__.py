"""`phalanx run --hosts`: a launcher on each of many hosts, started over ssh from one shell.

`places` reads which hosts, `plan` the other options; `connection` is ssh to one of them, `wire` is
what goes through it; `job` starts them all, gathers what they write, stops them, and tells whose
failure was the first. The other end, on each host, is `phalanx.cli.host`. See
docs/design/launch.md for why.
"""
