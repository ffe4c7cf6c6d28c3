"""PyTorch's own suite for process groups, run test by test on Gloo and on Phalanx.

The suite is `torch.testing._internal.distributed.distributed_test.DistributedTest`, as it comes in
the wheel. `server` is the process that has it imported, for one backend and one world size: it
forks the ranks of a test. `runner` drives servers and collects outcomes, `record` keeps them in
benchmarks/conformance.json and writes benchmarks/conformance.md, or files of their own for other
releases of PyTorch. `__main__` is `make conformance`.
"""
