"""TLS between trainer and remote engines, with the files of ``rollout.tls``.

Calls are HTTPS: the trainer checks that an authority in ``rollout.tls.ca`` signed the engine's
certificate for the name in its address. For weights the engine connects to the trainer, and takes
no certificate but the one whose digest the trainer sent it over HTTPS.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pyrl_ext.plan import Plan
from pyrl_ext.rollout.remote.auth import require_private

END = "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class Certificate:
    """The certificate by which this host is known.

    Args:
        context: of connections that are made to this host
        digest: SHA-256 of the certificate, in hexadecimal digits
    """

    context: ssl.SSLContext
    digest: str

    @classmethod
    def read(cls, cert: str, key: str) -> Certificate:
        """
        Args:
            cert: file with the certificate, and those between it and the authority's
            key: file with its private key

        Raises: ValueError for files that others can read, or that are no such pair.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        with suppress(OSError):  # it is missing, which the next lines say
            require_private(Path(key), "rollout.tls.key")
        try:
            context.load_cert_chain(cert, key, password="")  # or it asks the terminal
            text = Path(cert).read_text(encoding="ascii").partition(END)[0] + END
            first = text[text.index("-----BEGIN CERTIFICATE-----") :]
            digest = _digest(ssl.PEM_cert_to_DER_cert(first))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"rollout.tls: cert {cert} and key {key}, {error}, expected PEM files of a "
                "certificate and its private key without a passphrase"
            ) from None
        return cls(context, digest)


def certificate_of(plan: Plan) -> Certificate | None:
    """The certificate of this host; None: no TLS. Raises: ValueError as `Certificate.read`."""
    tls = plan.rollout.tls
    return None if tls is None else Certificate.read(plan.resolve(tls.cert), plan.resolve(tls.key))


def trust_of(plan: Plan) -> ssl.SSLContext | None:
    """The context of calls to engines; None: no TLS. Raises: ValueError as `trusting`."""
    tls = plan.rollout.tls
    return None if tls is None else trusting(plan.resolve(tls.ca))


def trusting(ca: str) -> ssl.SSLContext:
    """The context of connections to those that the authorities in a file know by their names.

    Raises: ValueError for a file without certificates.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # none of the system's authorities
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(ca)
    except OSError as error:
        raise ValueError(
            f"rollout.tls.ca: {ca}, {error}, expected a PEM file with the certificate of an "
            "authority"
        ) from None
    return context


def secured(connection: socket.socket, digest: str) -> ssl.SSLSocket | None:
    """A connection to the host that has this certificate; None: it has another one.

    Raises: OSError for an end that does not speak TLS.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # the digest says more than an authority could
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    wrapped = context.wrap_socket(connection)
    found = wrapped.getpeercert(binary_form=True)
    if found is not None and _digest(found) == digest:
        return wrapped
    wrapped.close()
    return None


def shut(connection: socket.socket) -> None:
    """End a connection that another thread reads or writes. Raises: OSError."""
    # not SSLSocket's: after it the other thread would write unencrypted bytes
    socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _digest(certificate: bytes) -> str:
    return hashlib.sha256(certificate).hexdigest()
