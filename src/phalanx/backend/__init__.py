"""The backend "phalanx" of `torch.distributed`.

The process group is one class in layers. `membership` subclasses PyTorch's `ProcessGroup` and has
everything but the operations. On it build `messages` (send and recv), `running` (the execution of a
collective), `collectives` (those on lists of tensors) and `process_group` (those on single tensors,
the coalesced ones, and the creation of a group). These layers check arguments (`operands`,
`dtypes`, `options`). They run each operation in the caller's thread, or in the group's `progress`
threads with a `work` object and its `futures`. `sparse` and `cuda` handle tensors of their kind.
When the core reports a failure, `failure` describes it with the user's `call_site`, and `witness`
adds information from the flight recorders of the other ranks. `ring` detects deadlocks across groups,
`waiting` shows it the waits for works, and `abort` is `phalanx.abort`.

Besides, `shared` makes tensors that peers can reach, `profiling` reports operations to PyTorch's
profiler, and `operators` shows them to dispatch modes. `lifetime` handles groups at process exit
and in forked children, `edges` patches functions of PyTorch that refuse other backends, and
`replace` substitutes "phalanx" for other backends on request.
"""
