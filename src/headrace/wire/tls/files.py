"""Loads and checks one end's certificate files, at start and again when they change.

No certificate is parsed here: OpenSSL verifies the files when one end, at start, makes a handshake with itself.
"""

from __future__ import annotations

import logging
import ssl
import time
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from headrace.core.clock import Clock
from headrace.core.errors import ConfigError
from headrace.core.regular_files import MAX_SECRET_BYTES, read_file
from headrace.machine.folders import expanded
from headrace.machine.private_files import check_private_file
from headrace.wire.tls.faults import EXPIRED, NOT_YET_VALID, certificate_fault
from headrace.wire.tls.watched import Watched

log = logging.getLogger(__name__)

ALPN = "h2"
"""The protocol inside TLS; gRPC hangs up where it is not agreed on."""

CA_NAME, CERTIFICATE_NAME, KEY_NAME, TOKEN_NAME = "ca.crt", "tls.crt", "tls.key", "token"
"""File names in a folder that `headrace tls init` makes. The first three are cert-manager's and Kubernetes' names."""


class TlsRole(StrEnum):
    """An end of the wire. Its certificate has the extended key usage of TLS servers or of TLS clients."""

    ENGINE = "engine"
    GATEWAY = "gateway"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Paths of three PEM files.

    ca           the authority that signs the certificates of both ends
    certificate  this end's own, intermediate ones after it
    key          its private key: no passphrase, and closed to other users
    """

    ca: str
    certificate: str
    key: str

    @property
    def paths(self) -> tuple[str, str, str]:
        return self.ca, self.certificate, self.key


def files_in(folder: str | Path) -> TlsFiles:
    """The files of a folder as `headrace tls init` makes it."""
    path = expanded(str(folder))
    return TlsFiles(ca=str(path / CA_NAME), certificate=str(path / CERTIFICATE_NAME), key=str(path / KEY_NAME))


def token_path(token_file: str, tls_dir: str) -> str:
    """The file with the token: the one that is named, else the one in the folder of certificates; empty where neither is given."""
    return token_file or (str(expanded(tls_dir) / TOKEN_NAME) if tls_dir else "")


@dataclass(frozen=True, slots=True)
class LoadedCertificates:
    """The files' content.

    context               verifies the other end; a gateway's also checks the name that was dialled
    ca, certificate, key  PEM, for gRPC
    """

    context: ssl.SSLContext
    ca: bytes
    certificate: bytes
    key: bytes


class Certificates(Watched[LoadedCertificates]):
    """The certificates of one end, loaded again when their files change."""

    def __init__(self, files: TlsFiles, role: TlsRole, clock: Clock = time.monotonic) -> None:
        """Raises ConfigError with the file that cannot be used and why."""
        super().__init__(files.paths, partial(load_certificates, files, role), clock)
        self.files = files


def load_certificates(files: TlsFiles, role: TlsRole) -> LoadedCertificates:
    """Read and check one end's files. A certificate that is not valid now is logged and loaded: it may be renewed later.

    Raises ConfigError about `tls_dir` for a file that cannot be read, a key that other users can read, a key that does not match its
    certificate, and a certificate of another authority or role.
    """
    check_private_file("tls_dir", files.key)
    ca, certificate, key = (_read(path) for path in files.paths)
    context = _context(files, role is TlsRole.ENGINE)
    _require_peer(context, files)
    _check_own(files, role)
    return LoadedCertificates(context, ca, certificate, key)


def _context(files: TlsFiles, is_server: bool) -> ssl.SSLContext:
    """A context with this end's certificate that does not verify the other end yet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN])
    try:
        # An empty passphrase: OpenSSL would ask for one on the terminal.
        context.load_cert_chain(files.certificate, files.key, password="")
    except (ssl.SSLError, OSError) as error:
        what = "does not fit" if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH" else "is no PEM file without passphrase beside"
        raise ConfigError("tls_dir", f"{files.key} {what} {files.certificate}") from error
    return context


def _require_peer(context: ssl.SSLContext, files: TlsFiles) -> None:
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(files.ca)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError("tls_dir", f"{files.ca} holds no certificate in PEM") from error


def _check_own(files: TlsFiles, role: TlsRole) -> None:
    """Check this end's certificate as the other end will, by a handshake with itself in memory. Raises ConfigError."""
    client, server = _context(files, False), _context(files, True)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    _require_peer(client if role is TlsRole.ENGINE else server, files)
    try:
        shake_hands(client, server)
    except ssl.SSLCertVerificationError as error:
        fault = certificate_fault(error, files.ca)
        if error.verify_code not in (EXPIRED, NOT_YET_VALID):
            raise ConfigError("tls_dir", f"{files.certificate} {fault}", f"It must be a certificate for the {role}.") from error
        log.warning("%s %s; other machines refuse it", files.certificate, fault)


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """A handshake in memory. Raises ssl.SSLError with what one end has against the other's certificate."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    waiting = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    while waiting:
        end = waiting.pop(0)
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            waiting.append(end)


def _read(path: str) -> bytes:
    try:
        return read_file(path, MAX_SECRET_BYTES)
    except OSError as error:
        raise ConfigError("tls_dir", f"{path} cannot be read ({error.strerror})") from error
