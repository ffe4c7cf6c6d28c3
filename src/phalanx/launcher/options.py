"""The command line of `phalanx run`: torchrun's, with other defaults and readable errors."""

import importlib.machinery
import os
import re
import secrets
import shutil
import sys
import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig

from phalanx import env
from phalanx import key as keys
from phalanx.errors import UsageError
from phalanx.launcher import endpoint
from phalanx.launcher.cores import usable_cores
from phalanx.launcher.ssh.plan import OPTIONS as HOST_OPTIONS
from phalanx.torch_versions import shutdown_timeout

__all__ = ["Job", "parse"]

STOP_TIMEOUT = 10
"""The default seconds between SIGTERM and SIGKILL; --shutdown-timeout overrides it."""


@dataclass(frozen=True)
class Job:
    """The parameters of a job, ready for the agent.

    Attributes:
        config: The configuration of PyTorch's agent.
        command: The program of each rank and its arguments.
        files: The specification of the log files; None if there are none.
        shown: The local ranks whose output is shown; None for all.
    """

    config: LaunchConfig
    command: list[str]
    files: LogsSpecs | None
    shown: set[int] | None
    hosts: int
    """The number of hosts that this machine simulates; 0 for none."""
    key: bytes | None
    """The job's key; None if there are several hosts and no key was given."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; `phalanx run --help` lists the options")


def parse(argv: Sequence[str]) -> Job:
    """Parse torchrun's options, the script and its arguments.

    Raises:
        UsageError: An option is invalid, as far as can be checked before a process is started.
    """
    parser = _Parser("phalanx run", parents=[torchrun.get_args_parser()], add_help=False)
    if "PET_NPROC_PER_NODE" not in os.environ:
        parser.set_defaults(nproc_per_node="auto")
    parser.add_argument("--replace")
    parser.add_argument("--simulate-hosts")
    parser.add_argument("--key-file")
    parser.add_argument("--key-fd")
    for name in HOST_OPTIONS:
        parser.add_argument(f"--{name.replace('_', '-')}")
    args = parser.parse_args(list(argv))
    _check_host_options(args)
    args.nproc_per_node = str(_nproc(args.nproc_per_node))
    _check_script(args)
    _check_port(args)
    _replace_backends(args.replace)
    nnodes = _nnodes(args.nnodes)
    if nnodes == 1 and (other := _other_launcher()):
        _run_as_its_rank(args, other)
    if args.rdzv_backend == "static" and not 0 <= args.node_rank < nnodes:
        raise UsageError(f"--node-rank is {args.node_rank}: expected 0 to {nnodes - 1}")
    args.simulate_hosts = _simulated(args.simulate_hosts, int(args.nproc_per_node), nnodes)
    if args.standalone or (_unplaced(args) and nnodes == 1):
        args.rdzv_backend, args.rdzv_endpoint = "c10d", "localhost:0"
        args.rdzv_id = uuid.uuid4().hex
        args.local_addr = args.local_addr or "127.0.0.1"
    elif args.master_port is None:
        args.master_port = 29500
    # A torchrun without this option (torch 2.11) gives its agent 30 seconds.
    given = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in os.environ
    if not given and shutdown_timeout(args, STOP_TIMEOUT) is None:
        args.shutdown_timeout = STOP_TIMEOUT
    return _job(args, _key(args, nnodes))


def _job(args: Namespace, key: bytes | None) -> Job:
    # torchrun always makes a log directory in /tmp. Avoid it unless the user asked for log files.
    if not re.search(r"(^|,)\s*timeout\s*=", args.rdzv_conf):
        args.rdzv_conf = ",".join(filter(None, (args.rdzv_conf, f"timeout={endpoint.PATIENCE}")))
    wants_files = args.log_dir is not None or (args.redirects, args.tee) != ("0", "0")
    directory = args.log_dir
    if args.logs_specs is None:
        args.log_dir = os.devnull
    args.run_path = False  # every script gets its own Python process
    os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank ${rank}] ")
    ranks = args.local_ranks_filter
    try:
        config, program, arguments = torchrun.config_from_args(args)
        shown = set(map(int, ranks.split(","))) if ranks else None
        files: LogsSpecs | None = config.logs_specs if args.logs_specs else None
        if wants_files and files is None:
            redirects, tee = Std.from_str(args.redirects), Std.from_str(args.tee)
            files = DefaultLogsSpecs(directory, redirects, tee, shown)
    except (AssertionError, OSError, RuntimeError, ValueError) as error:  # what torchrun raises
        raise UsageError(str(error)) from error
    endpoint.check(config)
    return Job(config, [str(program), *arguments], files, shown, args.simulate_hosts, key)


def _nproc(text: str) -> int:
    expected = "expected an integer, at least 1, or auto, cpu, gpu"
    if text == "auto":
        if torch.accelerator.is_available():
            return torch.accelerator.device_count()
        return usable_cores()
    if text == "cpu":
        return usable_cores()
    try:
        count = torchrun.determine_local_world_size(text)
    except ValueError as error:
        reason = "no such device here" if "not available" in str(error) else expected
        raise UsageError(f"--nproc-per-node is {text!r}: {reason}") from None
    if count < 1:
        raise UsageError(f"--nproc-per-node is {text}: {expected}")
    return int(count)


def _nnodes(text: str) -> int:
    try:
        least, most = torchrun.parse_min_max_nnodes(text)
    except (RuntimeError, ValueError):
        raise UsageError(f"--nnodes is {text!r}: expected an integer, or MIN:MAX") from None
    if not 1 <= least <= most:
        raise UsageError(f"--nnodes is {text!r}: expected 1 <= MIN <= MAX")
    return int(most)


def _key(args: Namespace, nodes: int) -> bytes | None:
    """Return the job's key: the given key or, on one host, a new one; None if there is none."""
    if args.key_fd is not None:
        if args.key_file is not None:
            raise UsageError("--key-file and --key-fd are both given: leave one out")
        if not args.key_fd.isdecimal():
            raise UsageError(f"--key-fd is {args.key_fd!r}: expected the number of an open file")
        return keys.from_descriptor(int(args.key_fd))
    if args.key_file is not None:
        return keys.from_file(args.key_file)
    return keys.from_environment() if nodes > 1 else secrets.token_bytes(keys.SIZE)


def _simulated(text: str | None, ranks: int, nodes: int) -> int:
    if text is None:
        return 0
    expected = f"expected an integer from 1 to {ranks}, the ranks that there are"
    try:
        hosts = int(text)
    except ValueError:
        raise UsageError(f"--simulate-hosts is {text!r}: {expected}") from None
    if not 1 <= hosts <= ranks:
        raise UsageError(f"--simulate-hosts is {text}: {expected}")
    if nodes > 1:
        raise UsageError("--simulate-hosts makes hosts of one machine: leave --nnodes out")
    return hosts


def _replace_backends(text: str | None) -> None:
    """Pass --replace to the ranks in the variable that they read at `import torch`."""
    try:
        names = env.replaced_backends() if text is None else env.backend_names(text, "--replace")
    except ValueError as error:
        raise UsageError(str(error)) from None
    if names and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        raise UsageError(
            "TORCH_DEVICE_BACKEND_AUTOLOAD in the environment keeps Phalanx out of `import "
            "torch`, so it can't run in place of other backends: unset it"
        )
    if text is not None:
        os.environ["PHALANX_REPLACE"] = ",".join(names)


def _check_host_options(args: Namespace) -> None:
    """Reject the options for `--hosts`, which the command line handles before this parser."""
    if args.hosts is not None:
        raise UsageError("--hosts comes too late: give it first, before torchrun's other options")
    for name in HOST_OPTIONS:
        if getattr(args, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} says how to start hosts: give --hosts too"
            )


def _other_launcher() -> str:
    """Return the launcher that has started several `phalanx run`; empty if none has."""
    other = {"mpi": "mpirun", "slurm": "srun"}.get(env.launcher(), "")
    counts = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
    count = next((text for name in counts if (text := os.environ.get(name, ""))), "1")
    return other if count != "1" else ""


def _run_as_its_rank(args: Namespace, other: str) -> NoReturn:
    """Replace this process by the script, as a rank of another launcher, if `--replace` is given.

    Otherwise each `phalanx run` would start all ranks.

    Raises:
        UsageError: `--replace` is not given, or `--simulate-hosts` is.
    """
    if args.replace is None or args.simulate_hosts is not None:
        raise UsageError(
            f"{other} has started several of `phalanx run`, which starts ranks itself: start the "
            f"script with `{other} ... python SCRIPT`; or give --nnodes, for one `phalanx run` per "
            "host"
        )
    program = [] if args.no_python else [sys.executable, *(["-m"] if args.module else [])]
    program += [args.training_script, *args.training_script_args]
    os.execvp(program[0], program)


def _unplaced(args: Namespace) -> bool:
    return args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None


def _check_port(args: Namespace) -> None:
    if args.master_port is not None and not 1 <= args.master_port <= 65535:
        raise UsageError(f"--master-port is {args.master_port}: expected 1 to 65535")


def _check_script(args: Namespace) -> None:
    script = args.training_script
    if args.module:
        top = script.partition(".")[0]
        where = [os.getcwd(), *sys.path]
        if top not in sys.builtin_module_names and not (
            importlib.machinery.PathFinder.find_spec(top, where)
        ):
            raise UsageError(f"there is no module {top!r}, in {os.getcwd()} or installed")
    elif args.no_python:
        if shutil.which(script) is None:
            raise UsageError(f"there is no program {script!r} that can be run")
    elif os.path.isdir(script):
        if not os.path.exists(os.path.join(script, "__main__.py")):
            raise UsageError(f"{script} is a directory without a __main__.py: expected a script")
    elif not os.path.exists(script):
        raise UsageError(f"there is no script {script!r}: looked in {os.getcwd()}")
