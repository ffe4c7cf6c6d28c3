"""The conformance suite of transports as a job on several hosts, started by `phalanx run`.

Every rank forks a process for each case, which is one rank of the case. Cases of two ranks run on
the first ranks of two hosts. The ranks exchange addresses through the job's store.

    phalanx run --nnodes 2 --nproc-per-node 2 ... tests/hosts/transport_suite.py TRANSPORT
"""

from __future__ import annotations

import os
import signal
import sys
import traceback

import torch.distributed as dist

from phalanx import transports
from phalanx.address import local_address
from phalanx.env import tunnel_host
from tests.hosts import test_transports as suite

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CASES = (*suite.CASES, (2, suite.peer_dies))


def job_store(name: str) -> dist.Store:  # type: ignore[name-defined]
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))  # type: ignore[attr-defined]
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def run_case(transport: str, number: int, rank: int) -> None:
    """Run a case in the forked process, and end the process in order: it may have the relay."""
    size, case = CASES[number]

    def open_transport(name: str) -> tuple[transports.Transport, int, int]:
        address = local_address(tunnel_host())
        store = job_store(f"case-{number}")
        return transports.open_transport(name, store, rank, size, address), rank, size

    suite.open_transport = open_transport  # type: ignore[assignment]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    try:
        case(transport) if case is suite.peer_dies else case(transport, 1234)  # type: ignore[call-arg]
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.exit()


def main() -> None:
    for number, (size, case) in enumerate(CASES):
        ranks = list(range(SIZE)) if size == SIZE else [0, SIZE // 2]
        if RANK not in ranks:
            continue
        pid = os.fork()
        if pid == 0:
            run_case(sys.argv[1], number, ranks.index(RANK))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        is_victim = case is suite.peer_dies and RANK != 0
        if code != (-signal.SIGKILL if is_victim else 0):
            sys.exit(f"{case.__name__} with {size} ranks: exit code {code} on rank {RANK}")
        print(f"case {case.__name__} {size} passed", flush=True)


if __name__ == "__main__":
    main()
