"""The backend "phalanx" of `torch.distributed`.

One class in layers: `membership` subclasses PyTorch's `ProcessGroup` and has all that it asks for
besides operations; on it stand `messages` (send and recv), `running` (how a collective runs),
`collectives` (those on lists of tensors) and `process_group` (those on single tensors, coalesced
ones, and what makes a group). They check arguments (`operands`, `dtypes`, `options`), and run each
operation in the caller's thread or hand it to the group's `progress` threads, as `work` objects
with `futures`; `sparse` and `cuda` take the tensors of their kind. When the core reports that
something went wrong, `failure` says it in words, with the user's `call_site`, and `witness` adds
what the black boxes of the other ranks tell. `ring` finds ranks that wait for each other in several
groups, `waiting` shows it the waits for works, and `abort` is `phalanx.abort`.

Beside them: `shared` makes tensors that peers can reach, `profiling` tells PyTorch's profiler,
`lifetime` looks after groups at the end of their process and in forked children, `edges` covers
functions of PyTorch that refuse other backends, and `replace` puts "phalanx" in the place of those
where the user wants that.
"""
