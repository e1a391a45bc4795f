"""Loads and checks one end's certificate files, at start and again when they change.

No certificate is parsed here: OpenSSL verifies the files in a handshake of one end with itself.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from headrace.core.clock import Clock
from headrace.core.errors import ConfigError
from headrace.core.regular_files import MAX_SECRET_BYTES, READ_S, FileThread, in_time, read_file
from headrace.machine.folders import expanded
from headrace.machine.private_files import check_private_file

log = logging.getLogger(__name__)

EXPIRED = 10
NOT_YET_VALID = 9
_OTHER_AUTHORITY = "was not signed by the authority in {ca}"
_VERIFY_WORDS = {
    NOT_YET_VALID: "is not valid yet: compare the clocks of both machines",
    EXPIRED: "has expired",
    18: _OTHER_AUTHORITY,
    19: _OTHER_AUTHORITY,
    20: _OTHER_AUTHORITY,
    21: _OTHER_AUTHORITY,
    7: _OTHER_AUTHORITY,  # same name of the authority, other key
    26: "is for another role (its extended key usage)",
}
"""OpenSSL's codes (X509_V_ERR_*)."""

_ALERT_WORDS = {
    "CERTIFICATE_EXPIRED": "it has expired, or is not valid yet there",
    "UNKNOWN_CA": "it was not signed by the authority that the other end knows",
    "DECRYPT_ERROR": "it was not signed by the authority that the other end knows",
    "UNSUPPORTED_CERTIFICATE": "it is for another role (its extended key usage)",
    "CERTIFICATE_REQUIRED": "none was sent",
    "BAD_CERTIFICATE": "it is not for the name or address that was dialled",
}

_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE")


def certificate_fault(error: ssl.SSLCertVerificationError, ca: str) -> str:
    """Continues "the engine's certificate ..."."""
    words = _VERIFY_WORDS.get(error.verify_code)
    return words.format(ca=ca) if words else f"is refused: {error.verify_message}"


def handshake_fault(error: Exception, *, own: str, peer: str, ca: str) -> str:
    """Empty when the error does not name a reason.

    own, peer  "this engine" and "the gateway"
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{peer}'s certificate {certificate_fault(error, ca)}"
    if not isinstance(error, ssl.SSLError):
        return ""
    reason = error.reason or ""
    if "PEER_DID_NOT_RETURN" in reason:
        return f"{peer} sent no certificate"
    if reason in _NO_TLS:
        return f"{peer} does not speak TLS"
    before, separator, alert = reason.partition("ALERT_")
    if separator and before:
        return f"{peer} refused {own}'s certificate: {_ALERT_WORDS.get(alert, alert.replace('_', ' ').lower())}"
    return ""


Value = TypeVar("Value")
Stamp = tuple[tuple[int, ...] | None, ...]

LOOK_S = 1.0


class Watched(Generic[Value]):
    """What some files hold, loaded again when they change, so that no connection waits for the file system."""

    def __init__(self, paths: tuple[str, ...], load: Callable[[], Value], clock: Clock = time.monotonic) -> None:
        self._paths, self._load, self._clock = paths, load, clock
        self._stamp, self._looked_at = _stamp_of(paths), clock()  # before loading, so that a change meanwhile is seen
        self._loaded = load()
        self._looker = threading.Thread()
        self._logged: tuple[Stamp, str] | None = None

    def current(self) -> Value:
        """Never waits or raises: files that cannot be used are logged, and tried again."""
        silent_s = self._clock() - self._looked_at
        if silent_s < LOOK_S:
            return self._loaded
        if self._looker.is_alive():
            if silent_s >= READ_S:
                self._report((), f"{self._paths[0]}: the file system does not answer")
            return self._loaded
        self._looked_at += silent_s
        held, self._looker = self._loaded, FileThread(self._look)
        try:
            self._looker.start()
        except RuntimeError as error:  # the limit of threads
            self._report((), str(error))
        return held

    def _look(self) -> None:
        stamp = _stamp_of(self._paths)
        if stamp != self._stamp:
            try:
                self._loaded = self._load()
            except ConfigError as error:
                self._report(stamp, str(error))
                return
            self._stamp = stamp  # after a success alone: what failed for want of descriptors works later
            log.info("the certificates were read again: %s", self._paths[0])
        self._logged = None

    def _report(self, stamp: Stamp, reason: str) -> None:
        if self._logged != (stamp, reason):
            self._logged = stamp, reason
            log.error("changed certificates are not used: %s", reason)


def _stamp_of(paths: tuple[str, ...]) -> Stamp:
    try:
        return in_time(lambda: tuple(_file_stamp(path) for path in paths))
    except OSError:  # at the start, where loading says more
        return ()


def _file_stamp(path: str) -> tuple[int, ...] | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_mtime_ns, info.st_ctime_ns, info.st_size, info.st_ino


ALPN = "h2"
"""gRPC hangs up where it is not agreed on."""

CA_NAME, CERTIFICATE_NAME, KEY_NAME, TOKEN_NAME = "ca.crt", "tls.crt", "tls.key", "token"
"""The first three are cert-manager's names."""


class TlsRole(StrEnum):
    """What a certificate is for: engines are TLS servers, gateways clients, and ranks of several machines both."""

    ENGINE = "engine"
    GATEWAY = "gateway"
    RANK = "rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM. certificate: intermediate ones after it; key: no passphrase, and closed to other users"""

    ca: str
    certificate: str
    key: str

    @property
    def paths(self) -> tuple[str, str, str]:
        return self.ca, self.certificate, self.key


def files_in(folder: str | Path) -> TlsFiles:
    path = expanded(str(folder))
    return TlsFiles(ca=str(path / CA_NAME), certificate=str(path / CERTIFICATE_NAME), key=str(path / KEY_NAME))


def token_path(token_file: str, tls_dir: str) -> str:
    return token_file or (str(expanded(tls_dir) / TOKEN_NAME) if tls_dir else "")


@dataclass(frozen=True, slots=True)
class LoadedCertificates:
    """context: a gateway's also checks the name that was dialled; the others: PEM"""

    context: ssl.SSLContext
    ca: bytes
    certificate: bytes
    key: bytes


class Certificates(Watched[LoadedCertificates]):
    def __init__(self, files: TlsFiles, role: TlsRole, clock: Clock = time.monotonic) -> None:
        """Raises ConfigError."""
        super().__init__(files.paths, partial(load_certificates, files, role), clock)
        self.files = files


def load_certificates(files: TlsFiles, role: TlsRole) -> LoadedCertificates:
    """For the TLS client's end, but for an engine's. A certificate that is not valid now is logged and loaded: it may be renewed later.

    Raises ConfigError about `tls_dir` for a file that cannot be used.
    """
    check_private_file("tls_dir", files.key)
    ca, certificate, key = (_read(path) for path in files.paths)
    context = _context(files, role is TlsRole.ENGINE)
    _require_peer(context, files)
    _check_own(files, role)
    return LoadedCertificates(context, ca, certificate, key)


def _context(files: TlsFiles, is_server: bool) -> ssl.SSLContext:
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
    """A handshake with itself in memory. Raises ConfigError."""
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
    """Raises ssl.SSLError with what one end has against the other's certificate."""
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
