"""The layouts of PyTorch's objects in memory, by its minor version.

`tools/torch_layouts.py` computes them from PyTorch's headers. Direct calls use them once they have
been confirmed in the process, by objects whose fields have known values (`direct_calls`).
"""

_TENSOR_2_13 = {
    "object": 16,
    "bytes": 176,
    "storage": 16,
    "autograd": 24,
    "version": 40,
    "keys": 168,
    "lazy": 3 << 31,
    "count": 16,
    "storage_bytes": 96,
    "data": 16,
}
_TENSOR_2_11 = {**_TENSOR_2_13, "bytes": 184, "keys": 176, "lazy": 3 << 32}

TENSORS = {
    (2, 11): _TENSOR_2_11,
    (2, 12): _TENSOR_2_11,
    (2, 13): _TENSOR_2_13,
    (2, 14): _TENSOR_2_13,
}
"""Positions in bytes, and sizes.

In the object of Python, that of the pointer to the C++ object (`object`). In that object, of
`bytes`: the pointers to the storage, to autograd's state and to the counter of versions, and the
bits of keys, of which `lazy` are those of negative and conjugate views. In the counter, its count.
In the storage, of `storage_bytes`, the pointer to the data.
"""

OPTIONS = {
    "BarrierOptions": {"timeout": 24, "async_op": 35},
    "BroadcastOptions": {"timeout": 16, "async_op": 24, "root": 0},
    "AllreduceOptions": {"timeout": 32, "async_op": 40, "op": 16},
    "ReduceOptions": {"timeout": 48, "async_op": 56, "root": 32, "op": 16},
    "AllgatherOptions": {"timeout": 0, "async_op": 8},
    "GatherOptions": {"timeout": 8, "async_op": 16, "root": 0},
    "ScatterOptions": {"timeout": 8, "async_op": 16, "root": 0},
    "ReduceScatterOptions": {"timeout": 32, "async_op": 40, "op": 16},
    "AllToAllOptions": {"timeout": 0, "async_op": 8},
}
"""Positions in bytes by class of options; the same in all versions that are tested."""
