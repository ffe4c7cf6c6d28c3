"""The job's key, a secret that all processes of the job share.

The key is 32 random bytes, written as 64 hexadecimal digits and a newline. It protects the
rendezvous between hosts and the transport `relay`. A process gets it as an open descriptor or as a
file that only its user can read. It is never on a command line or in the value of an environment
variable, which others on the machine can see.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import stat

from phalanx import env
from phalanx.usage_errors import UsageError

SIZE = 32
"""The size of a key in bytes."""

_TEXT = re.compile(rb"[0-9a-fA-F]{64}\n?")
_LENGTH = 2 * SIZE + 1
_SEALS = (
    fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL  # of a memfd
)
_MFD_NOEXEC_SEAL = 8  # some systems require it; Python 3.10 does not define it
_EXPECTED = "expected 64 hexadecimal digits, as written by `phalanx key PATH`"


def derive(key: bytes, purpose: str) -> bytes:
    """Derive 32 bytes from a key for a purpose; they reveal nothing about the key."""
    return hmac.digest(key, purpose.encode(), hashlib.sha256)


def create_file(path: str) -> None:
    """Create a file with a new key that only its owner can read.

    Raises:
        UsageError: The file exists, or cannot be created.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise UsageError(
            f"{path} already exists: choose another name, or remove it if no job uses it"
        ) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be created: {error.strerror}") from None
    with open(descriptor, "wb") as file:
        file.write(_encode(secrets.token_bytes(SIZE)))


def from_file(path: str, source: str = "--key-file") -> bytes:
    """Read a key from a file that belongs to this user and that nobody else can access.

    Args:
        path: The path of the file.
        source: The option or variable that gave the path, for the message.

    Raises:
        UsageError: The file cannot be read, others can access it, or it does not hold a key.
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(f"{source} is {path}, which is not a regular file: {_EXPECTED}")
            text = file.read(_LENGTH + 1)
    except OSError as error:
        raise UsageError(
            f"{source} is {path}, which cannot be read: {error.strerror}; create a new key with "
            f"`phalanx key {path}`, and copy it to each host"
        ) from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise UsageError(
            f"{source} is {path}, of user {status.st_uid} with mode {status.st_mode & 0o777:04o}: "
            f"expected a file of user {os.geteuid()} with mode 0600; run chmod 600, and create a "
            "new key if others could read this one"
        )
    return _decode(text, f"{source} is {path}")


def from_descriptor(descriptor: int, source: str = "--key-fd") -> bytes:
    """Read a key from an inherited pipe or file, up to the end of the line; may block.

    Args:
        descriptor: The descriptor. It stays open, and data after the key stays unread.
        source: The option or variable that gave the descriptor, for the message.

    Raises:
        UsageError: The descriptor is not open, or does not hold a key.
    """
    text = b""
    try:
        while len(text) < _LENGTH and not text.endswith(b"\n"):
            part = os.read(descriptor, _LENGTH - len(text))
            if not part:
                break
            text += part
    except OverflowError:
        raise UsageError(
            f"{source} is {descriptor}, which is not the number of an open file"
        ) from None
    except OSError as error:
        raise UsageError(
            f"{source} is {descriptor}, which cannot be read: {error.strerror}"
        ) from None
    return _decode(text, f"{source} is {descriptor}")


def to_sealed_memory(key: bytes) -> int:
    """Return a descriptor, to be inherited, of sealed memory that holds the key."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create("phalanx-key", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:  # Linux before 6.3
        if error.errno != errno.EINVAL:
            raise
        descriptor = os.memfd_create("phalanx-key", flags)
    os.fchmod(descriptor, 0o400)
    os.write(descriptor, _encode(key))
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def from_environment() -> bytes | None:
    """Return the key of this process's job, as its environment gives it; None if it gives none.

    Raises:
        UsageError: A variable is malformed, or the descriptor or file that it names has no key.
    """
    try:
        descriptor, path = env.key()
    except ValueError as error:
        raise UsageError(str(error)) from None
    if descriptor is not None:
        source = "PHALANX_KEY_FD in the environment"
        # In a process that did not inherit the descriptor, this number may be another open file.
        try:
            is_key = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        except (OSError, OverflowError):
            is_key = False
        if not is_key:
            raise UsageError(
                f"{source} is {descriptor}, which is not the key that the launcher gave its ranks: "
                "if a rank started this process without its open files, set PHALANX_KEY_FILE"
            )
        return _decode(os.pread(descriptor, _LENGTH, 0), f"{source} is {descriptor}")
    return from_file(path, "PHALANX_KEY_FILE in the environment") if path else None


def _encode(key: bytes) -> bytes:
    return key.hex().encode() + b"\n"


def _decode(text: bytes, source: str) -> bytes:
    if not _TEXT.fullmatch(text):
        raise UsageError(f"{source}, which holds no key: {_EXPECTED}")
    return bytes.fromhex(text.decode())
