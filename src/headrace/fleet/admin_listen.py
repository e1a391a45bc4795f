"""The admin requests over TCP, for operators on other machines: where they are answered, and what both ends must show.

Beyond loopback both ends have certificates, as the wire has (`wire.tls`): the server's is one for TLS servers, an operator's one for TLS
clients. Every request carries a token of this API alone. The requests are `fleet.admin`'s.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.wire.target import GrpcTarget, target_of
from headrace.wire.tls.files import Certificates, TlsFiles, TlsRole, load_certificates

ALPN = "http/1.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminListen:
    """
    listen      HOST:PORT; port 0 takes a free one
    token_file  file with the token that every request must carry
    tls         this end's certificates; required beyond loopback
    """

    listen: str
    token_file: str
    tls: TlsFiles | None = None

    def checked(self) -> AdminListen:
        """This value if its rules hold; no file is opened. Raises ConfigError."""
        if self.listen.startswith("unix:"):
            raise ConfigError("admin.listen", f"{self.listen!r} is not HOST:PORT", "The Unix socket is always there, in the run directory.")
        if not self.token_file:
            raise ConfigError("admin.token_file", "is empty", "Name a file with a token: `openssl rand -hex 32`, mode 0600.")
        if self.tls is None:
            self._target_or_error(token="x" * 16, token_file="")
        return self

    def opened(self) -> AdminAddress:
        """With its files read. Raises ConfigError."""
        target = self._target_or_error(token=None, token_file=self.token_file)
        assert target.token is not None
        return AdminAddress(target.host, target.port, target.token, None if self.tls is None else server_context(self.tls))

    def _target_or_error(self, *, token: str | None, token_file: str) -> GrpcTarget:
        try:
            return target_of(self.listen, token=token, token_file=token_file, tls=self.tls)
        except ConfigError as error:
            raise error.at("admin.listen" if error.where == "engine address" else f"admin.{error.where}") from error


@dataclass(frozen=True, slots=True)
class AdminAddress:
    """Where to listen, and what a request must show. context: None without TLS"""

    host: str
    port: int
    token: str
    context: ssl.SSLContext | None


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """TLS that wants a client's certificate, with the files as they are at each new connection. Raises ConfigError."""
    certificates = Certificates(files, TlsRole.ENGINE)
    context = certificates.current().context
    context.set_alpn_protocols([ALPN])

    def renew(connection: ssl.SSLObject, _name: str, _context: ssl.SSLContext) -> None:
        current = certificates.current().context
        if current is not context:
            current.set_alpn_protocols([ALPN])
            connection.context = current

    context.sni_callback = renew
    return context


def operator_context(files: TlsFiles) -> ssl.SSLContext:
    """TLS of a command: shows its certificate, and checks the server's for the name that is dialled. Raises ConfigError."""
    context = load_certificates(files, TlsRole.GATEWAY).context
    context.set_alpn_protocols([ALPN])
    return context
