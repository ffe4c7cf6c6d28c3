"""The assignment of a table's rows to servers."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from phalanx.errors import UsageError


class Sharding(ABC):
    """An assignment of rows 0 to `rows` - 1 to `servers`, the same in every process."""

    def __init__(self, rows: int, servers: int) -> None:
        if not 1 <= servers <= rows:
            raise UsageError(
                f"{rows} rows over {servers} servers given, expected at least one server and at "
                "least one row per server"
            )
        self.rows, self.servers = rows, servers

    def count_rows(self, server: int) -> int:
        """Return the number of rows of a server."""
        return len(self._row_range(server))

    def list_rows(self, server: int) -> Tensor:
        """Return the indices of a server's rows, in the server's order."""
        rows = self._row_range(server)
        return torch.arange(rows.start, rows.stop, rows.step, device="cpu")

    @abstractmethod
    def locate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's server, and the row's index on that server."""

    @abstractmethod
    def _row_range(self, server: int) -> range:
        """Return the indices of a server's rows as a range."""


class RangeSharding(Sharding):
    """Sharding by consecutive rows; if it is uneven, the first servers have one row more.

    Args:
        rows: The number of rows of the whole table.
        servers: The number of servers.

    Raises:
        UsageError: `servers` is 0, or there are more servers than rows.

    Example:
        >>> RangeSharding(5, 2).list_rows(1)
        tensor([3, 4])
    """

    def __init__(self, rows: int, servers: int) -> None:
        super().__init__(rows, servers)
        quotient, remainder = divmod(rows, servers)
        self._starts = [server * quotient + min(server, remainder) for server in range(servers + 1)]
        self._ends = torch.tensor(self._starts[1:], device="cpu")

    def _row_range(self, server: int) -> range:
        return range(self._starts[server], self._starts[server + 1])

    def locate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's server, and the row's index on that server."""
        owners = torch.bucketize(indices, self._ends, right=True)
        return owners, indices - torch.tensor(self._starts, device="cpu")[owners]


class HashSharding(Sharding):
    """Sharding with row r on server r modulo `servers`, which spreads frequent rows over all.

    Args:
        rows: The number of rows of the whole table.
        servers: The number of servers.

    Raises:
        UsageError: `servers` is 0, or there are more servers than rows.

    Example:
        >>> HashSharding(5, 2).list_rows(1)
        tensor([1, 3])
    """

    def _row_range(self, server: int) -> range:
        return range(server, self.rows, self.servers)

    def locate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's server, and the row's index on that server."""
        return indices % self.servers, indices.div(self.servers, rounding_mode="floor")


_SHARDINGS: dict[str, type[Sharding]] = {"range": RangeSharding, "hash": HashSharding}


def make_sharding(sharding: str, rows: int, servers: int) -> Sharding:
    """Create the sharding of this name.

    Raises:
        UsageError: There is no sharding of this name, or the number of rows or servers is invalid.
    """
    if sharding not in _SHARDINGS:
        raise UsageError(f"sharding={sharding!r} given, expected one of {[*_SHARDINGS]}")
    return _SHARDINGS[sharding](rows, servers)
