"""Makes a private certificate authority for one site, in one folder, and certificates for its machines (`headrace tls init`).

    DIR/authority.key        signs new certificates; stays in this folder, off the servers
    DIR/ca.crt, DIR/token    the authority's certificate; the secret that gateways send to engines
    DIR/gateway/, DIR/engine-HOST/, DIR/rank-HOST/    for each machine: ca.crt, tls.crt, tls.key, token

Nothing is ever overwritten: an existing file is kept if it is what would be made, else the command is refused.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.core.errors import ConfigError
from headrace.machine.hosts import HOST_NAME
from headrace.wire.tls.files import CA_NAME, CERTIFICATE_NAME, KEY_NAME, TOKEN_NAME, TlsRole

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

AUTHORITY_KEY_NAME = "authority.key"
AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 825
"""The most that strict TLS libraries accept for a server."""

CLOCK_SKEW = timedelta(hours=1)
"""How long before its creation a certificate is valid, for machines whose clocks are late."""

TOKEN_BYTES = 32
NEW_SUFFIX = ".new"

REMAKE = "Remove it to have a new one made, or leave it out."


@dataclass(frozen=True, slots=True)
class SiteAuthority:
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate


@dataclass(frozen=True, slots=True)
class SiteFolder:
    """names   host names and addresses in the certificate
    is_new  False: the folder existed and is kept
    """

    path: Path
    role: TlsRole
    names: tuple[str, ...]
    valid_until: datetime
    is_new: bool


def init_site(
    folder: Path, hosts: Sequence[Sequence[str]] = (), ranks: Sequence[Sequence[str]] = (), *, now: datetime | None = None
) -> list[SiteFolder]:
    """hosts, ranks: of engines, and of engines that are also ranks of replicas on several machines; each with all its names

    Raises ConfigError for an invalid host name, and for existing files that do not belong to this site."""
    now = now or datetime.now(UTC)
    for names in (*hosts, *ranks):
        _check_names(names)
    authority, token = _open_authority(folder, now)
    made = [_site_folder(folder / "gateway", TlsRole.GATEWAY, (), authority, token, now)]
    for role, names in (*((TlsRole.ENGINE, names) for names in hosts), *((TlsRole.RANK, names) for names in ranks)):
        made.append(_site_folder(folder / f"{role}-{names[0].replace(':', '-')}", role, tuple(names), authority, token, now))
    return made


def other_folders(folder: Path, made: Sequence[SiteFolder]) -> list[SiteFolder]:
    """The folders of engines and ranks that earlier runs made, as long as they have a certificate."""
    from cryptography import x509

    others: list[SiteFolder] = []
    for role in (TlsRole.ENGINE, TlsRole.RANK):
        for path in sorted(folder.glob(f"{role}-*")):
            file = path / CERTIFICATE_NAME
            if path.suffix == NEW_SUFFIX or not file.is_file() or path in [each.path for each in made]:
                continue
            try:
                certificate = x509.load_pem_x509_certificate(file.read_bytes())
                names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            except (OSError, ValueError, x509.ExtensionNotFound) as error:
                raise ConfigError(str(file), "cannot be read as a certificate", REMAKE) from error
            others.append(SiteFolder(path, role, tuple(str(name.value) for name in names), certificate.not_valid_after_utc, is_new=False))
    return others


def make_authority(now: datetime) -> SiteAuthority:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = _common_name(f"Headrace authority {secrets.token_hex(4)}")
    usage = _key_usage(signs_certificates=True)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    return SiteAuthority(key, _sign(builder, key.public_key(), key, now, now + timedelta(days=AUTHORITY_DAYS)))


def make_certificate(
    authority: SiteAuthority, role: TlsRole, names: Sequence[str], now: datetime
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    return key, certify(authority, key.public_key(), role, names, now)


def certify(
    authority: SiteAuthority, key: ec.EllipticCurvePublicKey, role: TlsRole, names: Sequence[str], now: datetime
) -> x509.Certificate:
    """The certificate ends no later than the authority's."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    usages = [ExtendedKeyUsageOID.CLIENT_AUTH] if role is not TlsRole.ENGINE else []
    usages += [ExtendedKeyUsageOID.SERVER_AUTH] if role is not TlsRole.GATEWAY else []
    names = names or [str(role)]
    builder = (
        x509.CertificateBuilder()
        .subject_name(_common_name(f"Headrace {role} {names[0]}"[:64]))
        .issuer_name(authority.certificate.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False)
    )
    until = min(now + timedelta(days=CERTIFICATE_DAYS), authority.certificate.not_valid_after_utc)
    return _sign(builder, key, authority.key, now, until)


def pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def pem_of_certificate(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _sign(
    builder: x509.CertificateBuilder, public: ec.EllipticCurvePublicKey, signer: ec.EllipticCurvePrivateKey, now: datetime, until: datetime
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    return (
        builder.public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(signer, hashes.SHA256())
    )


def _common_name(text: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name.lower())


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        try:
            ipaddress.ip_address(name)
        except ValueError:
            if HOST_NAME.fullmatch(name) is None:
                remedy = "Write a name or an address without port; several of one machine are joined by commas."
                raise ConfigError("--host", f"{name!r} is neither a host's name nor an address", remedy) from None


def _open_authority(folder: Path, now: datetime) -> tuple[SiteAuthority, str]:
    """The authority and the token, made if there are none. Raises ConfigError if the folder holds something else."""
    parts = [folder / name for name in (AUTHORITY_KEY_NAME, CA_NAME, TOKEN_NAME)]
    present = [part for part in parts if part.exists()]
    if len(present) == len(parts):
        return _read_authority(folder), (folder / TOKEN_NAME).read_text(encoding="ascii").strip()
    if folder.exists() and (present or not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(str(folder), "holds something else than a whole authority", "Give a new or an empty folder.")
    authority, token = make_authority(now), secrets.token_urlsafe(TOKEN_BYTES)
    files = {AUTHORITY_KEY_NAME: pem_of_key(authority.key), CA_NAME: pem_of_certificate(authority.certificate)}
    write_folder(folder, {**files, TOKEN_NAME: token.encode() + b"\n"})
    return authority, token


def _read_authority(folder: Path) -> SiteAuthority:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key((folder / AUTHORITY_KEY_NAME).read_bytes(), None)
        certificate = x509.load_pem_x509_certificate((folder / CA_NAME).read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(str(folder), f"its authority cannot be read ({error})") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ConfigError(str(folder / AUTHORITY_KEY_NAME), f"is not the key of {CA_NAME}")
    return SiteAuthority(key, certificate)


def _site_folder(path: Path, role: TlsRole, names: tuple[str, ...], authority: SiteAuthority, token: str, now: datetime) -> SiteFolder:
    if path.exists():
        certificate = _checked_certificate(path, names, authority)
        _check_rest(path, certificate, authority, token)
        return SiteFolder(path, role, names, certificate.not_valid_after_utc, is_new=False)
    key, certificate = make_certificate(authority, role, names, now)
    content = {
        CA_NAME: pem_of_certificate(authority.certificate),
        CERTIFICATE_NAME: pem_of_certificate(certificate),
        KEY_NAME: pem_of_key(key),
        TOKEN_NAME: token.encode() + b"\n",
    }
    write_folder(path, content)
    return SiteFolder(path, role, names, certificate.not_valid_after_utc, is_new=True)


def _checked_certificate(path: Path, names: Sequence[str], authority: SiteAuthority) -> x509.Certificate:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    missing = [name for name in (CA_NAME, CERTIFICATE_NAME, KEY_NAME, TOKEN_NAME) if not (path / name).is_file()]
    if missing:
        raise ConfigError(str(path), f"lacks {', '.join(missing)}", REMAKE)
    try:
        certificate = x509.load_pem_x509_certificate((path / CERTIFICATE_NAME).read_bytes())
        certificate.verify_directly_issued_by(authority.certificate)
    except (OSError, ValueError, TypeError, InvalidSignature) as error:
        raise ConfigError(str(path / CERTIFICATE_NAME), "was not signed by this folder's authority", REMAKE) from error
    has = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    if names and {_general_name(name) for name in names} != set(has):
        shown = ", ".join(str(name.value) for name in has)
        raise ConfigError(str(path), f"has a certificate for {shown}, and not for {', '.join(names)}", REMAKE)
    return certificate


def _check_rest(path: Path, certificate: x509.Certificate, authority: SiteAuthority, token: str) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        has_authority = x509.load_pem_x509_certificate((path / CA_NAME).read_bytes()) == authority.certificate
        has_key = load_pem_private_key((path / KEY_NAME).read_bytes(), None).public_key() == certificate.public_key()
        has_token = (path / TOKEN_NAME).read_text(encoding="ascii").strip() == token
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(str(path), f"cannot be read ({error})", REMAKE) from error
    for name, is_right in ((CA_NAME, has_authority), (KEY_NAME, has_key), (TOKEN_NAME, has_token)):
        if not is_right:
            raise ConfigError(str(path / name), "is another one than this site's, so both ends would refuse each other", REMAKE)


def write_folder(path: Path, content: Mapping[str, bytes]) -> None:
    """Complete or not at all; all users may read certificates, only this user the rest. Raises ConfigError."""
    new = path.with_name(f"{path.name}{NEW_SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(new, ignore_errors=True)  # left by a run that was killed
        new.mkdir(mode=0o700)
        for name, data in content.items():
            mode = 0o644 if name.endswith(".crt") else 0o600
            with open(os.open(new / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(data)
        new.rename(path)  # an empty folder is replaced, any other stays
    except OSError as error:
        raise ConfigError(str(path), f"cannot be written ({error.strerror})") from error
