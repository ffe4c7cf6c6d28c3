"""The command line of `phalanx run`: torchrun's, with other defaults and readable errors.

`parse_arguments` reads it, `make_job` checks it and makes the parameters of the agent. The other
functions read the rendezvous endpoint of a job and its timeouts.
"""

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
from typing import NamedTuple, NoReturn

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from phalanx import env
from phalanx import key as keys
from phalanx.errors import UsageError
from phalanx.launcher.host_resources import usable_cores
from phalanx.launcher.ssh.plan import HOST_OPTIONS, REPLACED_OPTIONS, STOP_TIMEOUT
from phalanx.torch_versions import is_own_hostname, shutdown_timeout

_RENDEZVOUS_TIMEOUT = 600
"""The default of `--rdzv-conf timeout=`: the seconds that hosts wait for each other."""

_ELASTIC_RESTARTS = 10
"""The default of `--max-restarts` with `--elastic`."""
_DEFAULT_PORTS = {"static": 29500, "c10d": 29400}
_READ_SECONDS = 60
_PRESENCE_SECONDS = 20
_MAX_INTEGER = 1_000_000


class Script(NamedTuple):
    """The Python script of each rank."""

    script: str
    arguments: list[str]
    is_module: bool


class Elastic(NamedTuple):
    """The replacement of lost ranks on this host.

    Attributes:
        min_ranks: The least number of ranks with which the job continues.
        spares: The number of processes that wait to take the places of lost ranks.
        rejoin: The seconds for which a host that has lost the store tries to join again.
    """

    min_ranks: int
    spares: int
    rejoin: int


@dataclass(frozen=True)
class Job:
    """The parameters of a job, ready for the agent.

    Attributes:
        config: The configuration of PyTorch's agent.
        command: The program of each rank and its arguments.
        log_files: The specification of the log files; None if there are none.
        shown_ranks: The local ranks whose output is shown; None for all.
    """

    config: LaunchConfig
    command: list[str]
    log_files: LogsSpecs | None
    shown_ranks: set[int] | None
    simulated_hosts: int
    """The number of hosts that this machine simulates; 0 for none."""
    key: bytes | None
    """The job's key; None if there are several hosts and no key was given."""
    script: Script | None
    """The Python script of each rank; None if it is another program."""
    elastic: Elastic | None
    """The replacement of lost ranks; None if there is none."""
    keeps_record: bool = False
    """True to keep the job's record even if it ends well."""


class HelpRequested(Exception):  # noqa: N818 - not an error
    """The arguments contain `--help`."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if "training_script" in message:
            message = "no script: expected `phalanx run [OPTIONS] SCRIPT [ARGS]...`"
        raise UsageError(f"{message}; `phalanx run --help` lists the options")

    def print_help(self, _file: object = None) -> NoReturn:
        raise HelpRequested


def _make_parser() -> ArgumentParser:
    """Return torchrun's parser, extended by the options of Phalanx.

    The default of an option is None if its use with `--hosts` depends on whether it is given.
    """
    parser = _Parser("phalanx run", parents=[torchrun.get_args_parser()], add_help=False)
    if "PET_NPROC_PER_NODE" not in os.environ:
        parser.set_defaults(nproc_per_node="auto")
    # In torch 2.11, the default of the port is a number.
    for name in ("node_rank", "master_addr", "master_port", "max_restarts"):
        if f"PET_{name.upper()}" not in os.environ:
            parser.set_defaults(**{name: None})
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--keep-record", action="store_true")
    for name in ("spares", "rejoin", "replace", "simulate-hosts", "key-file", "key-fd", "hosts"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--ssh")
    parser.add_argument("--remote-python")
    parser.add_argument("--export", action="append")
    return parser


def parse_arguments(argv: Sequence[str]) -> Namespace:
    """Parse the options of `phalanx run`, the script and its arguments.

    Raises:
        UsageError: There is no script, or an option is unknown or has an invalid value.
        HelpRequested: `--help` is among the options.
    """
    return _make_parser().parse_args(list(argv))


def as_words(args: Namespace) -> list[str]:
    """Return the options for every host of `--hosts` as words of a command line.

    These are the options that differ from their defaults, without those in `HOST_OPTIONS` and
    `REPLACED_OPTIONS`. Options whose defaults this machine's environment sets (`PET_*`) are
    included.

    Args:
        args: The result of `parse_arguments`.
    """
    words, omitted = [], (*HOST_OPTIONS, *REPLACED_OPTIONS)
    for action in _make_parser()._actions:
        value = getattr(args, action.dest, None)
        is_default = value == action.default and f"PET_{action.dest.upper()}" not in os.environ
        is_given = not is_default and value is not None and value is not False
        if not (is_given and action.option_strings) or action.dest in omitted:
            continue
        option = next(name for name in action.option_strings if name.startswith("--"))
        if action.nargs == 0:
            words.append(option)
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            words.append(f"{option}={text}")
    return words


def make_job(args: Namespace) -> Job:
    """Check the arguments of `phalanx run` on one host, and make the parameters of the agent.

    Raises:
        UsageError: An option is invalid, as far as can be checked before a process is started.
    """
    _check_host_options(args)
    args.node_rank = args.node_rank or 0
    args.master_addr = args.master_addr or "127.0.0.1"
    min_ranks, ranks = _parse_min_max_nproc(args.nproc_per_node)
    args.nproc_per_node = str(ranks)
    elastic = _parse_elastic(args, min_ranks)
    _check_script(args)
    if args.max_restarts is None:
        args.max_restarts = _ELASTIC_RESTARTS if args.elastic else 0
    _check_port(args)
    _replace_backends(args.replace)
    nnodes = _parse_nnodes(args.nnodes)
    if nnodes == 1 and args.rejoin is not None:
        raise UsageError("--rejoin is for jobs on several hosts: give --nnodes too, or omit it")
    if nnodes == 1 and (other := _other_launcher()):
        _exec_as_rank(args, other)
    if args.rdzv_backend == "static" and not 0 <= args.node_rank < nnodes:
        raise UsageError(f"--node-rank is {args.node_rank}: expected 0 to {nnodes - 1}")
    args.simulate_hosts = _parse_simulated_hosts(
        args.simulate_hosts, int(args.nproc_per_node), nnodes
    )
    has_endpoint = args.rdzv_backend != "static" or args.rdzv_endpoint or args.master_port
    if args.standalone or (nnodes == 1 and not has_endpoint):
        args.rdzv_backend, args.rdzv_endpoint = "c10d", "localhost:0"
        args.rdzv_id = uuid.uuid4().hex
        args.local_addr = args.local_addr or "127.0.0.1"
    elif args.master_port is None:
        args.master_port = 29500
    # A torchrun without this option (torch 2.11) gives its agent 30 seconds.
    is_given = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in os.environ
    if not is_given and shutdown_timeout(args, STOP_TIMEOUT) is None:
        args.shutdown_timeout = STOP_TIMEOUT
    return _make_job(args, _read_key(args, nnodes), elastic)


def uses_phalanx_store(config: LaunchConfig) -> bool:
    """Return whether Phalanx opens the store of the rendezvous; otherwise PyTorch does."""
    return config.rdzv_backend in _DEFAULT_PORTS and "store_type" not in config.rdzv_configs


def rendezvous_address(config: LaunchConfig) -> tuple[str, int]:
    """Return the host and the port of the rendezvous.

    Raises:
        UsageError: The endpoint is malformed.
    """
    default = _DEFAULT_PORTS[config.rdzv_backend]
    min_port = 1 if config.max_nodes > 1 else 0
    try:
        host, port = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=default)
        host.encode("idna")  # a name lookup encodes it in the same way
        if port < min_port:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"invalid rendezvous endpoint {config.rdzv_endpoint!r} in --rdzv-endpoint or "
            "--master-addr: expected HOST:PORT, with the name or the address of a host (without "
            f"blanks or %) and a port from {min_port} to 65535"
        ) from None
    return str(host), int(port)


def rendezvous_timeout(config: LaunchConfig) -> int:
    """Return the seconds that hosts wait for each other."""
    return _read_integer(config, "timeout", _RENDEZVOUS_TIMEOUT)


def read_timeout(config: LaunchConfig) -> int:
    """Return the seconds that an operation of the store may take, after the rendezvous."""
    if config.rdzv_backend == "static":
        return rendezvous_timeout(config)
    return _read_integer(config, "read_timeout", _READ_SECONDS)


def presence_timeout(config: LaunchConfig) -> int:
    """Return the seconds within which a host must appear, once the rendezvous has counted it.

    This is a little longer than the rendezvous takes to detect a dead host, so that the next one
    does not count it again.
    """
    if not uses_phalanx_store(config):
        return _PRESENCE_SECONDS
    interval = _read_integer(config, "keep_alive_interval", 5)
    return interval * _read_integer(config, "keep_alive_max_attempt", 3) + 5


def is_store_host(config: LaunchConfig, host: str) -> tuple[bool, bool]:
    """Return whether this host has the store, and whether that is certain.

    It is not certain if it was guessed from the host name of the endpoint.

    Raises:
        UsageError: `is_host` in `--rdzv-conf` is neither true nor false.
    """
    if config.rdzv_backend == "static":
        return config.rdzv_configs.get("rank") == 0, True
    try:
        is_host = rendezvous_parameters(config).get_as_bool("is_host")
    except ValueError:
        raise UsageError(
            f"--rdzv-conf is_host={config.rdzv_configs['is_host']}: expected true on the host of "
            "the rendezvous, false on the others"
        ) from None
    if is_host is None:
        return bool(host) and is_own_hostname(host), False
    return is_host, True


def rendezvous_parameters(config: LaunchConfig) -> RendezvousParameters:
    """Return the parameters of PyTorch's rendezvous."""
    return RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )


def _make_job(args: Namespace, key: bytes | None, elastic: Elastic | None) -> Job:
    # torchrun always makes a log directory in /tmp. Avoid it unless the user asked for log files.
    if not re.search(r"(^|,)\s*timeout\s*=", args.rdzv_conf):
        args.rdzv_conf = ",".join(filter(None, (args.rdzv_conf, f"timeout={_RENDEZVOUS_TIMEOUT}")))
    wants_files = args.log_dir is not None or (args.redirects, args.tee) != ("0", "0")
    directory = args.log_dir
    if args.logs_specs is None:
        args.log_dir = os.devnull
    args.run_path = False  # every script gets its own Python process
    os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank ${rank}] ")
    ranks = args.local_ranks_filter
    try:
        config, program, arguments = torchrun.config_from_args(args)
        shown_ranks = set(map(int, ranks.split(","))) if ranks else None
        log_files: LogsSpecs | None = config.logs_specs if args.logs_specs else None
        if wants_files and log_files is None:
            redirects, tee = Std.from_str(args.redirects), Std.from_str(args.tee)
            log_files = DefaultLogsSpecs(directory, redirects, tee, shown_ranks)
    except (AssertionError, OSError, RuntimeError, ValueError) as error:  # raised by torchrun
        raise UsageError(str(error)) from error
    _check_rendezvous(config)
    command = [str(program), *arguments]
    script = Script(args.training_script, list(args.training_script_args), bool(args.module))
    return Job(
        config,
        command,
        log_files,
        shown_ranks,
        args.simulate_hosts,
        key,
        None if args.no_python else script,
        elastic,
        args.keep_record,
    )


def _parse_min_max_nproc(text: str) -> tuple[int, int]:
    """Return the least number of ranks on this host, and the number at the start."""
    least, colon, most = text.rpartition(":")
    ranks = _parse_nproc(most)
    min_ranks = _parse_nproc(least) if colon else ranks
    if min_ranks > ranks:
        raise UsageError(f"--nproc-per-node is {text!r}: expected MIN:MAX with MIN <= MAX")
    return min_ranks, ranks


def _parse_elastic(args: Namespace, min_ranks: int) -> Elastic | None:
    if not args.elastic:
        for name in ("spares", "rejoin"):
            if getattr(args, name) is not None:
                raise UsageError(
                    f"--{name} is for jobs whose ranks are replaced: give --elastic too"
                )
        if min_ranks < int(args.nproc_per_node):
            raise UsageError(
                "--nproc-per-node MIN:MAX is for jobs that continue with fewer ranks: give "
                "--elastic too"
            )
        return None
    if args.no_python:
        raise UsageError("--elastic starts Python scripts only: omit --no-python")
    if getattr(args, "numa_binding", None) is not None:
        raise UsageError(
            "--elastic cannot bind the processes that replace ranks to NUMA nodes: "
            "omit --numa-binding"
        )
    spares = _parse_small_integer("spares", args.spares, 999)
    return Elastic(min_ranks, spares, _parse_small_integer("rejoin", args.rejoin, 999_999))


def _parse_small_integer(name: str, text: str | None, most: int) -> int:
    text = text or "0"
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most))):
        raise UsageError(f"--{name} is {text!r}: expected an integer from 0 to {most}")
    return int(text)


def _parse_nproc(text: str) -> int:
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


def _parse_nnodes(text: str) -> int:
    try:
        minimum, maximum = torchrun.parse_min_max_nnodes(text)
    except (RuntimeError, ValueError):
        raise UsageError(f"--nnodes is {text!r}: expected an integer, or MIN:MAX") from None
    if not 1 <= minimum <= maximum:
        raise UsageError(f"--nnodes is {text!r}: expected 1 <= MIN <= MAX")
    return int(maximum)


def _read_key(args: Namespace, nodes: int) -> bytes | None:
    """Return the job's key: the given key or, on one host, a new one; None if there is none."""
    if args.key_fd is not None:
        if args.key_file is not None:
            raise UsageError("--key-file and --key-fd are both given: omit one")
        if not args.key_fd.isdecimal():
            raise UsageError(f"--key-fd is {args.key_fd!r}: expected the number of an open file")
        return keys.from_descriptor(int(args.key_fd))
    if args.key_file is not None:
        return keys.from_file(args.key_file)
    return keys.from_environment() if nodes > 1 else secrets.token_bytes(keys.SIZE)


def _parse_simulated_hosts(text: str | None, ranks: int, nodes: int) -> int:
    if text is None:
        return 0
    expected = f"expected an integer from 1 to {ranks}, the number of ranks"
    try:
        count = int(text)
    except ValueError:
        raise UsageError(f"--simulate-hosts is {text!r}: {expected}") from None
    if not 1 <= count <= ranks:
        raise UsageError(f"--simulate-hosts is {text}: {expected}")
    if nodes > 1:
        raise UsageError("--simulate-hosts simulates hosts on one machine: omit --nnodes")
    return count


def _replace_backends(text: str | None) -> None:
    """Pass --replace to the ranks in the variable that they read at `import torch`."""
    try:
        names = env.replaced_backends() if text is None else env.backend_names(text, "--replace")
    except ValueError as error:
        raise UsageError(str(error)) from None
    if names and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        raise UsageError(
            "TORCH_DEVICE_BACKEND_AUTOLOAD in the environment keeps `import torch` from loading "
            "Phalanx, so it can't replace other backends: unset it"
        )
    if text is not None:
        os.environ["PHALANX_REPLACE"] = ",".join(names)


def _check_host_options(args: Namespace) -> None:
    """Reject options that need `--hosts`."""
    for name in HOST_OPTIONS:
        if getattr(args, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} is for starting hosts over ssh: give --hosts too"
            )


def _other_launcher() -> str:
    """Return the launcher that has started several `phalanx run`; empty if none has."""
    other = {"mpi": "mpirun", "slurm": "srun"}.get(env.launcher(), "")
    counts = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
    count = next((text for name in counts if (text := os.environ.get(name, ""))), "1")
    return other if count != "1" else ""


def _exec_as_rank(args: Namespace, other: str) -> NoReturn:
    """Replace this process by the script, as a rank of another launcher, if `--replace` is given.

    Otherwise each `phalanx run` would start all ranks.
    """
    if args.replace is None or args.simulate_hosts is not None:
        raise UsageError(
            f"{other} has started several instances of `phalanx run`, which starts ranks itself: "
            f"start the script with `{other} ... python SCRIPT`; or give --nnodes, for one "
            "`phalanx run` per host"
        )
    program = [] if args.no_python else [sys.executable, *(["-m"] if args.module else [])]
    program += [args.training_script, *args.training_script_args]
    os.execvp(program[0], program)


def _check_port(args: Namespace) -> None:
    if args.master_port is not None and not 1 <= args.master_port <= 65535:
        raise UsageError(f"--master-port is {args.master_port}: expected 1 to 65535")


def _check_script(args: Namespace) -> None:
    script = args.training_script
    if args.module:
        top = script.partition(".")[0]
        search_path = [os.getcwd(), *sys.path]
        if top not in sys.builtin_module_names and not (
            importlib.machinery.PathFinder.find_spec(top, search_path)
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


def _check_rendezvous(config: LaunchConfig) -> None:
    """Raise `UsageError` if an option of the rendezvous is invalid."""
    if uses_phalanx_store(config):
        rendezvous_address(config)
        is_store_host(config, "")
        for name in config.rdzv_configs:
            if name.endswith("timeout") or name.startswith("keep_alive"):
                _read_integer(config, name, 1)


def _read_integer(config: LaunchConfig, name: str, default: int) -> int:
    text = str(config.rdzv_configs.get(name, default))
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:20]) <= _MAX_INTEGER):
        raise UsageError(f"--rdzv-conf {name}={text}: expected an integer from 1 to {_MAX_INTEGER}")
    return int(text)
