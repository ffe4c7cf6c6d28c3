"""PyTorch's own RPC suite, run test by test on PyTorch's RPC (TensorPipe) and on `phalanx.rpc`.

The suite consists of `rpc`, `nn.api` and `ddp_under_dist_autograd_test` in the wheel's package
`torch.testing._internal.distributed`. `scope` lists the parts that are out of scope for
`phalanx.rpc`, and the deliberate differences. `substitution` replaces PyTorch's modules by
`phalanx.rpc`. `server` imports the suite and forks the workers of each test. `record` keeps the
outcomes in benchmarks/conformance_rpc.json and writes benchmarks/conformance_rpc.md. `__main__` is
`make conformance-rpc`.
"""
