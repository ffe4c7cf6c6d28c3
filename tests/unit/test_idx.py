"""The reader `examples/idx.py` on files written with `struct`, and on MNIST if it is available."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.idx import load_mnist, read_idx
from phalanx.errors import UsageError
from tests.seeds import fresh_seed

TYPES = {
    0x08: ("B", torch.uint8),
    0x09: ("b", torch.int8),
    0x0B: ("h", torch.int16),
    0x0C: ("i", torch.int32),
    0x0D: ("f", torch.float32),
    0x0E: ("d", torch.float64),
}


def idx(code: int, shape: tuple[int, ...], values: list[float]) -> bytes:
    letter, _ = TYPES[code]
    header = struct.pack(f">BBBB{len(shape)}I", 0, 0, code, len(shape), *shape)
    return header + struct.pack(f">{len(values)}{letter}", *values)


def write_mnist(directory: Path, part: str, n: int, end: str = "") -> tuple[list[int], list[int]]:
    generator = np.random.default_rng(fresh_seed())
    pixels = generator.integers(0, 256, n * 28 * 28).tolist()
    labels = generator.integers(0, 10, n).tolist()
    pack = gzip.compress if end else bytes
    (directory / f"{part}-images-idx3-ubyte{end}").write_bytes(pack(idx(8, (n, 28, 28), pixels)))
    (directory / f"{part}-labels-idx1-ubyte{end}").write_bytes(pack(idx(8, (n,), labels)))
    return pixels, labels


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("code", TYPES)
def test_every_dtype(tmp_path: Path, code: int, compressed: bool) -> None:
    dtype = TYPES[code][1]
    low, high = (0, 256) if code == 8 else (-128, 128)
    values = np.random.default_rng(fresh_seed()).integers(low, high, 2 * 3 * 5)
    if code == 0x0C:
        values *= 2**20
    content = idx(code, (2, 3, 5), values.tolist())
    # The first bytes of the file count, not its name.
    path = tmp_path / "numbers"
    path.write_bytes(gzip.compress(content) if compressed else content)
    read = read_idx(path)
    assert read.dtype == dtype
    assert read.tolist() == values.reshape(2, 3, 5).tolist()


@pytest.mark.parametrize("shape", [(0,), (1,), (4, 0, 2), (2, 1, 1, 3)])
def test_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(idx(0x0B, shape, list(range(int(np.prod(shape))))))
    assert read_idx(str(path)).tolist() == np.arange(np.prod(shape)).reshape(shape).tolist()


def test_tensor_is_writable(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(idx(8, (2,), [1, 2]))
    assert read_idx(path).add_(1).tolist() == [2, 3]


GOOD = idx(0x0C, (2, 3), [1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD[:-1], r"truncated: 23 bytes of elements found, expected 24 for int32\[2, 3\]"),
        (GOOD + b"x", "trailing bytes: 25 bytes of elements found, expected 24"),
        (GOOD[:9], "truncated: 9 bytes found, expected at least 12 for a header of 2 dimensions"),
        (GOOD[:2], r"not an IDX file: it starts with bytes \[00 00\]"),
        (b"", r"not an IDX file: it starts with bytes \[\]"),
        (b"PK\x03\x04" + GOOD, r"not an IDX file: it starts with bytes \[50 4b 03 04\]"),
        (b"\0\0\x0a\x01" + GOOD, r"starts with bytes \[00 00 0a 01\].* type one of 08, 09, 0b"),
        (b"\0\0\x08\x00\x01", "at least one dimension"),
        (gzip.compress(GOOD)[:-9], "truncated: the compressed data ends early"),
        (gzip.compress(GOOD)[:-8] + b"\xff" * 8, "cannot be read: CRC check failed"),
        (gzip.compress(GOOD[:-4]), "truncated: 20 bytes of elements found"),
        # A header with a size larger than any memory.
        (b"\0\0\x0e\x04" + b"\xff" * 16, "truncated: 0 bytes of elements found"),
    ],
    ids=range(12),
)
def test_invalid_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad-idx"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as error:
        read_idx(path)
    assert str(path) in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none: no such file, expected an IDX file"):
        read_idx(tmp_path / "none")


def test_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be read: .*directory"):
        read_idx(tmp_path)


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("parts", [["train"], ["t10k"], ["train", "t10k"]])
def test_load_mnist(tmp_path: Path, parts: list[str], end: str) -> None:
    written = {part: write_mnist(tmp_path, part, 3 + len(part), end) for part in parts}
    loaded = load_mnist(tmp_path)
    assert list(loaded) == parts
    for part, (images, labels) in loaded.items():
        assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
        assert images.shape == (3 + len(part), 28, 28)
        assert (images.flatten().tolist(), labels.tolist()) == written[part]


def test_load_mnist_with_dots_in_names(tmp_path: Path) -> None:
    write_mnist(tmp_path, "t10k", 2)
    for path in tmp_path.iterdir():
        path.rename(tmp_path / path.name.replace("-idx", ".idx"))
    assert len(load_mnist(tmp_path)["t10k"][1]) == 2


def test_load_mnist_without_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no MNIST files found, expected train-images-idx3-ubyte"):
        load_mnist(tmp_path / "none")


@pytest.mark.parametrize("missing", ["images-idx3", "labels-idx1"])
def test_load_mnist_without_one_of_two_files(tmp_path: Path, missing: str) -> None:
    write_mnist(tmp_path, "train", 2)
    (tmp_path / f"train-{missing}-ubyte").unlink()
    with pytest.raises(UsageError, match=f"found, but no train-{missing}-ubyte or .*gz beside it"):
        load_mnist(tmp_path)


def test_load_mnist_with_different_counts(tmp_path: Path) -> None:
    write_mnist(tmp_path, "t10k", 4)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(8, (3,), [1, 2, 3]))
    with pytest.raises(UsageError, match=r"4 images in .* but 3 labels in"):
        load_mnist(tmp_path)


def test_load_mnist_with_labels_named_images(tmp_path: Path) -> None:
    write_mnist(tmp_path, "t10k", 4)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(8, (4,), [1, 2, 3, 4]))
    with pytest.raises(UsageError, match=r"torch.uint8\[4\] found, expected uint8 with 3 dimen"):
        load_mnist(tmp_path)


def test_real_files(tmp_path: Path, shared_data: Path | None) -> None:
    """Read MNIST, or files of the same shape if it is missing."""
    if shared_data is None:
        write_mnist(tmp_path, "t10k", 10_000, ".gz")
    images, labels = load_mnist(shared_data / "mnist" if shared_data else tmp_path)["t10k"]
    assert images.shape == (10_000, 28, 28)
    assert labels.bincount().sum() == 10_000
    if shared_data is not None:
        assert labels[:5].tolist() == [7, 2, 1, 0, 4]
        assert labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
