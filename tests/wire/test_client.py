"""Tests that a gateway's connection survives exceptions of gRPC and of ours, and reports them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from typing import Any

import grpc.aio
import pytest
from patience import PATIENCE_S, eventually
from wire_kit import Served, connected, read_all, request, served, socket_dir

from headrace.core.errors import Unavailable
from headrace.engine.config import EngineConfig
from headrace.lab.fake_runner import FakeOptions, fake_answer
from headrace.wire.client import ReplicaClient
from headrace.wire.service import Expectation

pytestmark = pytest.mark.socket


class BrokenCall:
    """A real call whose writes after the hello raise `error`, as gRPC's do when the call ended a moment before."""

    def __init__(self, call: Any, error: BaseException) -> None:
        self._call = call
        self._error = error
        self._num_writes = 0

    async def write(self, frame: Any) -> None:
        self._num_writes += 1
        if self._num_writes > 1:
            raise self._error
        await self._call.write(frame)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


class BrokenChannel:
    def __init__(self, channel: Any, error: BaseException) -> None:
        self._channel = channel
        self._error = error

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        make = self._channel.stream_stream(*args, **kwargs)
        return lambda **options: BrokenCall(make(**options), self._error)

    async def close(self) -> None:
        await self._channel.close()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What clients logged; engines live in this process as well and have their own say."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("headrace.wire.client")
    logger.addHandler(handler)
    with caplog.at_level(logging.INFO, logger=logger.name):
        yield messages
    logger.removeHandler(handler)


@pytest.mark.parametrize(
    "error",
    [
        asyncio.InvalidStateError("RPC already finished."),
        grpc.aio.UsageError("the call is done"),
        asyncio.CancelledError(),
        BrokenPipeError("gone"),
        RuntimeError("a bug of ours"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_write_that_fails_for_any_reason_loses_the_connection_and_not_the_replica(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = grpc.aio.insecure_channel
    async with served() as engine:
        with monkeypatch.context() as patched:
            patched.setattr(grpc.aio, "insecure_channel", lambda *args, **kwargs: BrokenChannel(real(*args, **kwargs), error))
            replica = ReplicaClient(engine.address)
            replica.start()
            await replica.wait_connected(PATIENCE_S)
        with pytest.raises(Unavailable, match="can be sent again"):
            await read_all(replica.submit(request("lost")))
        await replica.wait_connected(PATIENCE_S)
        one = request("again")
        assert (await read_all(replica.submit(one)))[0] == fake_answer(one, 0, 8, engine.options)
        await replica.close()


async def test_a_refused_socket_is_told_once_and_the_connection_afterwards_too(told: list[str]) -> None:
    with socket_dir() as folder:
        async with ReplicaClient(f"unix:{folder}/none.sock", name="r0") as replica:
            await eventually(lambda: bool(told))
            with pytest.raises(Unavailable):
                await replica.wait_connected(0.3)
    assert len(told) == len(set(told))
    assert told[0] == "waiting for replica r0 to start", "in no words of gRPC's, which would alarm"
    async with served() as engine, connected(engine, name="r1"):
        assert told[-1].startswith("replica r1 is connected (instance ")


@pytest.mark.parametrize("name", ["My Folder", "a%41b", "100%", "it's #1", "is it?", "mod\u00e8le"])
async def test_a_socket_whose_folder_has_any_name_is_reached(name: str) -> None:
    """gRPC reads the path as a part of a URL: engines listened where no gateway looked."""
    with socket_dir() as folder:
        (folder / name).mkdir(mode=0o700)
        engine = Served(FakeOptions(), EngineConfig(model="fake"), f"unix:{folder / name}/e.sock")
        await engine.start()
        try:
            async with connected(engine) as replica:
                one = request("odd")
                assert (await read_all(replica.submit(one)))[0] == fake_answer(one, 0, 8, engine.options)
            assert (folder / name / "e.sock").is_socket()
        finally:
            await engine.stop()


async def test_a_listener_that_is_no_engine_is_not_taken_for_one_that_starts(told: list[str]) -> None:
    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    with socket_dir() as folder:
        server = await asyncio.start_unix_server(hang_up, f"{folder}/other.sock")
        async with server, ReplicaClient(f"unix:{folder}/other.sock", name="r0"):
            await eventually(lambda: bool(told))
    assert told[0].startswith("replica r0 is down: unavailable"), told


async def test_a_loopback_port_nobody_listens_at_belongs_to_an_engine_that_starts(told: list[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        async with ReplicaClient(f"127.0.0.1:{taken.getsockname()[1]}", name="r0", token="t" * 16):
            await eventually(lambda: bool(told))
    assert told[0] == "waiting for replica r0 to start"


async def test_a_model_that_does_not_fit_is_told_once(told: list[str]) -> None:
    async with served() as engine, ReplicaClient(engine.address, name="r0", expect=Expectation(vocab_size=5)) as replica:
        await eventually(lambda: bool(told))
        with pytest.raises(Unavailable, match="vocabulary"):
            await replica.wait_connected(0.5)
    assert len(told) == 1, told
    assert "vocabulary: the engine has 4096 entries, the gateway 5" in told[0]
