"""The rendezvous endpoint of a job and its timeouts, from the options of `phalanx run`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.elastic.rendezvous.utils import (
    _matches_machine_hostname,
    parse_rendezvous_endpoint,
)

from phalanx.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

__all__ = [
    "PATIENCE",
    "check",
    "endpoint",
    "has_gate",
    "is_ours",
    "patience",
    "presence",
    "read_limit",
]

PATIENCE = 600
"""The default seconds that hosts wait for each other; `--rdzv-conf timeout=` overrides it."""

_DEFAULT_PORTS = {"static": 29500, "c10d": 29400}
_READ_SECONDS = 60
_PRESENCE_SECONDS = 20
_MOST = 1_000_000
_ANSWERS = {
    **dict.fromkeys(("1", "true", "t", "yes", "y"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n"), False),
}


def check(config: LaunchConfig) -> None:
    """Check the options that the other functions of this module read.

    Raises:
        UsageError: An option is invalid; the message names the value and what was expected.
    """
    if is_ours(config):
        endpoint(config)
        has_gate(config, "")
        for name in config.rdzv_configs:
            if name.endswith("timeout") or name.startswith("keep_alive"):
                _integer(config, name, 1)


def is_ours(config: LaunchConfig) -> bool:
    """Return whether Phalanx opens the store of the rendezvous; otherwise PyTorch does."""
    return config.rdzv_backend in _DEFAULT_PORTS and "store_type" not in config.rdzv_configs


def endpoint(config: LaunchConfig) -> tuple[str, int]:
    """Return the host of the gate and its port.

    Raises:
        UsageError: The endpoint is malformed.
    """
    default = _DEFAULT_PORTS[config.rdzv_backend]
    least = 1 if config.max_nodes > 1 else 0
    try:
        host, port = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=default)
        host.encode("idna")  # a name lookup encodes it in the same way
        if port < least:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"the hosts are to meet at {config.rdzv_endpoint!r}, by --rdzv-endpoint or "
            "--master-addr: expected HOST:PORT, with the name or the address of a host (without "
            f"blanks or %) and a port from {least} to 65535"
        ) from None
    return str(host), int(port)


def patience(config: LaunchConfig) -> int:
    """Return the seconds that hosts wait for each other."""
    return _integer(config, "timeout", PATIENCE)


def read_limit(config: LaunchConfig) -> int:
    """Return the seconds that an operation of the store may take, once the hosts have met."""
    if config.rdzv_backend == "static":
        return patience(config)
    return _integer(config, "read_timeout", _READ_SECONDS)


def presence(config: LaunchConfig) -> int:
    """Return the seconds within which a host must appear, once the rendezvous has counted it.

    This is a little longer than the rendezvous takes to detect a dead host, so that the next one
    does not count it again.
    """
    if not is_ours(config):
        return _PRESENCE_SECONDS
    interval = _integer(config, "keep_alive_interval", 5)
    return interval * _integer(config, "keep_alive_max_attempt", 3) + 5


def has_gate(config: LaunchConfig, host: str) -> tuple[bool, bool]:
    """Return whether this host has the gate, and whether that is certain.

    It is not certain if it was guessed from the host name of the endpoint.

    Raises:
        UsageError: `is_host` in `--rdzv-conf` is neither true nor false.
    """
    if config.rdzv_backend == "static":
        return config.rdzv_configs.get("rank") == 0, True
    said = config.rdzv_configs.get("is_host")
    if said is None:
        return bool(host) and _matches_machine_hostname(host), False
    if str(said).lower() not in _ANSWERS:
        raise UsageError(
            f"--rdzv-conf is_host={said}: expected true on the host where the hosts meet, false on "
            "the others"
        )
    return _ANSWERS[str(said).lower()], True


def _integer(config: LaunchConfig, name: str, default: int) -> int:
    given = str(config.rdzv_configs.get(name, default))
    if not (given.isascii() and given.isdecimal() and 1 <= int(given[:20]) <= _MOST):
        raise UsageError(f"--rdzv-conf {name}={given}: expected an integer from 1 to {_MOST}")
    return int(given)
