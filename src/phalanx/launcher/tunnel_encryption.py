"""TLS for connections of the tunnel, with a certificate that follows from the job's key.

Both sides have the same certificate and its private key, and accept no other, so that each proves
its knowledge of the job's key again, bound to this connection. The certificate is not bound to
names or times, since hosts may be reached by several names, and clocks may be off.
"""

from __future__ import annotations

import os
import ssl
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from phalanx.key import derive

if TYPE_CHECKING:
    from asyncio import StreamWriter


def make_context(key: bytes, *, is_server: bool) -> ssl.SSLContext:
    """Return the settings of one side for TLS 1.3."""
    certificate, private_key = _make_certificate(key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    # It takes them from files only, and the key must not be in one.
    with open(os.memfd_create("phalanx-certificate", os.MFD_CLOEXEC), "wb") as file:
        file.write(private_key + certificate)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context


def _make_certificate(key: bytes) -> tuple[bytes, bytes]:
    """Return a certificate and its private key, as PEM: the same ones for the same key."""
    from cryptography import x509  # imported late: jobs on one host do not need it
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private_key = Ed25519PrivateKey.from_private_bytes(derive(key, "tunnel certificate"))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "phalanx")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private_key.public_key())
        .serial_number(1)
        .not_valid_before(datetime(1970, 1, 1, tzinfo=timezone.utc))
        .not_valid_after(datetime(9999, 12, 31, tzinfo=timezone.utc))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(private_key, None)
    )
    pem = serialization.Encoding.PEM
    private = private_key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(pem), private


async def encrypt(writer: StreamWriter, context: ssl.SSLContext, *, is_server: bool) -> None:
    """Encrypt what is sent and received on a connection from now on. Has no timeout.

    The client must not send anything between the server's last plain message and this call.

    Raises:
        OSError: The connection is broken, or the peer does not have the key.
    """
    if hasattr(writer, "start_tls"):
        await writer.start_tls(context)
        return
    import asyncio  # Python 3.10

    stream: Any = writer
    protocol = stream.transport.get_protocol()
    transport = await asyncio.get_running_loop().start_tls(
        stream.transport, protocol, context, server_side=is_server
    )
    stream._transport = transport
    protocol._over_ssl = True
