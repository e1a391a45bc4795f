"""Workers of one port ask each other over Unix sockets."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest
from lateness import machine_lateness
from wire_kit import socket_dir

from headrace.gateway.siblings import ANSWER_S, Siblings
from headrace.gateway.worker import GatewayWorker


def a_worker(index: int, folder: Path, count: int = 3) -> Siblings:
    return Siblings(GatewayWorker(index, folder), count, {"name": lambda: f"worker {index}".encode(), "long": lambda: b"x" * (5 << 20)})


@pytest.fixture
def long_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """For answers that come, and come late on a busy machine."""
    monkeypatch.setattr("headrace.gateway.siblings.ANSWER_S", 30.0)


@pytest.mark.usefixtures("long_patience")
async def test_each_worker_has_the_answers_of_all() -> None:
    with socket_dir() as folder:
        async with a_worker(0, folder) as first, a_worker(1, folder), a_worker(2, folder) as last:
            assert await first.ask("name") == {0: b"worker 0", 1: b"worker 1", 2: b"worker 2"}
            assert {index: len(answer) for index, answer in (await last.ask("long")).items()} == dict.fromkeys(range(3), 5 << 20)


async def test_a_worker_that_is_not_there_or_hangs_has_no_answer() -> None:
    with socket_dir() as folder:
        (folder / "w1.sock").touch()  # no socket at all
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(str(folder / "w2.sock"))
            silent.listen()
            async with a_worker(0, folder) as first:
                with machine_lateness() as lateness:
                    began = time.monotonic()
                    assert await first.ask("name") == {0: b"worker 0", 1: b"", 2: b""}
                    assert time.monotonic() - began < ANSWER_S + 2 + lateness.late_s


@pytest.mark.usefixtures("long_patience")
async def test_a_worker_takes_the_socket_of_the_one_before_it() -> None:
    with socket_dir() as folder:
        (folder / "w1.sock").touch()
        async with a_worker(0, folder) as first, a_worker(1, folder):
            assert (await first.ask("name"))[1] == b"worker 1"


@pytest.mark.parametrize("question", [b"unknown\n", b"\xff\n", b"", b"x" * (1 << 20)])
async def test_an_unknown_question_ends_without_an_answer(question: bytes) -> None:
    with socket_dir() as folder:
        async with a_worker(0, folder) as first:
            reader, writer = await asyncio.open_unix_connection(str(folder / "w0.sock"))
            writer.write(question)
            if not question.endswith(b"\n"):
                writer.write_eof()
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            writer.close()
            assert (await first.ask("name"))[0] == b"worker 0"
