"""Certificates as a user would provide them, good and bad, in files."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from backhaul.security.tls import TLS

DAY = datetime.timedelta(days=1)
BOTH = (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH)


class Mint:
    """A user's certificate authority, with its files in ``directory``."""

    def __init__(self, directory: Path, name: str = "example CA") -> None:
        self.directory = directory
        self.ca = directory / f"{name}.pem"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            self._builder(self._name, self._key.public_key(), 365 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca.write_bytes(certificate.public_bytes(Encoding.PEM))

    def issue(
        self,
        name: str,
        *,
        uris: Sequence[str] = (),
        dns: Sequence[str] = (),
        usages: Sequence[Any] = BOTH,
        life: datetime.timedelta = DAY,
        since: datetime.timedelta = -DAY,
        file: str | None = None,
    ) -> tuple[str, str]:
        """The paths of a certificate with this common name, and of its key. ``life`` counts from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key.public_key(), life, since)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        alternatives = [*map(x509.UniformResourceIdentifier, uris), *map(x509.DNSName, dns)]
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        if usages:
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        cert, private = self.directory / f"{file or name}.crt", self.directory / f"{file or name}.key"
        cert.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))
        private.touch(0o600)
        private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return os.fspath(cert), os.fspath(private)

    def tls(self, name: str, **how: Any) -> TLS:
        """The certificates of the worker with this name."""
        cert, key = self.issue(name, **how)
        return TLS(os.fspath(self.ca), cert, key)

    def _builder(
        self, subject: x509.Name, public: Any, life: datetime.timedelta, since: datetime.timedelta = -DAY
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.timezone.utc)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + since)
            .not_valid_after(now + life)
        )
