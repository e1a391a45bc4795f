"""Loads the certificate and key of the HTTP server, and loads them again when their files change. Open connections keep what they have."""

from __future__ import annotations

import logging
import math
import ssl
import threading
import time

from headrace.core.clock import Clock
from headrace.core.errors import ConfigError
from headrace.core.regular_files import MAX_SECRET_BYTES, in_time, read_file
from headrace.gateway.http.config import HttpTls
from headrace.wire.private_files import check_private_file
from headrace.wire.tls.files import stamp_of

log = logging.getLogger(__name__)

ALPN = "http/1.1"
STAMP_S = 1.0
"""Seconds between two looks at the files, which the next new connection after them makes."""


class ServerCertificate:
    """The port's certificate, read again when its files change."""

    def __init__(self, files: HttpTls, clock: Clock = time.monotonic) -> None:
        """Raises ConfigError with the file that cannot be used and why."""
        self._files = files
        self._clock = clock
        self._stamp, self._looked_at = stamp_of((files.certificate, files.key)), clock()
        self._context = load_context(files)
        self._reader = threading.Thread()

    def context(self) -> ssl.SSLContext:
        """The TLS context of a new connection.

        A thread looks at the files meanwhile, and what it finds is used by later connections. Changed files that are unusable are logged
        once; the last good ones stay.
        """
        now = self._clock()
        if now - self._looked_at >= STAMP_S and not self._reader.is_alive():
            self._looked_at = now
            self._reader = threading.Thread(target=self._read_changed, name="certificate", daemon=True)
            self._reader.start()
        return self._context

    def _read_changed(self) -> None:
        stamp = stamp_of((self._files.certificate, self._files.key))
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._context = load_context(self._files)
            log.info("the certificate was read again: %s", self._files.certificate)
        except ConfigError as error:
            log.error("the changed certificate is not used: %s", error)


def load_context(files: HttpTls) -> ssl.SSLContext:
    """Raises ConfigError for a file that cannot be read, and a key that other users can read or that does not match the certificate."""
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
    return context


log = logging.getLogger(__name__)

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
