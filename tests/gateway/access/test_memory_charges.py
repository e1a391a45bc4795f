"""Tests that requests are charged for memory while they run and refused by name if it is full, and that every charge is given back."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import httpx2
import pytest
from asgi_connection import exchange_of
from gateway_kit import MODEL, TestBench, chat_body, dial, eventually, metric, open_bench, post, serving, token_logprobs

from headrace.core.errors import ConfigError, DeadlineExceeded, Overloaded
from headrace.core.plan import columns_of
from headrace.gateway import site
from headrace.gateway.access.memory_charges import ChargeLimits, MemoryCharge, MemoryLimits, RequestMemory
from headrace.gateway.config import config_from
from headrace.gateway.generation.account import Ending
from headrace.gateway.generation.answer_memory import first_answer_bytes
from headrace.gateway.generation.call import Call
from headrace.gateway.http.config import Limits
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.http.sse import StreamWatch
from headrace.gateway.limits.reservation import LimitReservation
from headrace.gateway.site import TenantShare
from headrace.gateway.surfaces.dialect.logprobs import completion_logprobs, echo_logprobs
from headrace.gateway.upstream.own.upstream import TokenPrompt
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

PROMPT = [40 + i % 50 for i in range(480)]
ECHO = {"model": MODEL, "prompt": PROMPT, "echo": True, "logprobs": 20, "n": 24, "max_tokens": 4, "stream": True}


async def ask(bench: TestBench, path: str, body: dict[str, Any]) -> httpx2.Response:
    return await bench.client.post(path, json=body)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_whatever_a_request_held_is_given_back(bench: TestBench, path: str) -> None:
    budget = bench.gateway.service.memory
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
    held = bench.gateway.service.memory.held
    assert held >= 400 + 36 * len(bench.replica.requests[0].prompt_ids)
    assert metric(bench.gateway, "headrace_gateway_held_bytes", of="prompts") == held - 8  # the answer of one token
    bench.replica.go.set()
    assert (await asked).status_code == 200
    assert bench.gateway.service.memory.held == 0


async def test_unread_echoes_are_held_once_however_many_choices_show_them(text: TextModel) -> None:
    """24 choices of one prompt were 24 encoded copies of its log-probabilities, and 24 lists of the engine's."""
    async with open_bench(text) as bench, serving(bench.gateway) as port:
        budget = bench.gateway.service.memory
        async with dial(port, limit=1024) as (_, writer):
            tracemalloc.start()
            try:
                writer.write(post("/v1/completions", ECHO))
                await eventually(lambda: bool(bench.gateway.service.pipeline.watch.writing))
                await asyncio.sleep(0.3)
                taken = tracemalloc.get_traced_memory()[0]
            finally:
                tracemalloc.stop()
            assert bench.gateway.service.pipeline.watch.writing, "the client reads nothing, so the answer is not out"
            assert taken < 2_500_000, "a copy of the log-probabilities for each choice takes 4.5 MB"
            budget.check()
        await eventually(lambda: bench.gateway.service.open_requests.num_open == 0)
        assert budget.held == 0


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_logprobs_that_are_not_there_yet_are_not_held(bench: TestBench, is_streaming: bool) -> None:
    """20 requests with 20 alternatives and a context of 4k were all that 40 MiB let in."""
    bench.replica.go.clear()
    body = chat_body(logprobs=True, top_logprobs=20, stream=is_streaming)
    asked = asyncio.create_task(ask(bench, "/v1/chat/completions", {**body, "max_tokens": None}))
    await eventually(lambda: bool(bench.replica.requests))
    assert bench.gateway.service.memory.held < 100_000
    bench.replica.go.set()
    assert (await asked).status_code == 200


async def test_where_there_is_no_room_a_request_is_told_so_and_room_comes_back(text: TextModel) -> None:
    async with open_bench(text, limits={"max_answer_bytes": 2_875_000}) as bench:
        bench.replica.go.clear()
        first = asyncio.create_task(ask(bench, "/v1/completions", {**ECHO, "n": 2}))
        second = asyncio.create_task(ask(bench, "/v1/completions", {**ECHO, "n": 2}))
        await eventually(lambda: len(bench.replica.requests) == 2)
        refused = await ask(bench, "/v1/completions", {**ECHO, "n": 2})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert "memory for answers is taken" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        assert metric(bench.gateway, "headrace_gateway_held_refused_total", of="answers") == 1
        assert (await bench.chat(max_tokens=0)).status_code == 400  # others are still heard
        bench.replica.go.set()
        assert [(await task).status_code for task in (first, second)] == [200, 200]
        assert (await ask(bench, "/v1/completions", {**ECHO, "n": 2})).status_code == 200


async def test_one_request_that_is_too_large_alone_is_refused_for_good(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "MAX_REQUEST_BYTES", 100_000)
    async with open_bench(text) as bench:
        refused = await ask(bench, "/v1/completions", ECHO)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
        assert "at most 100000 bytes here" in refused.json()["error"]["message"]
        assert bench.replica.requests == []
        assert (await bench.chat(max_tokens=1)).status_code == 200


async def test_a_whole_answer_that_outgrows_the_room_ends_and_its_engine_is_told(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "MAX_REQUEST_BYTES", 40_000)
    async with open_bench(text) as bench:
        refused = await bench.chat(logprobs=True, top_logprobs=20, n=3, max_tokens=400, ignore_eos=True)
        assert refused.status_code == 413
        await eventually(lambda: bench.replica.num_open == 0)
        assert bench.gateway.service.memory.held == 0


KEYS = ({"key": "k" * 16, "tenant": "a"}, {"key": "l" * 16, "tenant": "b"})


def budget_of(**limits: Any) -> RequestMemory:
    config = config_from({"models": [{"name": "m", "folder": "f", "replicas": [{"name": "r", "address": "unix:/a"}]}], **limits})
    return RequestMemory(site.memory_limits(config.limits, 16 << 30, TenantShare(config.limits.max_tenant_share, config.num_tenants)))


def fill(stack: ExitStack, budget: RequestMemory, tenant: str, *, of: str) -> None:
    """Requests of a tenant, a mebibyte each, until one is refused."""
    while True:
        held: MemoryCharge = getattr(stack.enter_context(budget.open(tenant)), of)
        held.add(1 << 20)


@pytest.mark.pure
def test_one_tenant_cannot_take_the_memory_of_all() -> None:
    """40 connections that sent 1 MiB of body and stopped were all it took to refuse every other key."""
    budget = budget_of(api_keys=KEYS)
    with ExitStack() as stack:
        with pytest.raises(Overloaded, match="prompts is taken by your other requests"):
            fill(stack, budget, "a", of="prompts")
        with budget.open("b") as other:
            other.prompts.add(1 << 20)
        budget.check()


@pytest.mark.pure
def test_without_keys_there_is_one_tenant_who_may_take_all() -> None:
    budget = budget_of()
    assert budget.prompts.limits.tenant == budget.prompts.limits.total == 1 << 30
    assert budget.answers.limits.tenant == budget.answers.limits.total == 40 << 20
    assert site.memory_limits(Limits(), 1, lambda: 1.0).prompts.total == 40 << 20


@pytest.mark.pure
def test_a_share_that_isolates_nobody_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"limits.max_tenant_share: 1.* lets one of 2 tenants take what all have"):
        budget_of(api_keys=KEYS, limits={"max_tenant_share": 1.0})
    assert budget_of(limits={"max_tenant_share": 1.0}).answers.limits.tenant == 40 << 20


@pytest.mark.pure
def test_long_prompts_queue_up_to_the_cap_of_requests() -> None:
    """262 prompts of 4k tokens were all that were let in, of 4096 requests."""
    budget = budget_of()
    with ExitStack() as stack:
        for _ in range(4096):
            stack.enter_context(budget.open("")).prompts.add(4096 * (36 + 4))
        budget.check()


@pytest.mark.pure
def test_requests_that_come_are_refused_before_those_that_run_are_ended() -> None:
    """A collected answer that was nearly done ended with 429 because newer requests had taken the memory."""
    budget = budget_of()
    with budget.open("") as running, ExitStack() as stack:
        running.answers.add(first_answer_bytes(None, num_tokens=4096))
        with pytest.raises(Overloaded):
            fill(stack, budget, "", of="answers")
        running.answers.add(8 << 20)


async def test_unread_answers_of_tokenize_are_bounded(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten of them to prompts of 1 MB took 146 MB that no limit knew of."""
    monkeypatch.setattr(site, "MAX_REQUEST_BYTES", 3_000_000)
    async with open_bench(text, limits={"max_answer_bytes": 4_000_000}) as bench:
        async with serving(bench.gateway) as port, dial(port, limit=1024) as (_, writer):
            writer.write(post("/tokenize", {"model": MODEL, "prompt": "a b " * 80_000}))
            budget = bench.gateway.service.memory
            await eventually(lambda: budget.answers.held > 2_000_000)
            refused = await ask(bench, "/tokenize", {"model": MODEL, "prompt": "a b " * 80_000})
            assert refused.status_code == 429
        await eventually(lambda: budget.num_open == 0)
        assert budget.held == 0
        for short in ("Hello", "a b " * 20_000):
            answer = (await ask(bench, "/tokenize", {"model": MODEL, "prompt": short})).json()
            assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])


@pytest.mark.pure
def test_choices_show_the_same_pieces(text: TextModel) -> None:
    ids = tuple(40 + i % 50 for i in range(200))
    prompt = TokenPrompt(text.tokenizer.decode(ids), len(ids), token_ids=ids, tokenizer=text.tokenizer)
    logprobs = columns_of([token_logprobs(token_id, 1) for token_id in ids[1:]])
    work = echo_logprobs(prompt, logprobs, 1)
    while True:
        try:
            next(work)
        except StopIteration as end:
            echoed = end.value
            break
    first, second = [list(completion_logprobs((), 1, prompt=echoed)) for _ in range(2)]
    assert json.loads(b"".join(first))["top_logprobs"][0] is None
    large = [piece for piece in first if len(piece) > 100]
    assert len(large) >= 12
    assert all(any(piece is other for other in second) for piece in large)


class Client:
    """An exchange whose client takes nothing while so many bytes are being written to it."""

    def __init__(self, size: int) -> None:
        self.was_dropped = False
        self.exchange = exchange_of(self._never, self._never, on_cut=self._drop)
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
@pytest.mark.pure
def test_when_all_streams_together_make_too_much_wait_the_largest_goes_first(left: int, cut: list[int]) -> None:
    watch = StreamWatch(left_bytes=lambda: left)
    clients = blocked_clients(watch, (100, 300, 200, 0))
    watch.enforce()
    assert sorted((client.size for client in clients if client.was_dropped), reverse=True) == cut
    assert watch.num_cut == len(cut)
    watch.enforce()
    assert watch.num_cut == len(cut), "what is gone waits no more"


@pytest.mark.pure
def test_a_stream_that_has_ended_already_is_dropped_before_streams_that_have_not() -> None:
    """Its task was blocked in the socket with its bytes; every other stream was cut, those with nothing waiting as well."""
    watch = StreamWatch(left_bytes=lambda: 250)
    clients = blocked_clients(watch, (100, 300, 0, 0))
    over = DeadlineExceeded("over")
    clients[1].exchange.end(over)
    watch.enforce()
    assert [client.was_dropped for client in clients] == [False, True, False, False]
    assert clients[1].exchange.end_reason is over
    assert watch.num_cut == 1


class Cycle:
    def __init__(self) -> None:
        self.me = self


ONE_BYTE = ChargeLimits(1, 1, lambda: 1.0)


async def test_cycles_are_collected_once_nothing_runs() -> None:
    """766 MB of a storm's were kept until new work came."""
    budget = RequestMemory(MemoryLimits(ONE_BYTE, ONE_BYTE))
    gc.disable()
    task = asyncio.create_task(site.give_back_when_idle(budget))
    try:
        await asyncio.sleep(2 * site.CHECK_S)
        with budget.open("a"):
            left = weakref.ref(Cycle())
            with budget.open("b"):
                pass
            await asyncio.sleep(5 * site.CHECK_S)
            assert left() is not None, "not while something runs"
        await asyncio.sleep(2 * site.CHECK_S)
        assert left() is None
    finally:
        gc.enable()
        task.cancel()


async def test_memory_is_given_back_twice_once_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last requests' connections held was freed just after the only look, and three quarters of a storm's peak were kept."""
    given: list[int] = []
    budget = RequestMemory(MemoryLimits(ONE_BYTE, ONE_BYTE))
    monkeypatch.setattr(site, "give_back", lambda: given.append(budget.num_open))
    task = asyncio.create_task(site.give_back_when_idle(budget))
    try:
        for num_expected in (2, 4):
            with budget.open("a"), budget.open("b"):
                await asyncio.sleep(5 * site.CHECK_S)
            await asyncio.sleep(10 * site.CHECK_S)
            assert given == [0] * num_expected
    finally:
        task.cancel()


@pytest.mark.parametrize("prompt", ["fox and " * 20_000, [5] * 9_000], ids=["text", "ids"])
async def test_a_refused_request_is_freed_at_once_and_not_by_a_collection(bench: TestBench, prompt: Any) -> None:
    """Its error, the future that raised it and the frames in between held each other: 400 refusals of a megabyte took half a GB."""
    async with serving(bench.gateway) as port:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                async with dial(port) as (reader, writer):
                    writer.write(post("/v1/completions", {"model": MODEL, "prompt": prompt, "n": 64}))
                    assert (await reader.readline()).split()[1] == b"400"
            await eventually(lambda: bench.gateway.service.open_requests.num_open == 0)
            await asyncio.sleep(0.05)
            assert not kept_requests()
        finally:
            gc.enable()


def kept_requests() -> list[object]:
    kinds = (Call, Ending, Exchange, LimitReservation)  # `isinstance` would ask torch's deprecated objects
    return [kept for kept in gc.get_objects() if type(kept) in kinds]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answered_request_is_freed_at_once_too(text: TextModel, stream: bool) -> None:
    async with open_bench(text) as bench, serving(bench.gateway) as port:
        gc.collect()
        gc.disable()
        try:
            async with dial(port) as (reader, writer):
                body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "stream": stream}
                more = ("idempotency-key: a", "x-session-id: s", "connection: close")
                writer.write(post("/v1/chat/completions", body, *more))
                assert (await reader.readline()).split()[1] == b"200"
                await reader.read()
            await eventually(lambda: not bench.gateway.service.open_requests.num_open and not bench.gateway.service.stages.replays.claims)
            await asyncio.sleep(0.05)
            assert not kept_requests()
        finally:
            gc.enable()
