"""Which server has which row of a table that is split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from phalanx.errors import UsageError

__all__ = ["HashShards", "RangeShards", "Shards", "split_of"]


class Shards(Protocol):
    """A split of rows 0 to `rows` - 1 over `servers`; every process computes the same."""

    rows: int
    servers: int

    def count(self, server: int) -> int:
        """How many rows a server has."""

    def rows_of(self, server: int) -> Tensor:
        """Which rows those are, in the order in which the server has them."""

    def place(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The server of each row, and its number there."""


def _check(rows: int, servers: int) -> None:
    if not 1 <= servers <= rows:
        raise UsageError(
            f"{rows} rows over {servers} servers given, expected at least one server, and a row "
            "for each"
        )


class RangeShards:
    """Each server has rows that follow one another; the first ones have one more where it's uneven.

    Args:
        rows: Of the whole table.
        servers: How many.

    Raises:
        UsageError: No server, or more servers than rows.
    """

    def __init__(self, rows: int, servers: int) -> None:
        _check(rows, servers)
        self.rows, self.servers = rows, servers
        least, more = divmod(rows, servers)
        self._begins = [server * least + min(server, more) for server in range(servers + 1)]
        self._bounds = torch.tensor(self._begins[1:])

    def count(self, server: int) -> int:
        """How many rows a server has."""
        return self._begins[server + 1] - self._begins[server]

    def rows_of(self, server: int) -> Tensor:
        """Which rows those are, in the order in which the server has them."""
        return torch.arange(self._begins[server], self._begins[server + 1])

    def place(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The server of each row, and its number there."""
        owners = torch.bucketize(indices, self._bounds, right=True)
        return owners, indices - torch.tensor(self._begins)[owners]


class HashShards:
    """Row r is on server r modulo `servers`: rows that are met often spread over all of them.

    Args:
        rows: Of the whole table.
        servers: How many.

    Raises:
        UsageError: No server, or more servers than rows.
    """

    def __init__(self, rows: int, servers: int) -> None:
        _check(rows, servers)
        self.rows, self.servers = rows, servers

    def count(self, server: int) -> int:
        """How many rows a server has."""
        return len(range(server, self.rows, self.servers))

    def rows_of(self, server: int) -> Tensor:
        """Which rows those are, in the order in which the server has them."""
        return torch.arange(server, self.rows, self.servers)

    def place(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The server of each row, and its number there."""
        return indices % self.servers, indices.div(self.servers, rounding_mode="floor")


_SPLITS: dict[str, Callable[[int, int], Shards]] = {"range": RangeShards, "hash": HashShards}


def split_of(shards: str, rows: int, servers: int) -> Shards:
    """The split of that name.

    Raises:
        UsageError: There is none, or it can't be made.
    """
    if shards not in _SPLITS:
        raise UsageError(f"shards={shards!r} given, expected one of {[*_SPLITS]}")
    return _SPLITS[shards](rows, servers)
