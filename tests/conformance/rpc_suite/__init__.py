"""PyTorch's own RPC suite, run test by test on PyTorch's RPC (TensorPipe) and on `phalanx.rpc`.

The suite is what the wheel has in `torch.testing._internal.distributed`: `rpc`, `nn.api` and
`ddp_under_dist_autograd_test`. `scope` says which parts of it are outside the scope of
`phalanx.rpc`, and which differences are deliberate. `substitution` puts `phalanx.rpc` in the place
of PyTorch's modules. `server` imports the suite and forks the workers of each test, `record` keeps
the outcomes in benchmarks/conformance_rpc.json and writes benchmarks/conformance_rpc.md.
`__main__` is `make conformance-rpc`.
"""
