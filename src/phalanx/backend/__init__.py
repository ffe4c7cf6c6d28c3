"""The backend "phalanx" of `torch.distributed`.

The process group is one class in layers. `membership` subclasses PyTorch's `ProcessGroup` and has
everything but the operations. The layers above it are `messages` (send and recv), `execution` (the
execution of a collective), `collectives` (those on lists of tensors) and `process_group` (those on
single tensors, the coalesced ones, and the creation of a group). These layers check arguments
(`operands`, `options`). They run each operation in the caller's thread, or in the group's threads
(`progress`) with a work and its futures (`work`). `cuda` handles CUDA tensors. `multihost` sets up
a group that spans hosts. `instrumentation` shows operations to PyTorch's profiler and to dispatch
modes.

When the core reports a failure, `failure` describes it with the user's `call_site`, and
`peer_state` adds information from the flight recorders of the other ranks. `deadlock_detector`
detects deadlocks across groups, also during the waits for works.

`shared_tensors` creates tensors that peers can access. `lifetime` handles groups at process exit
and in forked children, `torch_patches` patches functions of PyTorch that refuse other backends, and
`replace` substitutes "phalanx" for other backends on request.
"""
