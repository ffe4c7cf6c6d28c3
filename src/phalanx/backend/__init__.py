"""The backend "phalanx" of `torch.distributed`.

`process_group` has the class of the groups, with the methods that PyTorch calls. A group consists
of three parts: the membership of this rank (`membership`) with the group's threads (`threads`), an
executor of collectives (`execution`), and messages (`messages`). The methods check arguments
(`collectives`, `operands`, `options`). Before most of them stands a native method, which runs
blocking operations on plain tensors at once (`direct_calls`), or keeps them for many runs
(`prepared`). The parts run each operation in the caller's thread, or
in the group's threads with a work and its futures (`work`). `cuda` handles CUDA tensors.
`instrumentation` shows operations to PyTorch's profiler and to dispatch modes.

`formation` forms the native group on which a process group stands. Two modules change it later:
`rank_changes` continues without ranks that are lost, or with `newcomers` in their places, and
`reconfiguration` with ranks that the caller names.

When the core reports a failure, `failure` describes it with the user's `call_site`, and
`peer_state` adds information from the flight recorders of the other ranks. `deadlock_detector`
detects deadlocks across groups, also during the waits for works.

`torch_patches` patches functions of PyTorch that refuse other backends, and `replace` substitutes
"phalanx" for other backends on request.
"""
