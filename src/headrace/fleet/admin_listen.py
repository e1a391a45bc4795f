"""Configuration, token and TLS of the supervisor's admin API over TCP.

Every request carries a token that is valid for this API alone; beyond loopback both sides also show certificates.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.core.option import option, required
from headrace.wire.target import check_target, target_of
from headrace.wire.tls.files import Certificates, TlsFiles, TlsRole, load_certificates

ALPN = "http/1.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminListen:
    listen: str = required(
        "`HOST:PORT` at which the operator's commands are answered from other machines too ([control.md](control.md#over-tcp)); port 0 "
        "takes a free one. `headrace gateway` has it with `workers` alone."
    )
    token_file: str = option(
        "",
        "File with the token that every such request carries, mode 0600, at least 16 characters.",
        shown="`token` of `tls_dir`",
    )
    tls_dir: str = option(
        "",
        "Folder with this machine's certificates (`ca.crt`, `tls.crt`, `tls.key`), of an authority of its own; required beyond loopback.",
    )

    def checked(self) -> AdminListen:
        """Opens no file. Raises ConfigError."""
        if self.listen.startswith("unix:"):
            raise ConfigError("admin.listen", f"{self.listen!r} is not HOST:PORT", "The Unix socket is always there, in the run directory.")
        if not (self.token_file or self.tls_dir):
            raise ConfigError("admin.token_file", "is empty", "Name a file with a token: `openssl rand -hex 32`, mode 0600.")
        with _named_as_in_the_file():
            check_target(self.listen, token=None, token_file=self.token_file, tls_dir=self.tls_dir)
        return self

    def opened(self) -> AdminAddress:
        """Raises ConfigError."""
        with _named_as_in_the_file():
            target = target_of(self.listen, token=None, token_file=self.token_file, tls_dir=self.tls_dir)
            assert target.token is not None
            return AdminAddress(target.host, target.port, target.token, None if target.tls is None else server_context(target.tls))


@contextmanager
def _named_as_in_the_file() -> Iterator[None]:
    """Keys of `wire.target` get their paths in the configuration file."""
    try:
        yield
    except ConfigError as error:
        raise error.at("admin.listen" if error.where == "engine address" else f"admin.{error.where}") from error


@dataclass(frozen=True, slots=True)
class AdminAddress:
    host: str
    port: int
    token: str
    context: ssl.SSLContext | None


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Changed files hold for later connections. Raises ConfigError."""
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
    """Raises ConfigError."""
    context = load_certificates(files, TlsRole.GATEWAY).context
    context.set_alpn_protocols([ALPN])
    return context
