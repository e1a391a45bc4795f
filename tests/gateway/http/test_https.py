"""Tests https: a certificate that is read again while connections are open; and client addresses, which only listed proxies may name."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat, load_pem_private_key
from gateway_kit import TestBench, chat_body, gateway_config, open_bench, serving
from tls_kit import LONG_AGO, NOW, authority, write_certificates, write_whole

from headrace.core.errors import ConfigError
from headrace.core.regular_files import MAX_SECRET_BYTES, FileThread
from headrace.fleet.authority import SiteAuthority
from headrace.gateway.config import config_from
from headrace.gateway.http import origins, server, tls
from headrace.gateway.http.config import HttpTls, check_networks
from headrace.gateway.http.origins import MAX_HOPS, TrustedProxies
from headrace.gateway.http.tls import ServerCertificate, load_context
from headrace.text.folder import TextModel
from headrace.wire.tls import files as tls_files
from headrace.wire.tls.files import TlsRole

pytestmark = pytest.mark.loop


def certificate(folder: Path, signer: SiteAuthority | None = None) -> HttpTls:
    files = write_certificates(folder, signer or authority(), TlsRole.ENGINE, "localhost")
    return HttpTls(certificate=files.certificate, key=files.key)


def plain(files: HttpTls) -> dict[str, str]:
    return {"certificate": files.certificate, "key": files.key}


def head(method: str, path: str, content: bytes) -> bytes:
    lines = f"{method} {path} HTTP/1.1", "host: localhost", "content-type: application/json", f"content-length: {len(content)}", "", ""
    return "\r\n".join(lines).encode()


class Client:
    """One https connection. presented: the server's certificate"""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.presented: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        content = b"" if body is None else json.dumps(body).encode()
        self.writer.write(head(method, path, content) + content)
        return await self.answer()

    async def answer(self) -> tuple[int, bytes]:
        answer = await self.reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return int(answer[9:12]), await self.reader.readexactly(length)


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


async def test_requests_and_streams_are_served_over_tls(text: TextModel, tmp_path: Path) -> None:
    async with open_bench(text, tls=plain(certificate(tmp_path))) as bench, serving(bench.gateway) as port, connected(port) as client:
        assert client.writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
        assert client.writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        for _ in range(3):
            status, body = await client.ask("POST", "/v1/chat/completions", chat_body())
            assert (status, json.loads(body)["object"]) == (200, "chat.completion")
        content = json.dumps(chat_body(stream=True)).encode()
        client.writer.write(head("POST", "/v1/chat/completions", content) + content)
        assert b"data: [DONE]" in await client.reader.readuntil(b"0\r\n\r\n")


async def test_an_offer_of_http2_is_ignored_over_tls_too(text: TextModel, tmp_path: Path) -> None:
    content = json.dumps(chat_body()).encode()
    offering = head("POST", "/v1/chat/completions", content)[:-2] + b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n\r\n"
    async with open_bench(text, tls=plain(certificate(tmp_path))) as bench, serving(bench.gateway) as port, connected(port) as client:
        for packets in ([offering + content], [offering, content], [offering[:-1], offering[-1:] + content[:9], content[9:]]):
            for packet in packets:
                client.writer.write(packet)
                await asyncio.sleep(0.01)
            status, body = await client.answer()
            assert (status, json.loads(body)["object"]) == (200, "chat.completion")
        assert len(bench.replica.requests) == 3


async def test_a_changed_certificate_is_used_by_new_connections_and_open_ones_stay(text: TextModel, tmp_path: Path) -> None:
    signer = authority()
    files = certificate(tmp_path, signer)
    async with open_bench(text, tls=plain(files)) as bench, serving(bench.gateway, bench.reloader) as port, connected(port) as old:
        first = old.presented
        certificate(tmp_path, signer)  # renewed in place
        await bench.reloader.reload(lambda: bench.reloader.config)
        async with connected(port) as new:
            assert new.presented != first
            assert (await new.ask("GET", "/live"))[0] == 200
        assert (await old.ask("GET", "/live"))[0] == 200, "the open connection lives on"


@pytest.mark.socket
async def test_no_certificate_is_read_on_the_event_loop(text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that hangs would hold up every stream."""
    threads: list[threading.Thread] = []
    async with open_bench(text, tls=plain(certificate(tmp_path))) as bench, serving(bench.gateway, bench.reloader):

        def load(files: HttpTls) -> ssl.SSLContext:
            threads.append(threading.current_thread())
            return load_context(files)

        monkeypatch.setattr(tls, "load_context", load)
        await bench.reloader.reload(lambda: bench.reloader.config)
    assert len(threads) == 1
    assert threading.main_thread() not in threads


@pytest.mark.socket
async def test_connections_are_accepted_where_no_thread_can_be_started(
    text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit of tasks the look at the files failed within the acceptance of a connection, which was lost."""
    monkeypatch.setattr(tls_files, "LOOK_S", 0.0)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with open_bench(text, tls=plain(certificate(tmp_path))) as bench, serving(bench.gateway) as port:
        monkeypatch.setattr(FileThread, "start", refuse)
        for _ in range(3):
            async with connected(port) as client:
                assert (await client.ask("GET", "/live"))[0] == 200


@pytest.mark.pure
@pytest.mark.parametrize(("now", "words"), [(LONG_AGO, "has expired"), (NOW + timedelta(days=10), "is not valid yet"), (NOW, "")])
def test_a_certificate_that_is_not_valid_now_is_loaded_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, now: datetime, words: str
) -> None:
    """It may be renewed later; until then the log says why clients leave, at a start, a reload and a renewal."""
    files = write_certificates(tmp_path, authority(), TlsRole.ENGINE, "localhost", now=now)
    load_context(HttpTls(certificate=files.certificate, key=files.key))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == bool(words)
    assert not words or said[0].startswith(f"{files.certificate} {words}")


async def test_a_reload_with_a_certificate_that_has_expired_is_done_and_says_so(
    text: TextModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = certificate(tmp_path)
    async with open_bench(text, tls=plain(files)) as bench, serving(bench.gateway, bench.reloader) as port:
        write_certificates(tmp_path, authority(), TlsRole.ENGINE, "localhost", now=LONG_AGO)
        await bench.reloader.reload(lambda: bench.reloader.config)
        assert f"{files.certificate} has expired; clients refuse it" in caplog.text
        async with connected(port) as client:
            assert client.presented == ssl.PEM_cert_to_DER_cert(Path(files.certificate).read_text())


@pytest.mark.pure
@pytest.mark.parametrize("name", ["certificate", "key"])
def test_a_file_of_any_size_is_not_given_to_openssl(tmp_path: Path, name: str) -> None:
    files = certificate(tmp_path)
    with Path(getattr(files, name)).open("r+b") as file:
        file.truncate(MAX_SECRET_BYTES + 1)
    with pytest.raises(ConfigError, match=rf"tls\.{name}: .* cannot be read \(larger than 1048576 bytes\)"):
        load_context(files)


@pytest.mark.pure
def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    files = certificate(tmp_path)
    key = load_pem_private_key(Path(files.key).read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    write_whole(Path(files.key), locked)
    with pytest.raises(ConfigError, match=r"tls\.key: .* is no PEM file without passphrase beside"):
        load_context(files)


async def test_a_reload_with_a_certificate_that_cannot_be_used_changes_nothing(text: TextModel, tmp_path: Path) -> None:
    files = certificate(tmp_path)
    async with open_bench(text, tls=plain(files)) as bench, serving(bench.gateway, bench.reloader) as port:
        changed = replace(bench.reloader.config, tls=HttpTls(certificate=files.certificate, key=str(tmp_path / "missing")))
        with pytest.raises(ConfigError, match=r"tls\.key: .*missing cannot be read"):
            await bench.reloader.reload(lambda: changed)
        async with connected(port) as client:
            assert (await client.ask("GET", "/live"))[0] == 200


async def test_what_speaks_plain_http_to_https_is_closed_and_named_once(
    text: TextModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_bench(text, tls=plain(certificate(tmp_path))) as bench, serving(bench.gateway) as port:
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b"HTTP/" not in await reader.read()
            writer.close()
        async with connected(port) as client:
            assert (await client.ask("GET", "/live"))[0] == 200
    assert [record.message for record in caplog.records if "handshake" in record.message] == [
        "a TLS handshake failed (HTTP_REQUEST): http:// to this https port gives HTTP_REQUEST"
    ]


async def test_a_handshake_that_hangs_is_ended(text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_S", 0.1)
    async with open_bench(text, tls=plain(certificate(tmp_path))) as bench, serving(bench.gateway) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await asyncio.wait_for(reader.read(), 20) == b"", "closed without a word"
        writer.close()


@pytest.mark.pure
def test_a_key_that_other_users_may_read_is_refused(tmp_path: Path) -> None:
    files = certificate(tmp_path)
    Path(files.key).chmod(0o644)
    with pytest.raises(ConfigError, match=r"tls\.key: .* is open to other users"):
        ServerCertificate(files)


@pytest.mark.pure
def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    one, other = certificate(tmp_path / "one"), certificate(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"tls\.key: .* does not fit"):
        ServerCertificate(HttpTls(certificate=one.certificate, key=other.key))
    with pytest.raises(ConfigError, match=r"tls\.certificate: .* cannot be read"):
        ServerCertificate(HttpTls(certificate=str(tmp_path / "missing"), key=other.key))


# -- addresses --------------------------------------------------------------------------------------------------------------------------

PROXIES = TrustedProxies(["10.0.0.0/8", "127.0.0.1", "fd00::/8"])
FORGED = (b"x-forwarded-for", b"1.2.3.4")


@pytest.mark.parametrize(
    ("peer", "headers", "client"),
    [
        ("203.0.113.9", [FORGED], "203.0.113.9"),
        ("203.0.113.9", [(b"forwarded", b"for=1.2.3.4")], "203.0.113.9"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", [(b"x-forwarded-for", b"198.51.100.7")], "198.51.100.7"),
        ("10.0.0.1", [(b"x-forwarded-for", b"1.2.3.4, 198.51.100.7")], "198.51.100.7"),
        ("10.0.0.1", [FORGED, (b"x-forwarded-for", b"198.51.100.7")], "198.51.100.7"),
        ("10.0.0.1", [(b"x-forwarded-for", b"198.51.100.7, 10.1.1.1, 127.0.0.1")], "198.51.100.7"),
        ("10.0.0.1", [(b"x-forwarded-for", b"10.9.9.9, 10.1.1.1")], "10.9.9.9"),
        ("10.0.0.1", [(b"x-forwarded-for", b"1.2.3.4, unknown")], "10.0.0.1"),
        ("10.0.0.1", [(b"x-forwarded-for", b"1.2.3.4\r\nx: y")], "10.0.0.1"),
        ("10.0.0.1", [(b"x-forwarded-for", b",".join([b"10.0.0.2"] * 5000))], "10.0.0.2"),
        ("10.0.0.1", [(b"forwarded", b'for="[2001:db8::7]:4711";proto=https')], "2001:db8::7"),
        ("10.0.0.1", [(b"forwarded", b"for=1.2.3.4, for=198.51.100.7;by=10.0.0.1"), FORGED], "198.51.100.7"),
        ("10.0.0.1", [(b"forwarded", b"for=_hidden")], "10.0.0.1"),
        ("10.0.0.1", [(b"forwarded", b"proto=https; For=198.51.100.7 ;by=x")], "198.51.100.7"),
        ("10.0.0.1", [(b"forwarded", b"proto=https"), (b"forwarded", b"")], "10.0.0.1"),
        ("::ffff:10.0.0.1", [(b"x-forwarded-for", b"198.51.100.7:5050")], "198.51.100.7"),
        ("fd00::1", [(b"x-forwarded-for", b"2001:db8::7")], "2001:db8::7"),
    ],
)
@pytest.mark.pure
def test_only_listed_proxies_name_a_client(peer: str, headers: list[tuple[bytes, bytes]], client: str) -> None:
    assert PROXIES.client_of(peer, headers) == client
    assert TrustedProxies([]).client_of(peer, headers) == peer, "nothing is believed without a list"


PADDED = b"for=" + b" " * 1_000_000 + b'"'
LONG = (b"forwarded", b",".join([b"for=10.0.0.2;x=y"] * 1_000_000))


@pytest.mark.parametrize("value", [PADDED, b"for=" + b'"' * 1_000_000, b";" * 1_000_000, b"for" * 400_000])
@pytest.mark.pure
def test_a_proxys_header_of_a_megabyte_is_read_in_one_pass(value: bytes) -> None:
    """With work that grows with the square of the length this would not end within the test's time limit."""
    assert PROXIES.client_of("10.0.0.1", [(b"forwarded", value)]) == "10.0.0.1"


@pytest.mark.parametrize(("peer", "num_read"), [("203.0.113.9", 0), ("10.0.0.1", MAX_HOPS)])
@pytest.mark.pure
def test_no_more_of_a_header_is_read_than_hops_are_followed(monkeypatch: pytest.MonkeyPatch, peer: str, num_read: int) -> None:
    read: list[str] = []

    def named_for(part: str) -> str:
        read.append(part)
        return "10.0.0.2"

    monkeypatch.setattr(origins, "_named_for", named_for)
    PROXIES.client_of(peer, [LONG])
    assert len(read) == num_read


@pytest.mark.pure
def test_what_is_no_network_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trusted_proxies\[1\]: '10\.0\.0\.1/8' is no network"):
        check_networks("trusted_proxies", ["::1", "10.0.0.1/8"])
    with pytest.raises(ConfigError, match=r"trusted_proxies\[0\]: 'proxy' is no network"):
        config_from({"models": [{"name": "m", "upstreams": [{"url": "http://h/v1"}]}], "trusted_proxies": ["proxy"]})
    assert gateway_config(trusted_proxies=["10.0.0.0/8"]).trusted_proxies == ("10.0.0.0/8",)


async def test_the_log_has_the_clients_address(text: TextModel, tmp_path: Path) -> None:
    async def ask(bench: TestBench) -> None:
        await bench.client.get("/v1/models", headers={"x-forwarded-for": "198.51.100.7"})

    for name, trusted in (("plain.log", []), ("trusting.log", ["127.0.0.0/8"])):
        async with open_bench(text, request_log=str(tmp_path / name), trusted_proxies=trusted) as bench:
            await ask(bench)
    logged = [json.loads((tmp_path / name).read_text())["client"] for name in ("plain.log", "trusting.log")]
    assert logged == ["127.0.0.1", "198.51.100.7"]
