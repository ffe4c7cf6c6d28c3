"""The backend "phalanx" of `torch.distributed`.

`process_group` is the subclass of PyTorch's `ProcessGroup` and all that depends on that base class;
it checks arguments (`operands`, `dtypes`), and runs each operation in the caller's thread or hands
it to the group's `progress` threads, as `work` objects. When the core reports that something went
wrong, `failure` says it in words, with the user's `call_site`. `lifetime` looks after groups at the
end of their process and in forked children.
"""
