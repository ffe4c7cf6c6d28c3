"""Small operating system utilities that every layer may use.

`host_identity` identifies the host and the namespaces of a process, `polling` repeats attempts
with growing pauses, and `signals` names signals. Nothing here imports a layer above `errors` and
`env`.
"""
