"""How a worker tells peers from strangers: the key or certificates that it would use, and whether they are usable.

The report never shows the key itself. It shows the public fingerprint of the cluster's certificate authority,
which is the same on all hosts that have the same key.
"""

from __future__ import annotations

import datetime
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from backhaul.doctor.report import Report
from backhaul.errors import OptionError
from backhaul.options import SECRET_VARIABLE, RpcOptions
from backhaul.security.certificates import SKEW, Authority, worker_of
from backhaul.security.keys import KEY_FILE_VARIABLE
from backhaul.security.tls import TLS

if TYPE_CHECKING:
    from cryptography import x509

_SOON = datetime.timedelta(days=7)

_TRUST = {
    "cluster": "an accepted peer may call any function, and may send pickles",
    "federation": "an accepted peer may call only what is marked with @rpc.expose; nothing is pickled",
}


class Credentials(NamedTuple):
    """The credentials for peers over TCP."""

    kind: str
    """"tls", "key" or "none"; "bad" if they were given but are unusable."""
    names: frozenset[str] = frozenset()
    """The workers that the user's certificate is for."""


def examine(report: Report, options: RpcOptions, tls: tuple[str, str, str] | None, *, bad_key: bool) -> Credentials:
    """``tls`` are the given paths, whether or not ``options`` accepted them."""
    report.section("authentication")
    report.fact("trust", f"{options.trust}: {_TRUST[options.trust]}", mode=options.trust)
    uses_unix = options.transport != "tcp" and options.policy.is_one_user
    text = f"only processes of user {os.geteuid()}, as the kernel tells (SO_PEERCRED)" if uses_unix else "not used"
    report.fact("unix sockets", text, uid=os.geteuid() if uses_unix else None)
    if tls is not None:
        return _certificates(report, options.tls, *tls)
    if bad_key:
        report.fact("TCP", "not possible: the key is unusable", kind="bad")
        return Credentials("bad")
    try:
        secret = options.secret_or_inherited()
    except OptionError as error:
        report.fact("TCP", "not possible: the key is unusable", kind="bad")
        report.fault(str(error))
        return Credentials("bad")
    if secret is None:
        report.fact("TCP", "not offered: there is neither a key nor a certificate", kind="none")
        return Credentials("none")
    path = options.key_file or os.environ.get(KEY_FILE_VARIABLE)
    cluster = Authority(secret).name.rpartition(" ")[2]
    if path:
        source = "the option key_file" if options.key_file else KEY_FILE_VARIABLE
        mode = stat.S_IMODE(os.stat(path).st_mode)
        _look_at_time(report, path)
        report.fact(
            "TCP",
            f"TLS 1.3, both sides with certificates from {os.path.abspath(path)}, mode {mode:04o} ({source})",
            kind="key",
            key_file=os.path.abspath(path),
            mode=f"{mode:04o}",
        )
        if os.environ.get(SECRET_VARIABLE):
            report.note(f"{SECRET_VARIABLE} is set as well; the key file comes first")
    else:
        report.fact("TCP", f"TLS 1.3, both sides with certificates from the secret in {SECRET_VARIABLE}", kind="key")
    report.fact("cluster", f"{cluster}; all hosts must show the same", fingerprint=cluster)
    return Credentials("key")


def _look_at_time(report: Report, path: str) -> None:
    written = datetime.datetime.fromtimestamp(os.stat(path).st_mtime, datetime.timezone.utc)
    ahead = written - datetime.datetime.now(datetime.timezone.utc)
    if ahead > SKEW:
        report.fault(
            f"the key file {path} was written at {written:%Y-%m-%d %H:%M} UTC, which is in the future: the clock of "
            "this host is slow, or the clock of the writing host was fast. Certificates need clocks that differ by "
            "less than 5 minutes: set them with NTP, then `touch` the file"
        )


def _certificates(report: Report, tls: TLS | None, ca: str, cert: str, key: str) -> Credentials:
    """``tls`` is None if the three files are unusable. The report then still shows what can be read of them."""
    report.fact(
        "TCP",
        f"TLS 1.3, both sides with certificates; here {cert}, its key {key}, trusting the issuers in {ca}",
        kind="tls" if tls else "bad",
        ca=ca,
        cert=cert,
        key=key,
    )
    certificate = _read(cert)
    if certificate is not None:
        _describe(report, certificate)
    return Credentials("bad") if tls is None else Credentials("tls", tls.names())


def _read(path: str) -> x509.Certificate | None:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(Path(path).read_bytes())
    except (OSError, ValueError):
        return None  # the check of the option has reported this


def _describe(report: Report, certificate: x509.Certificate) -> None:
    names = sorted(names_of(certificate))
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    now = datetime.datetime.now(datetime.timezone.utc)
    state = "not valid yet" if now < begin else "expired" if now > end else "valid"
    report.fact("names", ", ".join(names) or "none", names=names)
    report.fact("issuer", certificate.issuer.rfc4514_string(), issuer=certificate.issuer.rfc4514_string())
    report.fact(
        "validity",
        f"from {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC: {state}",
        begin=begin.isoformat(),
        end=end.isoformat(),
        state=state,
    )
    if state == "valid" and end - now < _SOON:
        report.note(
            f"the certificate expires at {end:%Y-%m-%d %H:%M} UTC: replace its files in time; workers read new files "
            "without a restart"
        )


def names_of(certificate: x509.Certificate) -> set[str]:
    """The workers that the certificate is for, by the same rule as in a handshake."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return {str(each.value) for each in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)}
    workers = map(worker_of, found.get_values_for_type(x509.UniformResourceIdentifier))
    return {*filter(None, workers), *found.get_values_for_type(x509.DNSName)}
