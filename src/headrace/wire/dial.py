"""Connects a gateway to an engine: opens the gRPC channel and, where TLS fails, finds out why.

gRPC only says that a socket closed, so the handshake is repeated here with OpenSSL, which names the fault of a certificate.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

import grpc
import grpc.aio

from headrace.wire.service import CHANNEL_OPTIONS, TLS_CHANNEL_OPTIONS
from headrace.wire.target import TOKEN_METADATA, GrpcTarget
from headrace.wire.tls.files import Certificates, TlsRole, handshake_fault

PROBE_S = 2.0

LOOK_S = 5.0
"""In all, looking up the name included: the next connection waits for it."""

READ_BYTES = 16 << 10
ALERT_S = 0.5
"""In TLS 1.3 the engine verifies the gateway last, after this end has finished its handshake."""


class Dialer:
    def __init__(self, target: GrpcTarget) -> None:
        self.target = target
        self._certificates = None if target.tls is None else Certificates(target.tls, TlsRole.GATEWAY)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self.target.token is None else ((TOKEN_METADATA, self.target.token),)

    def open_channel(self) -> grpc.aio.Channel:
        if self._certificates is None:
            return grpc.aio.insecure_channel(self.target.grpc_address, options=CHANNEL_OPTIONS)
        loaded = self._certificates.current()
        credentials = grpc.ssl_channel_credentials(loaded.ca, loaded.key, loaded.certificate)
        name = self.target.tls_name
        named = (("grpc.ssl_target_name_override", name),) if name else ()
        return grpc.aio.secure_channel(self.target.address, credentials, options=(*TLS_CHANNEL_OPTIONS, *named))

    async def find_tls_fault(self) -> str:
        """Says what is wrong with TLS; empty when the failure has another cause."""
        if self.target.path is not None:
            return ""
        try:
            async with asyncio.timeout(LOOK_S):
                return await asyncio.to_thread(self._repeat_handshake)
        except (OSError, UnicodeError):  # no answer in time, or a name that is none
            return ""

    def _repeat_handshake(self) -> str:
        with socket.create_connection((self.target.host, self.target.port), timeout=PROBE_S) as connection:
            return self._fault_with_tls(connection) if self._certificates else _fault_without_tls(connection)

    def _fault_with_tls(self, connection: socket.socket) -> str:
        assert self._certificates is not None
        context = self._certificates.current().context
        try:
            tls = _TlsProbe(context, connection, self.target.tls_name or self.target.host)
            tls.run(tls.end.do_handshake)
            connection.settimeout(ALERT_S)
            tls.run(lambda: tls.end.read(1))
        except TimeoutError:
            return ""  # no alert: this is not what failed
        except ssl.SSLEOFError:
            return ""
        except ssl.SSLError as error:
            return handshake_fault(error, own="this gateway", peer="the engine", ca=self._certificates.files.ca)
        return ""


class _TlsProbe:
    """TLS over a socket of the caller: `wrap_socket` would leave it unclosed when the other end resets it."""

    def __init__(self, context: ssl.SSLContext, connection: socket.socket, host: str | None = None) -> None:
        self._connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.end = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)

    def run(self, step: Callable[[], object]) -> None:
        """Raises OSError, or SSLError after its alert was sent."""
        while True:
            try:
                step()
                return
            except ssl.SSLWantReadError:
                self._connection.sendall(self._outgoing.read())
                if data := self._connection.recv(READ_BYTES):
                    self._incoming.write(data)
                else:
                    self._incoming.write_eof()
            finally:
                with suppress(OSError):
                    self._connection.sendall(self._outgoing.read())


def _fault_without_tls(connection: socket.socket) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        tls = _TlsProbe(context, connection)
        tls.run(tls.end.do_handshake)
        return "the engine speaks TLS, and no certificates are configured for it here (tls)"
    except ssl.SSLError:
        return ""
