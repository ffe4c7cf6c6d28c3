"""Operating system utilities that every layer may use.

- `authentication`: a handshake of two processes that share a key.
- `console`: consoles of rich; their colours, and whether they are redrawn.
- `curve`: ZeroMQ sockets that such processes secure with CURVE.
- `processes`: child processes, process groups, pidfds, identities, states, exit codes and signals.
- `extras`: the optional packages, and the command that installs them.
- `ssh`: programs on other hosts, connected through ssh.
- `host_identity`: the host and the namespaces of a process, and the proof that two share memory.
- `notebook`: outputs of a notebook's cell that are replaced in place, from the kernel and ranks.
- `pickling`: functions by value, with the locations of their source.
- `suggestions`: the word that is probably meant by a mistyped one.
- `polling`: attempts with growing pauses, and an eventfd by which threads wake each other.

Nothing here imports a layer above `errors` and `env`.
"""
