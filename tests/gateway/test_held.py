"""What requests hold is counted while they run, refused by name where there is no room, and given back whatever becomes of them."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
import weakref
from collections.abc import Iterable
from typing import Any

import httpx2
import pytest
from gateway_kit import MODEL, TestBench, chat_body, dial, eventually, metric, open_bench, post, serving

from headrace.core.errors import DeadlineExceeded
from headrace.core.ids import RequestId
from headrace.gateway import memory
from headrace.gateway.access.open_requests import OpenRequests
from headrace.gateway.http.exchange import ABORT_EXTENSION, Exchange
from headrace.gateway.http.sse import StreamWatch
from headrace.gateway.surfaces.dialect.logprobs import echo_logprobs
from headrace.observe.request_log import RequestRecord
from headrace.text.folder import TextModel

PROMPT = [40 + i % 50 for i in range(480)]
ECHO = {"model": MODEL, "prompt": PROMPT, "echo": True, "logprobs": 20, "n": 24, "max_tokens": 4, "stream": True}


async def ask(bench: TestBench, path: str, body: dict[str, Any]) -> httpx2.Response:
    return await bench.client.post(path, json=body)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_whatever_a_request_held_is_given_back(bench: TestBench, path: str) -> None:
    budget = bench.gateway.service.budget
    bodies = {
        "/v1/completions": {**ECHO, "n": 2, "stream": False, "prompt_logprobs": 3},
        "/v1/chat/completions": chat_body(logprobs=True, top_logprobs=5, n=2),
        "/tokenize": {"model": MODEL, "prompt": "Hello"},
    }
    for body in (bodies[path], {**bodies[path], "model": "nobody"}):  # answered, and refused after the body was read
        await ask(bench, path, body)
        budget.check()
        assert budget.held == 0


async def test_a_body_counts_while_its_request_runs(bench: TestBench) -> None:
    bench.replica.go.clear()
    body = {"model": MODEL, "prompt": "x" * 400, "max_tokens": 1}
    asked = asyncio.create_task(ask(bench, "/v1/completions", body))
    await eventually(lambda: bool(bench.replica.requests))
    held = bench.gateway.service.budget.held
    assert held >= 400 + 36 * len(bench.replica.requests[0].prompt_ids)
    assert metric(bench.gateway, "headrace_gateway_held_bytes") == held
    bench.replica.go.set()
    assert (await asked).status_code == 200
    assert bench.gateway.service.budget.held == 0


async def test_unread_echoes_are_held_once_however_many_choices_show_them(text: TextModel) -> None:
    """24 choices of one prompt were 24 encoded copies of its scores, and 24 lists of the engine's."""
    async with open_bench(text) as bench, serving(bench.gateway) as port:
        budget = bench.gateway.service.budget
        async with dial(port, limit=1024) as (_, writer):
            tracemalloc.start()
            try:
                writer.write(post("/v1/completions", ECHO))
                await eventually(lambda: bool(bench.gateway.service.watch.writing), within_s=30)
                await asyncio.sleep(0.3)
                taken = tracemalloc.get_traced_memory()[0]
            finally:
                tracemalloc.stop()
            assert bench.gateway.service.watch.writing, "the client reads nothing, so the answer is not out"
            assert taken < 2_500_000, "a copy of the scores for each choice takes 4.5 MB"
            budget.check()
        await eventually(lambda: bench.gateway.service.open_requests.num_open == 0)
        assert budget.held == 0


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_scores_that_are_not_there_yet_are_not_held(bench: TestBench, is_streaming: bool) -> None:
    """20 requests with 20 alternatives and a context of 4k were all that 40 MiB let in."""
    bench.replica.go.clear()
    body = chat_body(logprobs=True, top_logprobs=20, stream=is_streaming)
    asked = asyncio.create_task(ask(bench, "/v1/chat/completions", {**body, "max_tokens": None}))
    await eventually(lambda: bool(bench.replica.requests))
    assert bench.gateway.service.budget.held < 100_000
    bench.replica.go.set()
    assert (await asked).status_code == 200


async def test_where_there_is_no_room_a_request_is_told_so_and_room_comes_back(text: TextModel) -> None:
    async with open_bench(text, limits={"max_held_bytes": 2_000_000, "max_tenant_held_bytes": 2_000_000}) as bench:
        bench.replica.go.clear()
        first = asyncio.create_task(ask(bench, "/v1/completions", {**ECHO, "n": 2}))
        second = asyncio.create_task(ask(bench, "/v1/completions", {**ECHO, "n": 2}))
        await eventually(lambda: len(bench.replica.requests) == 2)
        refused = await ask(bench, "/v1/completions", {**ECHO, "n": 2})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert "memory for answers is taken" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        assert metric(bench.gateway, "headrace_gateway_held_refused") == 1
        assert (await bench.chat(max_tokens=0)).status_code == 400  # others are still heard
        bench.replica.go.set()
        assert [(await task).status_code for task in (first, second)] == [200, 200]
        assert (await ask(bench, "/v1/completions", {**ECHO, "n": 2})).status_code == 200


async def test_one_request_that_is_too_large_alone_is_refused_for_good(text: TextModel) -> None:
    async with open_bench(text, limits={"max_request_held_bytes": 100_000}) as bench:
        refused = await ask(bench, "/v1/completions", ECHO)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
        assert "limits.max_request_held_bytes" in refused.json()["error"]["message"]
        assert bench.replica.requests == []
        assert (await bench.chat(max_tokens=1)).status_code == 200


async def test_a_whole_answer_that_outgrows_the_room_ends_and_its_engine_is_told(text: TextModel) -> None:
    async with open_bench(text, limits={"max_request_held_bytes": 40_000}) as bench:
        refused = await bench.chat(logprobs=True, top_logprobs=20, n=3, max_tokens=400, ignore_eos=True)
        assert refused.status_code == 413
        await eventually(lambda: bench.replica.num_open == 0)
        assert bench.gateway.service.budget.held == 0


def test_choices_show_the_same_pieces() -> None:
    class Prompt:
        text = "ab"

        def entries(self, scores: Any) -> Any:
            from headrace.text.assemble import TokenEntry, TopToken

            for i in range(200):
                yield TokenEntry(i, "a", b"a", -0.5, 1, (TopToken(i, "b", b"b", -1.0),), i)

    made = echo_logprobs(Prompt(), (), 1)
    first, second = made.pieces(None), made.pieces(None)
    assert json.loads(b"".join(first))["top_logprobs"][:2] == [None, {"a": -0.5, "b": -1.0}]
    large = [piece for piece in first if len(piece) > 100]
    assert len(large) >= 12
    assert all(any(piece is other for other in second) for piece in large)


class Client:
    """An exchange whose client takes nothing while so many bytes are being written to it."""

    def __init__(self, size: int) -> None:
        self.was_dropped = False
        extensions = {ABORT_EXTENSION: self._drop}
        record = RequestRecord(request_id=RequestId("r"), method="POST", path="/", time=0.0)
        self.exchange = Exchange(
            {"headers": [], "extensions": extensions}, self._never, self._never, request_id=RequestId("r"), record=record, arrived_s=0.0
        )
        self.exchange.pending_bytes = self.size = size

    def _drop(self) -> None:
        self.was_dropped = True

    async def _never(self, *_: Any) -> Any:
        raise AssertionError("nothing is read or written here")


def blocked_clients(watch: StreamWatch, sizes: Iterable[int]) -> list[Client]:
    clients = [Client(size) for size in sizes]
    watch.writing = {watch.open(client.exchange, lambda: 0) for client in clients}
    return clients


@pytest.mark.parametrize(("left", "cut"), [(600, []), (599, [300]), (250, [300, 200]), (0, [300, 200, 100]), (-5, [300, 200, 100])])
def test_when_all_streams_together_make_too_much_wait_the_largest_goes_first(left: int, cut: list[int]) -> None:
    watch = StreamWatch(ping_s=10, max_pending_bytes=1000, left_bytes=lambda: left)
    clients = blocked_clients(watch, (100, 300, 200, 0))
    watch.look()
    assert sorted((client.size for client in clients if client.was_dropped), reverse=True) == cut
    assert watch.num_cut == len(cut)
    watch.look()
    assert watch.num_cut == len(cut), "what is gone waits no more"


def test_a_stream_that_has_ended_already_is_dropped_before_streams_that_have_not() -> None:
    """Its task was blocked in the socket with its bytes; every other stream was cut, those with nothing waiting as well."""
    watch = StreamWatch(ping_s=10, max_pending_bytes=1000, left_bytes=lambda: 250)
    clients = blocked_clients(watch, (100, 300, 0, 0))
    over = DeadlineExceeded("over")
    clients[1].exchange.leave(over)
    watch.look()
    assert [client.was_dropped for client in clients] == [False, True, False, False]
    assert clients[1].exchange.left is over
    assert watch.num_cut == 1


class Cycle:
    def __init__(self) -> None:
        self.me = self


async def test_cycles_are_collected_once_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """766 MB of a storm's were kept until new work came."""
    monkeypatch.setattr(memory, "LOOK_S", 0.01)
    open_requests = OpenRequests(4)
    gc.disable()
    task = asyncio.create_task(memory.give_back_when_idle(open_requests))
    try:
        await asyncio.sleep(0.02)
        with open_requests.admit("a", lambda _: None):  # type: ignore[arg-type]
            left = weakref.ref(Cycle())
            with open_requests.admit("b", lambda _: None):  # type: ignore[arg-type]
                pass
            await asyncio.sleep(0.05)
            assert left() is not None, "not while something runs"
        await eventually(lambda: left() is None)
    finally:
        gc.enable()
        task.cancel()
