"""Loads the certificate and key of the HTTP server, and loads them again when their files change. Open connections keep what they have."""

from __future__ import annotations

import logging
import math
import ssl
import time
from functools import partial

from headrace.core.clock import Clock
from headrace.core.errors import ConfigError
from headrace.core.regular_files import MAX_SECRET_BYTES, in_time, read_file
from headrace.gateway.http.config import HttpTls
from headrace.machine.private_files import check_private_file
from headrace.wire.tls.faults import EXPIRED, NOT_YET_VALID, certificate_fault
from headrace.wire.tls.files import shake_hands
from headrace.wire.tls.watched import Watched

log = logging.getLogger(__name__)

ALPN = "http/1.1"


class ServerCertificate(Watched[ssl.SSLContext]):
    """The port's certificate, loaded again when its files change."""

    def __init__(self, files: HttpTls, clock: Clock = time.monotonic) -> None:
        """Raises ConfigError with the file that cannot be used and why."""
        super().__init__((files.certificate, files.key), partial(load_context, files), clock)


def load_context(files: HttpTls) -> ssl.SSLContext:
    """The TLS context of connections. A certificate that is not valid now is logged and loaded: it may be renewed later.

    Raises ConfigError for a file that cannot be read, and a key that other users can read or that does not match the certificate.
    """
    check_private_file("tls.key", files.key)
    for name, path in (("tls.certificate", files.certificate), ("tls.key", files.key)):
        try:
            read_file(path, MAX_SECRET_BYTES)  # OpenSSL opens it by its path, without a bound, and waits for what is no regular file
        except OSError as error:
            raise ConfigError(name, f"{path} cannot be read ({error.strerror})") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols([ALPN])
    try:
        # An empty passphrase: OpenSSL would ask for one on the terminal.
        in_time(lambda: context.load_cert_chain(files.certificate, files.key, password=""))
    except (ssl.SSLError, OSError) as error:
        what = "does not fit" if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH" else "is no PEM file without passphrase beside"
        raise ConfigError("tls.key", f"{files.key} {what} {files.certificate}") from error
    _warn_if_not_valid_now(files, context)
    return context


def _warn_if_not_valid_now(files: HttpTls, context: ssl.SSLContext) -> None:
    """Log that clients refuse a certificate for its dates, as a handshake shows with a client that trusts this certificate itself."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        in_time(lambda: client.load_verify_locations(files.certificate))
        shake_hands(client, context)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in (EXPIRED, NOT_YET_VALID):
            log.warning("%s %s; clients refuse it", files.certificate, certificate_fault(error, files.certificate))
    except OSError:  # no fault of its dates; SSLError is one of these
        return


TLS_HANDSHAKE = 0x16
"""First byte of a TLS handshake; HTTP begins with a letter."""

TLS_NOTICE_S = 60.0
"""Seconds between two log lines about TLS handshakes: a health check over https comes every second."""


SPOKE_HTTPS = "%s spoke https to this http port%s: use http://, let a proxy in front end TLS, or configure gateway.tls"
HANDSHAKE_FAILED = "a TLS handshake failed (%s)%s: http:// to this https port gives HTTP_REQUEST"


class TlsNotice:
    """Logs that clients spoke the wrong protocol (TLS on a plain port, or the reverse). Such a client only sees its connection close."""

    def __init__(self, clock: Clock = time.monotonic, *, text: str = SPOKE_HTTPS) -> None:
        """text: format with two places, for a word about the client and for the number of further clients"""
        self._text = text
        self._clock = clock
        self._due_at = -math.inf
        self._num_unsaid = 0

    def __call__(self, client: str) -> None:
        now = self._clock()
        if now < self._due_at:
            self._num_unsaid += 1
            return
        more = f" (so did {self._num_unsaid} connections before it)" if self._num_unsaid else ""
        log.warning(self._text, client, more)
        self._due_at, self._num_unsaid = now + TLS_NOTICE_S, 0
