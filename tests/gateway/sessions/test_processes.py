"""Tests a session that two gateway processes serve in turn, while they are killed and started again; on a file and on a real Redis."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from gateway_processes import GATEWAY, Child, child, site, write_gateway_file
from patience import PATIENCE_S
from session_kit import CHAT, user
from wire_kit import socket_dir

from headrace.gateway.sessions.sessions import LEASE_S

pytestmark = pytest.mark.process

VOCAB = 345
MAX_MODEL_LEN = 400
NUM_TURNS = 24


class Gateways:
    """Two gateway processes of one configuration. Each keeps its number when it is started again."""

    def __init__(self, start: Callable[[], Child]) -> None:
        self._start = start
        self._children = [start(), start()]

    def kill(self, number: int, how: signal.Signals) -> None:
        self._children[number].signal(how)
        self._children[number].wait()

    def start_again(self, number: int) -> None:
        self._children[number] = self._start()

    def client(self, number: int) -> httpx2.Client:
        return httpx2.Client(base_url=f"http://127.0.0.1:{self._children[number].facts['port']}", timeout=PATIENCE_S)

    def turn(self, number: int, said: str, **fields: Any) -> httpx2.Response:
        with self.client(number) as client:
            return client.post(CHAT, json={"messages": [user(said)], "max_tokens": 4, **fields}, headers={"x-session-id": "s"})

    def session(self, number: int) -> dict[str, Any]:
        with self.client(number) as client:
            found: dict[str, Any] = client.get("/v1/sessions/s").json()
            return found


@contextmanager
def two_gateways(folder: Path, text_folder: Path, store: dict[str, Any]) -> Iterator[Gateways]:
    fake = {"vocab_size": VOCAB, "step_seconds": 0.002, "max_model_len": MAX_MODEL_LEN}
    with site(folder, text_folder, fake) as made, ExitStack() as stack:
        path = write_gateway_file(folder, text_folder, 1, store)

        def start() -> Child:
            started = stack.enter_context(child(GATEWAY, path))
            url = f"http://127.0.0.1:{started.wait_ready()['port']}"
            made.url = url
            made.wait_until("/ready?strict", 200)
            return started

        yield Gateways(start)


def numbers(messages: list[dict[str, Any]]) -> list[int]:
    """Which turns are there, by what the user said."""
    return [int(re.fullmatch(r"Turn (\d+):.*", message["content"])[1]) for message in messages if message["role"] == "user"]  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.parametrize("store", ["file", "redis"])
@pytest.mark.parametrize("fitting", ["sliding_window", "summary"])
def test_a_session_outlives_its_gateways_and_loses_only_what_its_answers_said(
    request: pytest.FixtureRequest, text_folder: Path, tmp_path: Path, store: str, fitting: str
) -> None:
    where = {"state": str(tmp_path)} if store == "file" else {"store": {"url": request.getfixturevalue("redis_url")}}
    with socket_dir() as folder, two_gateways(folder, text_folder, where) as gateways:
        num_dropped = 0
        for number in range(NUM_TURNS):
            answer = gateways.turn(number % 2, f"Turn {number}: the quick brown fox.", context_fitting=fitting)
            assert answer.status_code == 200, answer.text
            if (context := answer.json()["usage"].get("context")) is not None:
                num_dropped += context["dropped_messages"]
            if number in (7, 16):  # before and after turns were left out
                for which, how in ((0, signal.SIGTERM), (1, signal.SIGKILL)):
                    gateways.kill(which, how)
                    gateways.start_again(which)
        kept = gateways.session(0)
        assert kept == gateways.session(1)
        assert numbers(kept["messages"]) == list(range(num_dropped // 2, NUM_TURNS)), "whole turns from the oldest one on were left out"
        assert 0 < num_dropped < 2 * NUM_TURNS
        assert bool(kept["summary"]) is (fitting == "summary")


@pytest.mark.slow
@pytest.mark.parametrize("store", ["file", "redis"])
def test_the_turn_of_a_gateway_that_was_killed_is_over_after_its_lease(
    request: pytest.FixtureRequest, text_folder: Path, tmp_path: Path, store: str
) -> None:
    where = {"state": str(tmp_path)} if store == "file" else {"store": {"url": request.getfixturevalue("redis_url")}}
    with socket_dir() as folder, two_gateways(folder, text_folder, where) as gateways:
        assert gateways.turn(0, "Turn 0:").status_code == 200
        with gateways.client(0) as client:
            body = {"messages": [user("Turn 1:")], "max_tokens": 300, "ignore_eos": True, "stream": True}
            with client.stream("POST", CHAT, json=body, headers={"x-session-id": "s"}) as running:
                next(running.iter_lines())
                gateways.kill(0, signal.SIGKILL)
        began = time.monotonic()
        while (answer := gateways.turn(1, "Turn 2:")).status_code == 409:
            assert time.monotonic() - began < LEASE_S + PATIENCE_S
        assert answer.status_code == 200, answer.text
        assert numbers(gateways.session(1)["messages"]) == [0, 2]
