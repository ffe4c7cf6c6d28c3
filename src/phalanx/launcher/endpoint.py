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
    "DEFAULT_TIMEOUT",
    "check",
    "is_store_host",
    "presence_timeout",
    "read_timeout",
    "rendezvous_address",
    "rendezvous_timeout",
    "uses_phalanx_store",
]

DEFAULT_TIMEOUT = 600
"""The default of `--rdzv-conf timeout=`: the seconds that hosts wait for each other."""

_DEFAULT_PORTS = {"static": 29500, "c10d": 29400}
_READ_SECONDS = 60
_PRESENCE_SECONDS = 20
_MAX_INTEGER = 1_000_000
_BOOLEANS = {
    **dict.fromkeys(("1", "true", "t", "yes", "y"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n"), False),
}


def check(config: LaunchConfig) -> None:
    """Check the options that the other functions of this module read.

    Raises:
        UsageError: An option is invalid; the message names the value and what was expected.
    """
    if uses_phalanx_store(config):
        rendezvous_address(config)
        is_store_host(config, "")
        for name in config.rdzv_configs:
            if name.endswith("timeout") or name.startswith("keep_alive"):
                _read_integer(config, name, 1)


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
    return _read_integer(config, "timeout", DEFAULT_TIMEOUT)


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
    value = config.rdzv_configs.get("is_host")
    if value is None:
        return bool(host) and _matches_machine_hostname(host), False
    if str(value).lower() not in _BOOLEANS:
        raise UsageError(
            f"--rdzv-conf is_host={value}: expected true on the host of the rendezvous, false on "
            "the others"
        )
    return _BOOLEANS[str(value).lower()], True


def _read_integer(config: LaunchConfig, name: str, default: int) -> int:
    text = str(config.rdzv_configs.get(name, default))
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:20]) <= _MAX_INTEGER):
        raise UsageError(f"--rdzv-conf {name}={text}: expected an integer from 1 to {_MAX_INTEGER}")
    return int(text)
