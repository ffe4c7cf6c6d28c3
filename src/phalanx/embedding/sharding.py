"""The assignment of a table's rows to servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from phalanx.errors import UsageError

__all__ = ["HashShards", "RangeShards", "Shards", "split_of"]


class Shards(Protocol):
    """A split of rows 0 to `rows` - 1 over `servers`, the same in every process."""

    rows: int
    servers: int

    def count(self, server: int) -> int:
        """Return the number of rows of a server."""

    def rows_of(self, server: int) -> Tensor:
        """Return the indices of a server's rows, in the server's order."""

    def place(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's server, and the row's index on that server."""


def _check(rows: int, servers: int) -> None:
    if not 1 <= servers <= rows:
        raise UsageError(
            f"{rows} rows over {servers} servers given, expected at least one server, and a row "
            "for each"
        )


class RangeShards:
    """A split into consecutive rows; if it is uneven, the first servers have one row more.

    Args:
        rows: The number of rows of the whole table.
        servers: The number of servers.

    Raises:
        UsageError: There is no server, or there are more servers than rows.
    """

    def __init__(self, rows: int, servers: int) -> None:
        _check(rows, servers)
        self.rows, self.servers = rows, servers
        least, more = divmod(rows, servers)
        self._begins = [server * least + min(server, more) for server in range(servers + 1)]
        self._bounds = torch.tensor(self._begins[1:])

    def count(self, server: int) -> int:
        """Return the number of rows of a server."""
        return self._begins[server + 1] - self._begins[server]

    def rows_of(self, server: int) -> Tensor:
        """Return the indices of a server's rows, in the server's order."""
        return torch.arange(self._begins[server], self._begins[server + 1])

    def place(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's server, and the row's index on that server."""
        owners = torch.bucketize(indices, self._bounds, right=True)
        return owners, indices - torch.tensor(self._begins)[owners]


class HashShards:
    """A split with row r on server r modulo `servers`, which spreads frequent rows over all.

    Args:
        rows: The number of rows of the whole table.
        servers: The number of servers.

    Raises:
        UsageError: There is no server, or there are more servers than rows.
    """

    def __init__(self, rows: int, servers: int) -> None:
        _check(rows, servers)
        self.rows, self.servers = rows, servers

    def count(self, server: int) -> int:
        """Return the number of rows of a server."""
        return len(range(server, self.rows, self.servers))

    def rows_of(self, server: int) -> Tensor:
        """Return the indices of a server's rows, in the server's order."""
        return torch.arange(server, self.rows, self.servers)

    def place(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's server, and the row's index on that server."""
        return indices % self.servers, indices.div(self.servers, rounding_mode="floor")


_SPLITS: dict[str, Callable[[int, int], Shards]] = {"range": RangeShards, "hash": HashShards}


def split_of(shards: str, rows: int, servers: int) -> Shards:
    """Return the split of this name.

    Raises:
        UsageError: There is no split of this name, or the numbers of rows and servers are invalid.
    """
    if shards not in _SPLITS:
        raise UsageError(f"shards={shards!r} given, expected one of {[*_SPLITS]}")
    return _SPLITS[shards](rows, servers)
