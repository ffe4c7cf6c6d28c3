"""The parameters of a job, which `make_job` makes from the arguments of `phalanx run`.

`arguments` has parsed these, and checked them as far as that needs no torch. The other functions
read the rendezvous endpoint of a job and its timeouts.
"""

import os
import re
import secrets
import sys
import uuid
from argparse import Namespace
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from phalanx import key as keys
from phalanx.errors import UsageError
from phalanx.launcher.arguments import (
    check_nproc_range,
    check_simulated_hosts,
    find_other_launcher,
    find_replaced_backends,
    make_nproc_error,
    parse_nnodes,
    parse_nproc_range,
    parse_small_integer,
)
from phalanx.launcher.host_resources import usable_cores
from phalanx.launcher.ssh.plan import STOP_TIMEOUT
from phalanx.torch_sources import shutdown_timeout
from phalanx.torch_versions import is_own_hostname

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


def make_job(args: Namespace) -> Job:
    """Make the parameters of the agent from the arguments of `phalanx run` on one host.

    Args:
        args: The result of `parse_arguments`.

    Raises:
        UsageError: An option is invalid, as far as can be checked before a process is started.
    """
    args.node_rank = args.node_rank or 0
    args.master_addr = args.master_addr or "127.0.0.1"
    min_ranks, ranks = map(_count_ranks, parse_nproc_range(args.nproc_per_node))
    check_nproc_range(args.nproc_per_node, min_ranks, ranks)
    args.nproc_per_node = str(ranks)
    elastic = _make_elastic(args, min_ranks)
    if args.max_restarts is None:
        args.max_restarts = _ELASTIC_RESTARTS if args.elastic else 0
    _replace_backends(args.replace)
    nnodes = parse_nnodes(args.nnodes)
    if nnodes == 1 and find_other_launcher():
        _exec_as_rank(args)
    check_simulated_hosts(args, ranks, nnodes)
    args.simulate_hosts = int(args.simulate_hosts or 0)
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


def _make_elastic(args: Namespace, min_ranks: int) -> Elastic | None:
    if not args.elastic:
        return None
    spares = parse_small_integer("spares", args.spares, 999)
    return Elastic(min_ranks, spares, parse_small_integer("rejoin", args.rejoin, 999_999))


def _count_ranks(number: int | str) -> int:
    """Return a number of ranks, which may be given as a kind of device with one rank each."""
    if isinstance(number, int):
        return number
    if number == "auto" and torch.accelerator.is_available():
        return torch.accelerator.device_count()
    if number in ("auto", "cpu"):
        return usable_cores()
    try:
        return int(torchrun.determine_local_world_size(number))
    except ValueError as error:
        if "not available" not in str(error):
            raise make_nproc_error(number) from None
        raise UsageError(f"--nproc-per-node is {number!r}: no such device here") from None


def _read_key(args: Namespace, nodes: int) -> bytes | None:
    """Return the job's key: the given key or, on one host, a new one; None if there is none."""
    if args.key_fd is not None:
        return keys.from_descriptor(int(args.key_fd))
    if args.key_file is not None:
        return keys.from_file(args.key_file)
    return keys.from_environment() if nodes > 1 else secrets.token_bytes(keys.SIZE)


def _replace_backends(text: str | None) -> None:
    """Pass --replace to the ranks in the variable that they read at `import torch`."""
    names = find_replaced_backends(text)
    if text is not None:
        os.environ["PHALANX_REPLACE"] = ",".join(names)


def _exec_as_rank(args: Namespace) -> NoReturn:
    """Replace this process by the script, as a rank of another launcher."""
    program = [] if args.no_python else [sys.executable, *(["-m"] if args.module else [])]
    program += [args.training_script, *args.training_script_args]
    os.execvp(program[0], program)


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
