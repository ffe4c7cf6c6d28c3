"""Print the layouts of PyTorch's objects in memory, as its headers have them.

The compiler computes the positions: no library is linked and nothing is run, so the headers may be
those of any version. `phalanx/torch_layouts.py` has the results for the tested versions, and
`tests/unit/test_torch_layouts.py` compares them with the installed one.
"""

from __future__ import annotations

import argparse
import struct
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

# Expressions in C++ by name. The options are those of `phalanx.backend.direct_calls`.
_TENSOR = {
    "object": "offsetof(THPVariable, cdata)",
    "bytes": "sizeof(c10::TensorImpl)",
    "storage": "offsetof(c10::TensorImpl, storage_)",
    "autograd": "offsetof(c10::TensorImpl, autograd_meta_)",
    "version": "offsetof(c10::TensorImpl, version_counter_)",
    "keys": "offsetof(c10::TensorImpl, key_set_)",
    "lazy": "(c10::DispatchKeySet(c10::DispatchKey::Negative)"
    " | c10::DispatchKeySet(c10::DispatchKey::Conjugate)).repr_",
    "count": "offsetof(c10::VariableVersion::VersionCounter, version_)",
    "storage_bytes": "sizeof(c10::StorageImpl)",
    "data": "offsetof(c10::StorageImpl, data_ptr_)",
}
_OPTIONS = {
    "BarrierOptions": "",
    "BroadcastOptions": "root",
    "AllreduceOptions": "op",
    "ReduceOptions": "root op",
    "AllgatherOptions": "",
    "GatherOptions": "root",
    "ScatterOptions": "root",
    "ReduceScatterOptions": "op",
    "AllToAllOptions": "",
}
_FIELDS = {
    "timeout": "offsetof(c10d::{0}, timeout)",
    "async_op": "offsetof(c10d::{0}, asyncOp)",
    "root": "offsetof(c10d::{0}, rootRank)",
    "op": "offsetof(c10d::{0}, reduceOp) + offsetof(c10d::ReduceOp, op_)",
}
_PROGRAM = """
#include <Python.h>
#include <cstddef>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

__attribute__((section("layout"), used)) constexpr long positions[] = {%s};
"""


def compute_layout(include: Path) -> dict[str, Any]:
    """Return the layout of tensors, and that of each class of options, by PyTorch's headers.

    Args:
        include: PyTorch's directory of headers, such as `torch/include`.
    """
    expressions = list(_TENSOR.values())
    for name, fields in _OPTIONS.items():
        expressions += [_FIELDS[each].format(name) for each in _list_fields(fields)]
    numbers = iter(_compile(include, expressions))
    tensor = {name: next(numbers) for name in _TENSOR}
    options = {
        name: {field: next(numbers) for field in _list_fields(fields)}
        for name, fields in _OPTIONS.items()
    }
    return {"tensor": tensor, "options": options}


def _list_fields(more: str) -> list[str]:
    return ["timeout", "async_op", *more.split()]


def _compile(include: Path, expressions: list[str]) -> list[int]:
    """Return the values of constant expressions in C++, each of up to 64 bits."""
    with tempfile.TemporaryDirectory() as directory:
        source, program = Path(directory, "layout.cpp"), Path(directory, "layout.o")
        data = Path(directory, "layout")
        listed = ", ".join(f"static_cast<long>({each})" for each in expressions)
        source.write_text(_PROGRAM % listed)
        folders = [include, include / "torch/csrc/api/include", sysconfig.get_path("include")]
        # Most of the fields are private.
        options = ["-std=c++20", "-w", "-fno-access-control", "-DUSE_DISTRIBUTED", "-c"]
        command = ["g++", *options, *(f"-I{each}" for each in folders), str(source)]
        subprocess.run([*command, "-o", str(program)], check=True)
        copy = ["objcopy", "-O", "binary", "--only-section=layout", str(program), str(data)]
        subprocess.run(copy, check=True)
        return list(struct.unpack(f"={len(expressions)}q", data.read_bytes()))


def main() -> None:
    """Print the layouts of the headers that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("include", type=Path, nargs="+", help="a directory such as torch/include")
    for include in parser.parse_args().include:
        print(f"{include}:")
        for name, layout in compute_layout(include).items():
            print(f"  {name}: {layout}")


if __name__ == "__main__":
    main()
