"""The conformance suite of transports as a job, for hosts that `phalanx run` joins.

Every rank forks a process for each case, which is one rank of it; a case of two ranks is for the
first ranks of two hosts. What they find each other by is the job's own store.

    phalanx run --nnodes 2 --nproc-per-node 2 ... tests/hosts/transport_suite.py TRANSPORT
"""

from __future__ import annotations

import os
import signal
import sys
import traceback

import torch.distributed as dist

from phalanx import transports
from phalanx.env_hosts import tunnel_host
from phalanx.topology import local_address
from tests.hosts import test_transports as suite

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CASES = (*suite.CASES, (2, suite.dies))


def job_store(name: str) -> dist.Store:  # type: ignore[name-defined]
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))  # type: ignore[attr-defined]
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def in_a_case(transport: str, number: int, rank: int) -> None:
    """What the forked process does; it ends here."""
    size, case = CASES[number]

    def opened(name: str) -> tuple[transports.Transport, int, int]:
        address = local_address(tunnel_host())
        store = job_store(f"case-{number}")
        return transports.open_transport(name, store, rank, size, address), rank, size

    suite.opened = opened  # type: ignore[assignment]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    try:
        case(transport) if case is suite.dies else case(transport, 1234)  # type: ignore[call-arg]
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def main() -> None:
    for number, (size, case) in enumerate(CASES):
        ranks = list(range(SIZE)) if size == SIZE else [0, SIZE // 2]
        if RANK not in ranks:
            continue
        pid = os.fork()
        if pid == 0:
            in_a_case(sys.argv[1], number, ranks.index(RANK))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        dead = case is suite.dies and RANK != 0
        if code != (-signal.SIGKILL if dead else 0):
            sys.exit(f"{case.__name__} with {size} ranks: exit code {code} on rank {RANK}")
        print(f"case {case.__name__} {size} is fine", flush=True)


if __name__ == "__main__":
    main()
