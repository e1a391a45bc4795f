"""Provides a real tokenizer with a chat template, a gateway over in-process replicas, and a Redis server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import text_kit
from gateway_kit import MODEL, TestBench, open_bench, serving
from kinds import guard, kind_of
from patience import PATIENCE_S
from redis_kit import RedisServer
from tls_kit import authority, write_certificates
from wire_kit import socket_dir

from headrace.gateway.http.config import HttpTls
from headrace.gateway.stores.guard import REQUEST_WAIT_S
from headrace.text.folder import TextModel, load_text
from headrace.wire.tls.files import TlsRole


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine, and text that the tests themselves read, hold the event loop up for longer than a request waits for a store, or a
    store's client for its server.

    On virtual time nothing does.
    """
    if kind_of(request.node) != "loop":
        monkeypatch.setattr("headrace.gateway.stores.guard.REQUEST_WAIT_S", PATIENCE_S)
        for name in ("CONNECT_S", "ANSWER_S"):
            monkeypatch.setattr(f"headrace.gateway.stores.redis.{name}", PATIENCE_S)


@pytest.fixture
def use_shipped_patience(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function: from its call on requests wait for stores as long as they do in use.

    For a test that asks with patience first: the first connection to a store may take a busy machine longer.
    """
    return lambda: monkeypatch.setattr("headrace.gateway.stores.guard.REQUEST_WAIT_S", REQUEST_WAIT_S)


@pytest.fixture
def shipped_patience(use_shipped_patience: Callable[[], None]) -> None:
    """Requests wait for stores as long as they do in use, from the test's begin on."""
    use_shipped_patience()


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_kit.save_byte_level(tmp_path_factory.mktemp("gateway") / "model")


@pytest.fixture(scope="session")
def text(text_folder: Path) -> TextModel:
    model = load_text(text_folder)
    model.template.compile()
    return model


@pytest.fixture(scope="session")
def https_files(tmp_path_factory: pytest.TempPathFactory) -> HttpTls:
    files = write_certificates(tmp_path_factory.mktemp("https"), authority(), TlsRole.ENGINE, "localhost")
    return HttpTls(certificate=files.certificate, key=files.key)


@pytest.fixture(params=["plain", "tls"])
def over(request: pytest.FixtureRequest, https_files: HttpTls, monkeypatch: pytest.MonkeyPatch) -> str:
    """The transport of `serving` and `dial`: each promise to a connection holds over both."""
    monkeypatch.setattr("gateway_kit.https", https_files if request.param == "tls" else None)
    name: str = request.param
    return name


@pytest.fixture
async def bench(text: TextModel) -> AsyncIterator[TestBench]:
    async with open_bench(text) as opened:
        yield opened


@pytest.fixture(params=["tokens", "foreign"])
async def either(request: pytest.FixtureRequest, text: TextModel) -> AsyncIterator[TestBench]:
    """A bench whose model is answered by our engines, and one whose model a foreign server answers: another gateway, over our engines.

    `replica` is the engine's in both.
    """
    if request.param == "tokens":
        async with open_bench(text) as opened:
            yield opened
        return
    async with open_bench(text) as far, serving(far.gateway) as port:
        models = [{"name": MODEL, "aliases": ["gpt-4o"], "upstreams": [{"url": f"http://127.0.0.1:{port}/v1"}]}]
        async with open_bench(text, models=models) as near:
            near.replicas, near.label = far.replicas, "foreign-0"
            yield near


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    """The server of this test process."""
    with socket_dir() as folder:
        server = RedisServer(folder)
        with guard.lifted():
            server.start()
        yield server
        with guard.lifted():
            server.stop()


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> RedisServer:
    """An empty server, for tests that let it run and change none of its options."""
    shared_redis.empty()
    return shared_redis


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A server that the test may stop, hang and start with other options."""
    with socket_dir() as folder:
        server = RedisServer(folder)
        server.start()
        yield server
        server.stop()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url
