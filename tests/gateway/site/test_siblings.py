"""Tests that workers of one port ask each other over Unix sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from virtual_time import virtual_loop
from wire_kit import socket_dir

from headrace.gateway.site import ANSWER_S, GatewayWorker, Siblings

pytestmark = pytest.mark.loop


def a_worker(index: int, folder: Path, count: int = 3) -> Siblings:
    async def name(_argument: str) -> bytes:
        return f"worker {index}".encode()

    async def long(_argument: str) -> bytes:
        return b"x" * (5 << 20)

    siblings = Siblings(GatewayWorker(index, folder), count)
    siblings.handle("name", name)
    siblings.handle("long", long)
    return siblings


async def test_each_worker_has_the_answers_of_all(tmp_path: Path) -> None:
    async with a_worker(0, tmp_path) as first, a_worker(1, tmp_path), a_worker(2, tmp_path) as last:
        assert await first.ask("name") == {0: b"worker 0", 1: b"worker 1", 2: b"worker 2"}
        assert {index: len(answer) for index, answer in (await last.ask("long")).items()} == dict.fromkeys(range(3), 5 << 20)


async def test_a_worker_that_is_not_there_has_no_answer_and_one_that_hangs_is_waited_for_a_second(tmp_path: Path) -> None:
    loop = virtual_loop()
    async with a_worker(0, tmp_path) as first:
        began = loop.time()
        assert await first.ask("name") == {0: b"worker 0", 1: b"", 2: b""}
        assert loop.time() == began
        silent = loop.network.listen_at(str(tmp_path / "w2.sock"))
        assert await first.ask("name") == {0: b"worker 0", 1: b"", 2: b""}
        assert loop.time() - began == ANSWER_S
        silent.close()


async def test_a_worker_whose_answer_is_late_is_not_waited_for(tmp_path: Path) -> None:
    async def answer(argument: str) -> bytes:
        await asyncio.sleep(float(argument))
        return b"late"

    async with a_worker(0, tmp_path, 2) as first, a_worker(1, tmp_path, 2) as second:
        second.handle("wait", answer)
        assert await first.ask_others("wait", str(ANSWER_S - 0.1)) == [b"late"]
        assert await first.ask_others("wait", str(ANSWER_S + 0.1)) == [b""]


@pytest.mark.parametrize("question", [b"unknown\n", b"\xff\n", b"", b"x" * (1 << 20)])
async def test_an_unknown_question_ends_without_an_answer(question: bytes, tmp_path: Path) -> None:
    async with a_worker(0, tmp_path) as first:
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "w0.sock"))
        writer.write(question)
        if not question.endswith(b"\n"):
            writer.write_eof()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        assert (await first.ask("name"))[0] == b"worker 0"


@pytest.mark.socket
async def test_a_worker_takes_the_socket_of_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.gateway.site.ANSWER_S", 60.0)
    with socket_dir() as folder:
        (folder / "w1.sock").touch()
        async with a_worker(0, folder, 2) as first:
            assert await first.ask("name") == {0: b"worker 0", 1: b""}, "what is no socket has no answer"
            async with a_worker(1, folder, 2):
                assert (await first.ask("name"))[1] == b"worker 1"
