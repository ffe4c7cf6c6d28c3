"""PyTorch's tests of its distributed libraries, run on Gloo and on Phalanx in Gloo's place.

The tests are those of DTensor, tensor parallelism, FSDP, checkpoints, device meshes, `Join`,
ZeroRedundancyOptimizer, DDP's hooks, functional collectives and pipelines. PyTorch's wheel has only
their helpers, so their files come from a checkout of PyTorch's source, which `source` examines.
`scope` lists the files, and the differences with their reasons. `server` imports one file and forks
the ranks of each test, `groups` records which process groups they form, `runner` goes from file to
file. `record` keeps the outcomes in benchmarks/conformance_libraries.json and writes
benchmarks/conformance_libraries.md. `__main__` is `make conformance-libraries`.
"""
