"""PyTorch's own suite for process groups, run test by test on Gloo and on Phalanx.

The suite is `torch.testing._internal.distributed.distributed_test.DistributedTest` of the wheel.
`server` is a process that imports the suite for one backend and one world size, and forks the ranks
of each test. `runner` drives servers and collects outcomes. `record` keeps the outcomes in
benchmarks/conformance.json and writes benchmarks/conformance.md, or separate files for other
releases of PyTorch. `__main__` is `make conformance`.
"""
