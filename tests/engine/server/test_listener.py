"""Tests the engine's TCP port under gateways that may not connect: each end says why, and nothing reaches the engine."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S, eventually
from tls_kit import LONG_AGO, TOKEN, authority, write_certificates
from wire_kit import Served, read_all, request

from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.server import listener
from headrace.engine.server.listener import FOLDER_PREFIX, LOCK_NAME, CannotListen, TcpListener, check_can_listen
from headrace.fleet.files import running_deployments
from headrace.lab.fake_runner import FakeOptions, fake_answer
from headrace.wire.client import ConnectionState, ReplicaClient
from headrace.wire.listening import RefusalLog
from headrace.wire.target import parse_target
from headrace.wire.tls.files import Certificates, TlsFiles, TlsRole
from headrace.wire.tls.stream import PlainStream

pytestmark = pytest.mark.socket

HOST = "127.0.0.2"
SITE, STRANGE = authority(), authority()


@asynccontextmanager
async def engine_at(host: str, tls: TlsFiles | None, port: int = 0) -> AsyncIterator[Served]:
    engine = Served(FakeOptions(), EngineConfig(model="fake"), f"{host}:{port}", token=TOKEN, tls=tls)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
        engine.check()


def engine_files(folder: Path) -> TlsFiles:
    return write_certificates(folder / "engine", SITE, TlsRole.ENGINE, HOST)


def gateway_files(folder: Path) -> TlsFiles:
    return write_certificates(folder / "gateway", SITE, TlsRole.GATEWAY)


@pytest.mark.parametrize("is_tls", [True, False])
async def test_streams_are_answered_over_tcp_and_the_answer_is_whole(tmp_path: Path, is_tls: bool) -> None:
    """Large frames in both directions: a prompt of many tokens, and many sequences at once."""
    tls, gateway_tls = (engine_files(tmp_path), gateway_files(tmp_path)) if is_tls else (None, None)
    async with engine_at(HOST, tls) as engine, ReplicaClient(engine.service.address, token=TOKEN, tls=gateway_tls) as replica:
        await replica.wait_connected(PATIENCE_S)
        requests = [request(f"r{i}", prompt=tuple(range(1, 3000)), max_tokens=40, n=2) for i in range(6)]
        answers = await asyncio.gather(*(read_all(replica.submit(one)) for one in requests))
        for one, answer in zip(requests, answers, strict=True):
            assert answer == {index: fake_answer(one, index, 40, FakeOptions()) for index in range(2)}


async def test_an_engine_at_an_address_that_its_certificate_lacks_is_known_by_the_name_that_it_has(tmp_path: Path) -> None:
    files = write_certificates(tmp_path / "engine", SITE, TlsRole.ENGINE, "engines.llm.svc")
    given: dict[str, Any] = {"token": TOKEN, "tls": gateway_files(tmp_path)}
    async with engine_at(HOST, files) as engine:
        async with ReplicaClient(engine.service.address, **given, tls_name="engines.llm.svc") as replica:
            await replica.wait_connected(PATIENCE_S)
        for name in ("", "engines.other.svc"):
            async with ReplicaClient(engine.service.address, **given, tls_name=name) as replica:
                await eventually(lambda: "the engine's certificate is refused" in replica.reason)
                assert repr(name or HOST) in replica.reason


async def test_an_engine_that_is_started_again_at_its_address_is_connected_again(tmp_path: Path) -> None:
    files = engine_files(tmp_path)
    async with AsyncExitStack() as stack:
        async with engine_at(HOST, files) as engine:
            address = engine.service.address
            replica = await stack.enter_async_context(ReplicaClient(address, token=TOKEN, tls=gateway_files(tmp_path)))
            await replica.wait_connected(PATIENCE_S)
            assert replica.info is not None
            first = replica.info.instance_id
        await eventually(lambda: replica.state is ConnectionState.DOWN)
        await stack.enter_async_context(engine_at(HOST, files, int(address.rpartition(":")[2])))
        await eventually(lambda: replica.state is ConnectionState.CONNECTED)
        assert replica.info.instance_id != first
        assert len((await read_all(replica.submit(request("after"))))[0]) == 8


@dataclass(frozen=True)
class Fault:
    """What is wrong with one end, and what each end says of it. An empty folder name: that end speaks plain text."""

    engine: str
    gateway: str
    gateway_says: str
    engine_says: str


FAULTS = {
    "gateway of another authority": Fault(
        "engine",
        "trusts SITE, signed by STRANGE",
        "refused this gateway's certificate: it was not signed",
        "gateway's certificate was not signed",
    ),
    "engine of another authority": Fault(
        "strange", "gateway", "engine's certificate was not signed by the authority", "refused this engine's certificate: it was not signed"
    ),
    "expired gateway": Fault(
        "engine", "expired", "refused this gateway's certificate: it has expired", "the gateway's certificate has expired"
    ),
    "expired engine": Fault(
        "expired", "gateway", "the engine's certificate has expired", "refused this engine's certificate: it has expired"
    ),
    "engine for another name": Fault("elsewhere", "gateway", "not valid for '127.0.0.2'", "not for the name or address that was dialled"),
    "plain text at a TLS port": Fault("engine", "", "the engine speaks TLS, and no certificates", "it sent plain text"),
    "TLS at a plain port": Fault("", "gateway", "the engine does not speak TLS", "it speaks TLS, and no certificates"),
}


def faulty_files(folder: Path, role: TlsRole, kind: str) -> TlsFiles | None:
    names = (HOST,) if role is TlsRole.ENGINE else ()
    match kind:
        case "":
            return None
        case "expired":
            return write_certificates(folder, SITE, role, *names, now=LONG_AGO)
        case "elsewhere":
            return write_certificates(folder, SITE, role, "127.0.0.9")
        case "strange":
            return write_certificates(folder, STRANGE, role, *names)
        case _:
            return write_certificates(folder, SITE, role, *names)


@pytest.mark.parametrize("name", FAULTS)
async def test_each_fault_has_its_reason_on_both_ends(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    gateway = faulty_files(tmp_path / "g", TlsRole.GATEWAY, fault.gateway)
    if "STRANGE" in fault.gateway:
        # An end refuses such files itself: the check is left out to see what the other end says.
        monkeypatch.setattr("headrace.wire.tls.files._check_own", lambda *_: None)
        gateway = write_certificates(tmp_path / "g", STRANGE, TlsRole.GATEWAY, trusted=SITE)
    async with (
        engine_at(HOST, faulty_files(tmp_path / "e", TlsRole.ENGINE, fault.engine)) as engine,
        ReplicaClient(engine.service.address, token=TOKEN, tls=gateway) as replica,
    ):
        await eventually(lambda: fault.gateway_says in replica.reason)
        await eventually(lambda: fault.engine_says in caplog.text)
        assert replica.info is None
    assert "refused a connection from 127.0.0.1: " in caplog.text
    assert "headrace.wire.client" in {record.name for record in caplog.records if fault.gateway_says in record.message}


@pytest.mark.parametrize("role", [TlsRole.ENGINE, None], ids=["an engine's certificate", "no certificate"])
async def test_only_a_gateways_certificate_opens_a_connection(
    tmp_path: Path, role: TlsRole | None, caplog: pytest.LogCaptureFixture
) -> None:
    """With OpenSSL alone, as a client that is not Headrace may come."""
    import ssl

    files = engine_files(tmp_path)
    context = ssl.create_default_context(cafile=files.ca)
    if role is not None:
        context.load_cert_chain(files.certificate, files.key)

    def connect(address: str) -> None:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), PATIENCE_S) as plain, context.wrap_socket(plain, server_hostname=host) as tls:
            tls.recv(1)

    async with engine_at(HOST, files) as engine:
        with pytest.raises(ssl.SSLError, match="UNSUPPORTED_CERTIFICATE|unsupported certificate" if role else "required"):
            await asyncio.to_thread(connect, engine.service.address)
    assert ("the gateway's certificate is for another role" if role else "the gateway sent no certificate") in caplog.text


@pytest.mark.parametrize("is_tls", [True, False])
async def test_an_engine_that_leaves_delivers_what_it_has_said(tmp_path: Path, is_tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay is behind when the gRPC server closes: nothing of what it has taken may be lost."""
    sendall = PlainStream.sendall

    async def send_late(self: PlainStream, data: bytes) -> None:
        await asyncio.sleep(0.05)
        await sendall(self, data)

    monkeypatch.setattr(listener, "LINGER_S", PATIENCE_S)
    tls, gateway_tls = (engine_files(tmp_path), gateway_files(tmp_path)) if is_tls else (None, None)
    async with engine_at(HOST, tls) as engine, ReplicaClient(engine.service.address, token=TOKEN, tls=gateway_tls) as replica:
        await replica.wait_connected(PATIENCE_S)
        streams = [replica.submit(request(f"r{i}", max_tokens=60)) for i in range(8)]
        await streams[0].__anext__()
        monkeypatch.setattr(PlainStream, "sendall", send_late)
        reading = asyncio.gather(*(read_all(stream) for stream in streams[1:]))
        engine.service.drain("stopping")
        assert await engine.service.drained(PATIENCE_S)
        await engine.service.stop()
        assert [len(answer[0]) for answer in await reading] == [60] * 7


async def test_a_wrong_token_is_named_on_both_ends_although_the_certificate_is_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        engine_at(HOST, engine_files(tmp_path)) as engine,
        ReplicaClient(engine.service.address, token="f" * 20, tls=gateway_files(tmp_path)) as replica,
    ):
        await eventually(lambda: "token is missing or wrong" in replica.reason)
    said = [record.message for record in caplog.records if "token is missing or wrong" in record.message]
    assert any(message.startswith("refused a call") for message in said)


async def test_renewed_certificates_of_both_ends_are_taken_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From an expired pair to a good one: the gateway connects by itself."""
    monkeypatch.setattr("headrace.wire.client.LAST_RETRY_S", 0.05)
    engine_tls = write_certificates(tmp_path / "engine", SITE, TlsRole.ENGINE, HOST, now=LONG_AGO)
    gateway_tls = write_certificates(tmp_path / "gateway", SITE, TlsRole.GATEWAY, now=LONG_AGO)
    async with engine_at(HOST, engine_tls) as engine, ReplicaClient(engine.service.address, token=TOKEN, tls=gateway_tls) as replica:
        await eventually(lambda: "has expired" in replica.reason)
        engine_files(tmp_path)
        await eventually(lambda: "refused this gateway's certificate: it has expired" in replica.reason)
        gateway_files(tmp_path)
        await replica.wait_connected(PATIENCE_S)
        assert len((await read_all(replica.submit(request("r"))))[0]) == 8


async def test_strangers_that_never_finish_take_no_more_than_their_share(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_S", 3600.0)
    monkeypatch.setattr(listener, "MAX_HANDSHAKES", 3)
    async with engine_at(HOST, engine_files(tmp_path)) as engine:
        host, _, port = engine.service.address.rpartition(":")
        accepting = engine.service._listener
        assert accepting is not None

        async def is_closed(reader: asyncio.StreamReader) -> bool:
            async with asyncio.timeout(PATIENCE_S):
                return await reader.read() == b""

        waiting = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        await eventually(lambda: accepting._num_handshakes == 3)
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await is_closed(reader), "at once, as there is no place for it"
        writer.close()
        _, writer = waiting.pop()
        writer.close()
        await eventually(lambda: accepting._num_handshakes == 2)
        monkeypatch.setattr(listener, "HANDSHAKE_S", 0.2)
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await is_closed(reader), "as its time is over"
        writer.close()
        monkeypatch.setattr(listener, "HANDSHAKE_S", 3600.0)
        async with ReplicaClient(engine.service.address, token=TOKEN, tls=gateway_files(tmp_path)) as replica:
            await replica.wait_connected(PATIENCE_S)
        for _, writer in waiting:
            writer.close()
    assert "3 connections have not finished their handshake" in caplog.text
    assert "did not finish its handshake within 0.2 s" in caplog.text


@pytest.mark.parametrize("is_tls", [True, False])
async def test_whatever_strangers_send_a_stream_beside_them_goes_on(tmp_path: Path, is_tls: bool, caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(0)
    tls, gateway_tls = (engine_files(tmp_path), gateway_files(tmp_path)) if is_tls else (None, None)
    openings = [
        b"\x16",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0",
        b"",
    ]

    async def stranger(host: str, port: int) -> None:
        _, writer = await asyncio.open_connection(host, port)
        with suppress(OSError):
            writer.write(draw.choice(openings) + draw.randbytes(draw.choice((0, 5, 300, 70_000))))
            await writer.drain()
        await asyncio.sleep(draw.random() * 0.05)
        writer.transport.abort()

    async with engine_at(HOST, tls) as engine, ReplicaClient(engine.service.address, token=TOKEN, tls=gateway_tls) as replica:
        await replica.wait_connected(PATIENCE_S)
        host, _, port = engine.service.address.rpartition(":")
        one = request("r", max_tokens=400)
        reading = asyncio.create_task(read_all(replica.submit(one)))
        for _ in range(5):
            await asyncio.gather(*(stranger(host, int(port)) for _ in range(20)))
        assert (await reading)[0] == fake_answer(one, 0, 400, FakeOptions())
        assert len((await read_all(replica.submit(request("after"))))[0]) == 8
    assert [record for record in caplog.records if record.levelno > logging.WARNING] == []


async def test_a_connection_whose_other_end_takes_nothing_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a gateway's machine loses its power: no packet says so, and the relay's sockets must not wait for one."""
    monkeypatch.setattr(listener, "UNREAD_S", 0.3)
    port = TcpListener(parse_target(f"{HOST}:0", TOKEN))

    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(50_000_000))
        with suppress(OSError):
            await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(flood, port.inner):
        host, _, number = (await port.start()).rpartition(":")
        with socket.create_connection((host, int(number))) as silent:
            silent.sendall(b"PRI")
            await eventually(lambda: port._num_handshakes == 0 and bool(port._serving))
            await eventually(lambda: not port._serving)
        await port.close()


@pytest.mark.pure
def test_the_same_refusal_of_one_address_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    refuse = RefusalLog(lambda: now[0])
    for now[0] in (0.0, 1.0, 59.0, 61.0):
        refuse("10.0.0.1", "expired")
    refuse("10.0.0.1", "plain")
    refuse("10.0.0.2", "expired")
    assert [record.message.rpartition("from ")[2] for record in caplog.records] == [
        "10.0.0.1: expired",
        "10.0.0.1: expired",
        "10.0.0.1: plain",
        "10.0.0.2: expired",
    ]


async def test_a_taken_port_is_an_error_and_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with socket.create_server((HOST, 0)) as taken:
        engine = Served(FakeOptions(), EngineConfig(model="fake"), f"{HOST}:{taken.getsockname()[1]}", token=TOKEN)
        with pytest.raises(CannotListen, match="in use"):
            await engine.service.start()
        with pytest.raises(CannotListen, match="in use"):
            check_can_listen(parse_target(engine.address, TOKEN))
        engine.runner.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["nowhere.invalid", "192.0.2.1"])
def test_an_address_that_is_not_this_machines_is_refused_before_weights_are_loaded(tmp_path: Path, host: str) -> None:
    with pytest.raises(CannotListen, match=f"cannot listen on {host}:7001: "):
        check_can_listen(parse_target(f"{host}:7001", TOKEN, engine_files(tmp_path)))


async def test_what_a_killed_engine_left_is_removed_and_a_living_ones_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    target = parse_target("127.0.0.1:0", TOKEN)
    dead = tmp_path / f"{FOLDER_PREFIX}dead"
    dead.mkdir()
    (dead / LOCK_NAME).touch()
    living = TcpListener(target)
    with socket.socket(socket.AF_UNIX) as starting:
        starting.bind(str(living.inner))  # and does not listen yet: connections are refused, as by a dead process's socket
        made = TcpListener(target)
    assert set(tmp_path.iterdir()) == {living.inner.parent, made.inner.parent}
    assert living.inner.exists()
    assert made.inner.parent.stat().st_mode & 0o777 == 0o700
    assert running_deployments(tmp_path) == [], "an engine's folder is no deployment's, wherever it is"
    await living.close()
    await made.close()
    assert list(tmp_path.iterdir()) == []


async def test_an_engine_that_ends_refuses_no_connection_for_want_of_its_grpc_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Gateways connect again at once when their stream ends."""
    async with engine_at(HOST, engine_files(tmp_path)) as engine:
        host, _, port = engine.service.address.rpartition(":")
        context = Certificates(gateway_files(tmp_path), TlsRole.GATEWAY).current().context
        is_over, num_connected = False, 0

        async def connect() -> None:
            nonlocal num_connected
            while not is_over:
                with suppress(OSError):
                    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
                    num_connected += 1
                    writer.transport.abort()
                await asyncio.sleep(0)

        connecting = [asyncio.create_task(connect()) for _ in range(8)]
        await eventually(lambda: num_connected >= 20)
        await engine.service.stop()
        is_over = True
        await asyncio.gather(*connecting)
    assert "does not answer" not in caplog.text


async def test_an_engine_whose_own_grpc_server_is_out_of_reach_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with engine_at(HOST, engine_files(tmp_path)) as engine:
        assert engine.service._listener is not None
        engine.service._listener.inner.unlink()
        async with ReplicaClient(engine.service.address, token=TOKEN, tls=gateway_files(tmp_path)):
            await eventually(lambda: "this engine's gRPC server does not answer at " in caplog.text)


@pytest.mark.pure
def test_a_temporary_directory_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot be written"):
        TcpListener(parse_target("127.0.0.1:0", TOKEN))


@pytest.mark.pure
def test_a_temporary_directory_too_deep_for_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match="Set TMPDIR to a shorter one"):
        TcpListener(parse_target("127.0.0.1:0", TOKEN))
    assert list(deep.iterdir()) == []


@pytest.mark.pure
def test_log_records_of_refusals_are_warnings(caplog: pytest.LogCaptureFixture) -> None:
    RefusalLog(lambda: 0.0)("10.0.0.1", "expired")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
