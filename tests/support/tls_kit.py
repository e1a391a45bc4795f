"""Makes certificates of small authorities for tests, with whatever is wrong with them, and a TLS client that does what it is told."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from headrace.fleet.authority import SiteAuthority, make_authority, make_certificate, pem_of_certificate, pem_of_key
from headrace.wire.tls.files import TlsFiles, TlsRole, files_in

NOW = datetime.now(UTC)
LONG_AGO = NOW - timedelta(days=1000)
TOKEN = "0123456789abcdef-of-tests"


def authority(now: datetime = NOW) -> SiteAuthority:
    return make_authority(now)


def write_certificates(
    folder: Path,
    signer: SiteAuthority,
    role: TlsRole,
    *names: str,
    now: datetime = NOW,
    trusted: SiteAuthority | None = None,
) -> TlsFiles:
    """A folder with an end's three files. trusted: the authority in ca.crt, where it is another one than the signer."""
    folder.mkdir(parents=True, exist_ok=True)
    key, certificate = make_certificate(signer, role, names, now)
    files = files_in(folder)
    write_whole(Path(files.ca), pem_of_certificate((trusted or signer).certificate))
    write_whole(Path(files.certificate), pem_of_certificate(certificate))
    write_whole(Path(files.key), pem_of_key(key))
    return files


def write_whole(path: Path, content: bytes) -> None:
    """As a renewal should: another file in the place of the old one, closed to other users."""
    new = path.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    new.replace(path)


class TlsClient:
    """A client's end of TLS over bare streams, as reader and writer. Unlike asyncio's it goes on sending after the server's close_notify.

    transport   of the socket
    num_closed  close_notify alerts that came
    is_over     the socket has ended, or a record was none
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, limit: int, context: ssl.SSLContext) -> None:
        self._reader, self._writer = reader, writer
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="localhost")
        self.reader = asyncio.StreamReader(limit)
        self.reader.set_transport(self)  # type: ignore[arg-type]  # it pauses and resumes
        self.transport = writer.transport
        self.num_closed = 0
        self.is_over = False
        self._may_read = asyncio.Event()
        self._may_read.set()

    async def shake_hands(self) -> None:
        """Raises ssl.SSLError for a handshake that fails, also where the server closes in the midst of it."""
        while True:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                if not (data := await self._reader.read(1 << 16)):
                    raise ssl.SSLEOFError("the server closed in the handshake") from None
                self._incoming.write(data)
            else:
                self._flush()
                return

    async def pump(self) -> None:
        """Decrypt until the connection ends. Cancel it afterwards."""
        try:
            while data := await self._reader.read(1 << 16):
                self._incoming.write(data)
                self._decrypt()
                await self._may_read.wait()
            self.reader.feed_eof()
        except (OSError, ssl.SSLError) as error:
            self.reader.set_exception(error)
        finally:
            self.is_over = True

    def _decrypt(self) -> None:
        try:
            while piece := self.tls.read(1 << 14):
                self.reader.feed_data(piece)
        except ssl.SSLWantReadError:
            return
        except ssl.SSLZeroReturnError:
            pass
        self.num_closed += 1
        self.reader.feed_eof()

    def pause_reading(self) -> None:
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()

    def write(self, data: bytes) -> None:
        while data:
            data = data[self.tls.write(data) :]
        self._flush()

    def write_eof(self) -> None:
        with suppress(ssl.SSLWantReadError):  # the server's close_notify is not waited for
            self.tls.unwrap()
        self._flush()

    def write_record(self, record: bytes) -> None:
        self._writer.write(record)

    async def drain(self) -> None:
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()

    async def wait_closed(self) -> None:
        await self._writer.wait_closed()

    def _flush(self) -> None:
        self._writer.write(self._outgoing.read())


def trusting_context() -> ssl.SSLContext:
    """Of a client that asks for no name and believes every certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@asynccontextmanager
async def tls_client(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, limit: int = 64 << 10, context: ssl.SSLContext | None = None
) -> AsyncIterator[TlsClient]:
    """The handshake is done. limit: of its reader. Raises ssl.SSLError"""
    client = TlsClient(reader, writer, limit=limit, context=context or trusting_context())
    await client.shake_hands()
    pump = asyncio.create_task(client.pump())
    try:
        yield client
    finally:
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)
