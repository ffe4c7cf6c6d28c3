"""Small operating system utilities that every layer may use.

`authentication` is a handshake of two processes that share a key, `curve` secures ZeroMQ sockets,
`host_identity` identifies the host and the namespaces of a process, `polling` repeats attempts with
growing pauses, and `signals` names signals. Nothing here imports a layer above `errors` and `env`.
"""
