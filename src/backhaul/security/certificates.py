"""Certificates minted from a cluster's secret.

The private key of a certificate authority is derived from the secret, so it is the same in every process that knows the
secret. Each process signs a short-lived certificate for itself with that key, and accepts the certificates of others
because they are signed with the same key. Only the secret must be copied from host to host, and it is never sent over a
connection.

A worker's certificate contains its name, as the URI ``backhaul:worker:<name>``.
"""

from __future__ import annotations

import datetime
import hashlib
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, unquote

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

LIFE = datetime.timedelta(hours=24)
SKEW = datetime.timedelta(minutes=5)
"""The clocks of two hosts may differ by this much."""

_INFO = b"backhaul cluster CA v1"
_SCHEME = "backhaul:worker:"
# The number of points of P-256: private keys are 1 … _ORDER - 1.
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_LONGEST_COMMON_NAME = 64
_BEGINNING = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)
_END = datetime.datetime(2120, 1, 1, tzinfo=datetime.timezone.utc)


class Issued(NamedTuple):
    """A certificate and its private key, in PEM, and the time at which to renew it."""

    certificate: bytes
    key: bytes
    renew_at: datetime.datetime


class Authority:
    """The certificate authority that is derived from a secret.

    Making the first one takes about 0.1 s, since it imports ``cryptography``.
    """

    def __init__(self, secret: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        self._key: EllipticCurvePrivateKey = ec.derive_private_key(_scalar(secret), ec.SECP256R1())
        self._certificate = self._sign_itself()

    @property
    def name(self) -> str:
        """A name that distinguishes this cluster from others. It reveals nothing about the secret."""
        return f"backhaul cluster {_fingerprint(self._key.public_key())}"

    @property
    def certificate(self) -> str:
        """The certificate of the authority, in PEM. Each process makes its own; they differ only in the signature."""
        from cryptography.hazmat.primitives.serialization import Encoding

        return self._certificate.public_bytes(Encoding.PEM).decode()

    def issue(self, worker: str, now: datetime.datetime | None = None) -> Issued:
        """A certificate for the worker of this name, with a new private key, valid from ``now`` on."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        now = datetime.datetime.now(datetime.timezone.utc) if now is None else now
        key = ec.generate_private_key(ec.SECP256R1())
        fits = len(worker.encode()) <= _LONGEST_COMMON_NAME
        common = [x509.NameAttribute(NameOID.COMMON_NAME, worker)] if fits else []
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name(common))
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - SKEW)
            .not_valid_after(now + LIFE)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri_of(worker))]), critical=not common
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Issued(certificate.public_bytes(Encoding.PEM), private, now + LIFE / 2)

    def _sign_itself(self) -> x509.Certificate:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import NameOID

        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)])
        public = self._key.public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(public)
            .serial_number(1)
            .not_valid_before(_BEGINNING)
            .not_valid_after(_END)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self._key, hashes.SHA256())
        )


def uri_of(worker: str) -> str:
    """The URI for a worker's name in its certificate."""
    return _SCHEME + quote(worker, safe="")


def worker_of(uri: str) -> str | None:
    """The worker's name in a URI of a certificate; None if it is another kind of URI."""
    return unquote(uri[len(_SCHEME) :]) if uri.startswith(_SCHEME) else None


def _scalar(secret: bytes) -> int:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    # 16 bytes more than the order has, so that all private keys are equally likely.
    drawn = HKDF(hashes.SHA256(), length=48, salt=None, info=_INFO).derive(secret)
    return int.from_bytes(drawn, "big") % (_ORDER - 1) + 1


def _fingerprint(public: EllipticCurvePublicKey) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()[:16]


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
