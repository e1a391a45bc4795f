"""Speaks TLS on one connection: a protocol to the socket's transport below, and the transport of the HTTP protocol above.

asyncio's and uvloop's TLS transports cannot do what this one does: the sending half can be closed alone, what arrives is handed on as it
comes, `pause_reading` stops the socket itself. `close` sends TLS's close_notify and waits for none. No data waits here: OpenSSL's two
buffers, which never shrink, take and give a record at a time.

The certificate is loaded again when its files change; open connections keep what they have.
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from headrace.core.clock import Clock
from headrace.core.errors import ConfigError
from headrace.core.regular_files import MAX_SECRET_BYTES, in_time, read_file
from headrace.gateway.http.config import HttpTls
from headrace.machine.private_files import check_private_file
from headrace.wire.tls.files import EXPIRED, NOT_YET_VALID, Watched, certificate_fault, shake_hands

RECORD_BYTES = 16 << 10

MAX_OWN_BYTES = 64 << 10
"""What TLS itself may answer after the handshake: no limit of HTTP counts it."""

NO_PROTOCOL = asyncio.Protocol()
"""For calls before the handshake is complete and after the connection is lost."""


OnHandshake = Callable[["TlsTransport", str | None], None]
"""The reason of a failure: None where there was none, "" where the client left."""


class TlsTransport(asyncio.Transport, asyncio.Protocol):
    """The server's end of TLS on one connection. `protocol` hears once the handshake is complete."""

    _socket: asyncio.Transport | None = None
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, context: ssl.SSLContext, protocol: asyncio.Protocol, *, handshake_s: float, on_handshake: OnHandshake) -> None:
        super().__init__()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._protocol, self._waiting = NO_PROTOCOL, protocol
        self._handshake_s, self._on_handshake = handshake_s, on_handshake
        self._in_handshake = True
        self._is_shut = False
        self._own_bytes = 0

    # -- towards the socket ------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._socket = transport
        if self._is_shut:  # aborted before the socket was there
            transport.abort()
            return
        self._timer = asyncio.get_running_loop().call_later(self._handshake_s, self._handshake_late)

    def data_received(self, data: bytes) -> None:
        pieces: list[bytes] = []
        is_over: bool | None = None
        for start in range(0, len(data), RECORD_BYTES):
            self._incoming.write(memoryview(data)[start : start + RECORD_BYTES])
            if not self._in_handshake or self._shake_hands():
                is_over = self._read(pieces)
            elif not self._in_handshake:
                return  # it failed
            if is_over is not None:
                break
        if not self._in_handshake:
            self._hand_on(b"".join(pieces), is_over)

    def eof_received(self) -> None:
        self._protocol.eof_received()
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_handshake("")
        protocol, self._protocol, self._waiting = self._protocol, NO_PROTOCOL, NO_PROTOCOL
        protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def _shake_hands(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
        except ssl.SSLError as error:
            self._fail(error.reason or "unknown")
        else:
            self._end_handshake(None)
            return True
        return False

    def _handshake_late(self) -> None:
        self._fail(f"it took more than {self._handshake_s:g} s")

    def _end_handshake(self, failure: str | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._in_handshake:
            self._in_handshake = False
            self._on_handshake(self, failure)

    def _read(self, pieces: list[bytes]) -> bool | None:
        """None: more may come; True: the client closed its half; False: it broke TLS."""
        is_over: bool | None = True
        try:
            while piece := self._tls.read(RECORD_BYTES):
                pieces.append(piece)
        except ssl.SSLWantReadError:
            is_over = None
        except ssl.SSLZeroReturnError:
            pass
        except ssl.SSLError:
            is_over = False
        self._own_bytes += self._outgoing.pending
        self._flush()
        return is_over

    def _hand_on(self, data: bytes, is_over: bool | None) -> None:
        if self._protocol is NO_PROTOCOL:  # only now: what it closes at once has no record left to trip over
            self._protocol, self._waiting = self._waiting, NO_PROTOCOL
            self._protocol.connection_made(self)
        if data:
            self._protocol.data_received(data)
        if is_over is False or self._own_bytes > MAX_OWN_BYTES:
            self._fail("")
        elif is_over:
            self.eof_received()

    def _fail(self, reason: str) -> None:
        """Sends the alert that names the fault."""
        self._end_handshake(reason)
        self._flush()
        self._is_shut = True
        self._below.close()
        self._timer = asyncio.get_running_loop().call_later(self._handshake_s, self._below.abort)

    def _flush(self) -> None:
        data = self._outgoing.read()
        if data and self._socket is not None and not self._is_shut:
            self._socket.write(data)

    # -- towards the protocol ----------------------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if not data or self.is_closing():
            return
        try:
            for start in range(0, len(data), RECORD_BYTES):
                self._tls.write(memoryview(data)[start : start + RECORD_BYTES])
                self._flush()
        except ssl.SSLError:
            self.abort()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._shut()
        self._below.write_eof()

    def close(self) -> None:
        if not self._below.is_closing():
            self._shut()
            self._below.close()

    def abort(self) -> None:
        self._is_shut = True
        if self._socket is not None:
            self._socket.abort()

    def _shut(self) -> None:
        if not (self._is_shut or self._in_handshake):
            with suppress(ssl.SSLError):  # it is sent; the client's own has not come
                self._tls.unwrap()
            self._flush()
        self._is_shut = True

    @property
    def _below(self) -> asyncio.Transport:
        assert self._socket is not None, "the handshake has begun"
        return self._socket

    def is_closing(self) -> bool:
        return self._is_shut or self._below.is_closing()

    def pause_reading(self) -> None:
        self._below.pause_reading()

    def resume_reading(self) -> None:
        self._below.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._below.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._below.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._tls.context if name == "sslcontext" else self._below.get_extra_info(name, default)


log = logging.getLogger(__name__)

ALPN = "http/1.1"


class ServerCertificate(Watched[ssl.SSLContext]):
    def __init__(self, files: HttpTls, clock: Clock = time.monotonic) -> None:
        """Raises ConfigError."""
        super().__init__((files.certificate, files.key), partial(load_context, files), clock)


def load_context(files: HttpTls) -> ssl.SSLContext:
    """A certificate that is not valid now is logged and loaded.

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
    """A handshake with a client that trusts this certificate shows whether its dates hold."""
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
"""HTTP begins with a letter."""

TLS_NOTICE_S = 60.0
"""Health checks come every second."""


SPOKE_HTTPS = "%s spoke https to this http port%s: use http://, let a proxy in front end TLS, or configure gateway.tls"
HANDSHAKE_FAILED = "a TLS handshake failed (%s)%s: http:// to this https port gives HTTP_REQUEST"


class TlsNotice:
    """Logs that clients spoke the wrong protocol to a port: TLS to a plain one, or the reverse."""

    def __init__(self, clock: Clock = time.monotonic, *, text: str = SPOKE_HTTPS) -> None:
        """text: has two places, for a word about the client and the number of further clients"""
        self._text = text
        self._clock = clock
        self._due_at = -math.inf
        self._num_unlogged = 0

    def __call__(self, client: str) -> None:
        now = self._clock()
        if now < self._due_at:
            self._num_unlogged += 1
            return
        more = f" (so did {self._num_unlogged} connections before it)" if self._num_unlogged else ""
        log.warning(self._text, client, more)
        self._due_at, self._num_unlogged = now + TLS_NOTICE_S, 0
