"""Concurrent execution of tests of PyTorch's RPC suite on one of two implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.conformance.torch_suite import runner
from tests.conformance.torch_suite.runner import ROOT, Outcome, Server

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["COLUMNS", "LOGS", "run"]

# The environment for each implementation. Process groups are Phalanx's too: a worker
# that holds DDP's last reference to a group of Gloo may block in it, waiting for the GIL.
COLUMNS = {
    "torch": {"RPC_SUITE_COLUMN": "torch"},
    "phalanx": {"RPC_SUITE_COLUMN": "phalanx", "PHALANX_REPLACE": "gloo"},
}
LOGS = ROOT / "build" / "conformance-rpc"
# With the barrier after the creation of the default group: tests of DDP under RPC call workers as
# soon as the caller has it, and fail or time out if a worker is late.
_ENVIRONMENT = {
    "TP_SOCKET_IFNAME": "lo",
    "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
    "TORCH_DIST_INIT_BARRIER": "1",
}


def run(
    column: str,
    chosen: Callable[[str], bool],
    *,
    jobs: int,
    limit: int,
    begin: Callable[[int], None] = lambda _count: None,
    report: Callable[[str, Outcome], None] = lambda _test, _outcome: None,
) -> dict[str, Outcome]:
    """Run the chosen tests on `torch.distributed.rpc` or `phalanx.rpc`.

    Args:
        column: A key of `COLUMNS`.
        chosen: Returns whether to run a test, given as `Class.name`.
        jobs: The number of concurrent tests.
        limit: The time limit of a test, in seconds.
        begin: Called once with the number of tests.
        report: Called after each test, from several threads, but never concurrently.

    Returns:
        The outcome of each test.
    """
    folder = LOGS / column
    scratch = folder / "tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    environment = {**_ENVIRONMENT, **COLUMNS[column], "TMPDIR": str(scratch)}

    def start() -> Server:
        return Server(f"{__package__}.server", folder, environment, limit)

    return runner.run_on(start, chosen, jobs=jobs, begin=begin, report=report)
