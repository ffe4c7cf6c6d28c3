"""Functions that read the environment variables through which the hosts of a job connect.

`env` documents the variables. As there, a malformed value raises `ValueError`, which callers turn
into `UsageError`.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from phalanx.env import integer

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "advertised_address",
    "host_id",
    "interface",
    "key",
    "relay",
    "transport",
    "tunnel_host",
]

_ADDRESS = re.compile(
    r"(?:\[(?P<six>[0-9a-fA-F:.%]+)\]|(?P<host>[^\s:\[\]/]+))(?::(?P<port>[0-9]{1,5}))?", re.ASCII
)


def tunnel_host(environ: Mapping[str, str] | None = None) -> str:
    """Return the host that `PHALANX_TUNNEL_HOST` names; empty if it is unset.

    Args:
        environ: The environment to read; default `os.environ`.
    """
    return (os.environ if environ is None else environ).get("PHALANX_TUNNEL_HOST", "")


def relay(environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Return "listen" or "connect", and a socket's path, of `PHALANX_RELAY`; empty if it is unset.

    Args:
        environ: The environment to read; default `os.environ`.

    Raises:
        ValueError: The value has another form.
    """
    text = (os.environ if environ is None else environ).get("PHALANX_RELAY", "")
    mode, _, path = text.partition(":")
    if text and (mode not in ("listen", "connect") or not path):
        raise ValueError(
            f"PHALANX_RELAY={text!r} in the environment: expected listen:SOCKET or connect:SOCKET, "
            "as `phalanx run` sets it for its ranks; unset it"
        )
    return mode, path


def advertised_address(environ: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Return host and port of `PHALANX_ADVERTISE_ADDR`; without them, an empty host and port 0.

    Args:
        environ: The environment to read; default `os.environ`.

    Raises:
        ValueError: The value is neither HOST nor HOST:PORT.
    """
    text = (os.environ if environ is None else environ).get("PHALANX_ADVERTISE_ADDR", "").strip()
    found = _ADDRESS.fullmatch(text)
    port = int(found["port"] or 0) if found else 0
    if text and (not found or port > 65535 or found["port"] == "0"):
        raise ValueError(
            f"PHALANX_ADVERTISE_ADDR={text!r} in the environment: expected HOST or HOST:PORT, with "
            "an IPv6 address in brackets"
        )
    return (found["six"] or found["host"], port) if text and found else ("", 0)


def key(environ: Mapping[str, str] | None = None) -> tuple[int | None, str]:
    """Return the inherited descriptor of the job's key, or None, and the path of its key file.

    Args:
        environ: The environment to read; default `os.environ`.

    Raises:
        ValueError: `PHALANX_KEY_FD` is not a descriptor.
    """
    environ = os.environ if environ is None else environ
    descriptor = integer("PHALANX_KEY_FD", minimum=0, environ=environ)
    return descriptor, environ.get("PHALANX_KEY_FILE", "")


def host_id(environ: Mapping[str, str] | None = None) -> str:
    """Return the host that `PHALANX_HOST_ID` names; empty if it is unset.

    Args:
        environ: The environment to read; default `os.environ`.
    """
    return (os.environ if environ is None else environ).get("PHALANX_HOST_ID", "")


def transport(environ: Mapping[str, str] | None = None) -> str:
    """Return the transport that `PHALANX_TRANSPORT` names, in lower case; empty if it is unset.

    Args:
        environ: The environment to read; default `os.environ`.
    """
    return (os.environ if environ is None else environ).get("PHALANX_TRANSPORT", "").strip().lower()


def interface(environ: Mapping[str, str] | None = None) -> str:
    """Return the interface or address that `PHALANX_INTERFACE` names; empty if it is unset.

    Args:
        environ: The environment to read; default `os.environ`.
    """
    return (os.environ if environ is None else environ).get("PHALANX_INTERFACE", "").strip()
