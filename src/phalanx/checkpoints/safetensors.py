"""The safetensors format: https://github.com/huggingface/safetensors (README, "Format").

A file consists of eight bytes with the length of the header, the header in JSON, and the bytes of
the tensors. This module is used instead of the safetensors library for two reasons: a save hashes
the bytes while it writes them, and a load parses the buffer that it has verified, without a copy.
The tests read the files of this module with the library, and vice versa.
"""

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoints.files import ContentError, byte_view

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C64": "complex64",
}
#: The format's name of each torch dtype that it supports.
DTYPES: dict[torch.dtype, str] = {getattr(torch, name): key for key, name in _TORCH_NAMES.items()}
_DTYPES = {key: dtype for dtype, key in DTYPES.items()}
# A cache line in bytes. torch aligns its own tensors to it, and some of its code relies on that.
_ALIGNMENT = 64


def itemsize(name: str) -> int:
    """Return the size in bytes of an element, by the format's name of the dtype."""
    return _DTYPES[name].itemsize


def build_header(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[str]]:
    """Return the header of a file with these tensors, and the order of their data.

    The format allows no gaps. Tensors that fill whole cache lines come first, so that they and the
    next one start at a cache line. Otherwise wider elements come first, so that every tensor is
    aligned to the size of its elements.
    """

    def sort_key(name: str) -> tuple[bool, int, str]:
        tensor = tensors[name]
        is_ragged = tensor.numel() * tensor.element_size() % _ALIGNMENT != 0
        return is_ragged, -tensor.element_size(), name

    order = sorted(tensors, key=sort_key)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in order:
        tensor = tensors[name]
        stop = start + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text, order


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, without a copy if it is contiguous on the CPU."""
    contiguous = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return byte_view(contiguous.reshape(-1).view(torch.uint8))


def read_tensors(buffer: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a file by name, as views of the buffer, or as copies if not aligned.

    Args:
        buffer: The content of the file, uint8[n].

    Raises:
        ContentError: The content is not in the safetensors format.
    """
    content = byte_view(buffer)
    if len(content) < 8:
        raise ContentError(f"{len(content)} bytes, too few for a safetensors header")
    (size,) = struct.unpack("<Q", content[:8])
    data = 8 + size
    if data > len(content):
        raise ContentError(f"a header of {size} bytes in a file of {len(content)}")
    try:
        header = json.loads(bytes(content[8:data]))
        header.pop("__metadata__", None)
        return {name: _read_tensor(content, data, name, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ContentError(f"not a safetensors header: {error}") from error


def _read_tensor(content: memoryview, data: int, name: str, entry: dict[str, Any]) -> Tensor:
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    start, stop = (data + int(offset) for offset in entry["data_offsets"])
    length = math.prod(shape) * dtype.itemsize
    in_file = data <= start <= stop <= len(content)
    if not in_file or stop - start != length or min(shape, default=0) < 0:
        raise ContentError(f"{name}: bytes {start} to {stop} for {entry['dtype']}{list(shape)}")
    if start == stop:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # A separate storage: `torch.set_rng_state`, for example, reads a storage from its beginning.
    elements = torch.frombuffer(content[start:stop], dtype=torch.uint8)
    if start % _ALIGNMENT:
        elements = elements.clone()
    return elements.view(dtype).view(shape)
