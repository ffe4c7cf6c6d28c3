"""The backend "phalanx" of `torch.distributed`.

`process_group` has the collectives of our subclass of PyTorch's `ProcessGroup`; it stands on
`messages` (send and recv), and that on `membership`, which holds all that the base class asks for
besides operations. They check arguments (`operands`, `dtypes`), and run each operation in the
caller's thread or hand it to the group's `progress` threads, as `work` objects. When the core
reports that something went wrong, `failure` says it in words, with the user's `call_site`.
`lifetime` looks after groups at the end of their process and in forked children. `replace` puts
"phalanx" in the place of other backends where the user wants that.
"""
