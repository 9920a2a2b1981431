"""Certificates derived from a secret: the same authority everywhere, and a certificate for each worker."""

from __future__ import annotations

import datetime

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from backhaul.security.certificates import LIFE, SKEW, Authority, uri_of, worker_of

SECRET = bytes(range(32))


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority(SECRET)


def parsed(pem: bytes | str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem if isinstance(pem, bytes) else pem.encode())


def test_the_same_secret_gives_the_same_authority(authority: Authority) -> None:
    again = Authority(SECRET)
    assert again.name == authority.name
    assert parsed(again.certificate).public_key() == parsed(authority.certificate).public_key()
    parsed(authority.issue("ana").certificate).verify_directly_issued_by(parsed(again.certificate))


def test_the_authority_of_a_known_secret(authority: Authority) -> None:
    """Workers of earlier versions would not accept another authority."""
    assert authority.name == "backhaul cluster de3d4a750a150d18"


@pytest.mark.parametrize("other", [bytes(range(1, 33)), SECRET + b"\0", SECRET[:-1] + b"\0"])
def test_another_secret_gives_another_authority(authority: Authority, other: bytes) -> None:
    stranger = Authority(other)
    assert stranger.name != authority.name
    with pytest.raises((ValueError, InvalidSignature)):
        parsed(stranger.issue("ana").certificate).verify_directly_issued_by(parsed(authority.certificate))


def test_the_authority_says_what_it_is(authority: Authority) -> None:
    certificate = parsed(authority.certificate)
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert constraints.value == x509.BasicConstraints(ca=True, path_length=0)
    assert certificate.subject == certificate.issuer
    certificate.verify_directly_issued_by(certificate)
    now = datetime.datetime.now(datetime.timezone.utc)
    assert certificate.not_valid_before_utc < now < certificate.not_valid_after_utc


def test_a_certificate_is_for_one_worker_for_a_day_and_for_both_sides(authority: Authority) -> None:
    now = datetime.datetime(2030, 5, 1, 12, tzinfo=datetime.timezone.utc)
    issued = authority.issue("ana", now)
    certificate = parsed(issued.certificate)
    assert certificate.not_valid_before_utc == now - SKEW
    assert certificate.not_valid_after_utc == now + LIFE
    assert datetime.timedelta(hours=24) == LIFE
    assert now < issued.renew_at == now + LIFE / 2
    extensions = certificate.extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.UniformResourceIdentifier("backhaul:worker:ana")]
    usage = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usage) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign


def test_no_two_certificates_have_the_same_key(authority: Authority) -> None:
    one, other = authority.issue("ana"), authority.issue("ana")
    assert one.key != other.key
    first, second = parsed(one.certificate), parsed(other.certificate)
    assert first.public_key() != second.public_key()
    assert first.serial_number != second.serial_number


NAMES = ["ana", "worker 1", "a:b/c?d#e%20f", "naïve ☃", "x" * 64, "ä" * 64, "x" * 128, '=,+"\\<>;', "*.example.org"]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_that_a_worker_can_have(authority: Authority, name: str) -> None:
    certificate = parsed(authority.issue(name).certificate)
    (uri,) = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert worker_of(uri.value) == name
    assert uri.value.isascii()
    common = [attribute.value for attribute in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    assert common == ([name] if len(name.encode()) <= 64 else [])


def test_uris_that_name_no_worker() -> None:
    assert uri_of("a b") == "backhaul:worker:a%20b"
    for uri in ("spiffe://example.org/ana", "", "backhaul:", "xbackhaul:worker:ana"):
        assert worker_of(uri) is None


def test_nothing_shows_the_secret(authority: Authority) -> None:
    issued = authority.issue("ana")
    shown = authority.certificate.encode() + issued.certificate + issued.key + repr(authority).encode()
    assert SECRET.hex().encode() not in shown
    private = authority._key.private_numbers().private_value
    assert f"{private:x}".encode() not in shown
    assert authority._key.curve.name == ec.SECP256R1.name
