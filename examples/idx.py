"""Read IDX files, the format of MNIST (http://yann.lecun.com/exdb/mnist/).

A file consists of two zero bytes, one byte for the element type, one byte for the number of
dimensions, the dimensions as big-endian 32-bit integers, and the elements in big-endian and
row-major order.
"""

import gzip
import math
import struct
import zlib
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from phalanx import UsageError

__all__ = ["load_mnist", "read_idx"]

_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: "i2", 0x0C: "i4", 0x0D: "f4", 0x0E: "f8"}
_GZIP = b"\x1f\x8b"


def read_idx(path: str | PathLike[str]) -> Tensor:
    """Return the contents of an IDX file, which may be compressed by gzip.

    The first bytes of the file determine whether it is compressed.

    Args:
        path: The path of the file. The whole file is read into memory.

    Returns:
        A tensor with the shape and dtype of the file: uint8, int8, int16, int32, float32 or
        float64.

    Raises:
        UsageError: The file is missing or unreadable, is not in IDX format, or does not have the
            length that its header gives. The message names the file.

    Example:
        >>> read_idx("data/t10k-labels-idx1-ubyte.gz").shape
        torch.Size([10000])
    """
    content = _read(Path(path))
    dtype, shape = _header(path, content)
    start, expected = 4 + 4 * len(shape), math.prod(shape) * dtype.itemsize
    if len(content) - start != expected:
        state = "truncated" if len(content) - start < expected else "followed by trailing bytes"
        raise UsageError(
            f"{path}: {state}: {len(content) - start} bytes of elements found, expected "
            f"{expected} for {dtype.newbyteorder('=').name}{list(shape)}: download the file again"
        )
    elements = np.frombuffer(content, dtype, offset=start).reshape(shape)
    return torch.from_numpy(elements.astype(dtype.newbyteorder("=")))


def load_mnist(directory: str | PathLike[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the images and labels of each part of MNIST in a directory.

    Args:
        directory: The directory of the files, which have their usual names, such as
            `t10k-images-idx3-ubyte` or `train-labels-idx1-ubyte.gz`.

    Returns:
        A dict with "train", "t10k" or both. The values are pairs of images, uint8 [n, height,
        width], and labels, int64 [n].

    Raises:
        UsageError: The directory has neither part, a part lacks its labels or images, or the
            content of a file does not match its name.

    Example:
        >>> images, labels = load_mnist("data")["train"]
        >>> images.shape, images.dtype
        (torch.Size([60000, 28, 28]), torch.uint8)
    """
    parts = {}
    for part in ("train", "t10k"):
        images = _find_file(directory, f"{part}-images", "idx3-ubyte")
        labels = _find_file(directory, f"{part}-labels", "idx1-ubyte")
        if images and labels:
            parts[part] = _load_part(images, labels)
        elif images or labels:
            missing = f"{part}-labels-idx1-ubyte" if images else f"{part}-images-idx3-ubyte"
            raise UsageError(
                f"{images or labels} found, but no {missing} or {missing}.gz beside it: add it"
            )
    if not parts:
        raise UsageError(
            f"{directory}: no MNIST files found, expected train-images-idx3-ubyte and "
            "train-labels-idx1-ubyte, or the same of t10k, plain or .gz"
        )
    return parts


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(_GZIP) else content
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file, expected an IDX file: check the path") from None
    except EOFError:
        raise UsageError(f"{path}: truncated: the compressed data ends early") from None
    except (OSError, zlib.error) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error


def _header(path: str | PathLike[str], content: bytes) -> tuple[np.dtype[np.generic], list[int]]:
    magic = content[:4]
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _DTYPES or magic[3] == 0:
        raise UsageError(
            f"{path}: not an IDX file: it starts with bytes [{magic.hex(' ')}], expected "
            f"[00 00 type dimensions], type one of {', '.join(f'{code:02x}' for code in _DTYPES)}, "
            "at least one dimension"
        )
    dimensions = magic[3]
    if len(content) < 4 + 4 * dimensions:
        raise UsageError(
            f"{path}: truncated: {len(content)} bytes found, expected at least "
            f"{4 + 4 * dimensions} for a header of {dimensions} dimensions: download the file again"
        )
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    return np.dtype(">" + _DTYPES[magic[2]]), list(shape)


def _find_file(directory: str | PathLike[str], stem: str, suffix: str) -> Path | None:
    names = (f"{stem}{dot}{suffix}{end}" for dot in "-." for end in ("", ".gz"))
    paths = (Path(directory) / name for name in names)
    return next((path for path in paths if path.is_file()), None)


def _load_part(images_path: Path, labels_path: Path) -> tuple[Tensor, Tensor]:
    images, labels = read_idx(images_path), read_idx(labels_path)
    for path, tensor, dimensions in ((images_path, images, 3), (labels_path, labels, 1)):
        if tensor.dtype != torch.uint8 or tensor.dim() != dimensions:
            raise UsageError(
                f"{path}: {tensor.dtype}{list(tensor.shape)} found, expected uint8 with "
                f"{dimensions} dimension{'s' * (dimensions > 1)}: is it a different file that was "
                "renamed?"
            )
    if len(images) != len(labels):
        raise UsageError(
            f"{len(images)} images in {images_path} but {len(labels)} labels in {labels_path}, "
            "expected as many of each: they belong to different files"
        )
    return images, labels.long()
