"""Tests the facts that an upstream gives of a request before it runs, and the state it keeps so that another engine can go on."""

from __future__ import annotations

from functools import partial
from itertools import count
from random import Random
from typing import Any

import pytest
from gateway_kit import MAX_MODEL_LEN, MODEL, TestBench, metric, open_bench, snapshot, two_replicas

from headrace.core.errors import InvalidRequest
from headrace.core.ids import RequestId
from headrace.core.update import MissReason
from headrace.gateway.control.models import Sources
from headrace.gateway.http.errors import ContextLengthExceeded
from headrace.gateway.upstream.generation_request import Conversation, GenerationRequest, PlainPrompts, PrincipalFacts
from headrace.gateway.upstream.seam import CacheMiss, Prepared
from headrace.text.folder import TextModel
from headrace.wire.client import SeenLoad

pytestmark = pytest.mark.loop


async def prepared(bench: TestBench, prompt: Conversation | PlainPrompts, salt: bytes = b"s", **sampling: Any) -> Prepared:
    request = GenerationRequest(request_id=RequestId("r"), prompt=prompt, sampling=sampling)
    return await bench.gateway.service.models.get(MODEL).upstream.prepare(request, PrincipalFacts(salt=salt))


async def test_a_prepared_request_says_what_it_may_cost_and_nothing_has_run(bench: TestBench) -> None:
    made = await prepared(bench, PlainPrompts(prompts=[[5, 6, 7], [8]]), n=3, max_tokens=10)
    assert (made.prompt_tokens, made.max_output_tokens, made.num_sequences) == (4, 60, 6)
    assert bench.replica.requests == []


async def test_without_max_tokens_the_context_is_the_worst_case(bench: TestBench) -> None:
    made = await prepared(bench, PlainPrompts(prompts=[[5] * 12]), n=2, max_tokens=None)
    assert made.max_output_tokens == 2 * (MAX_MODEL_LEN - 12)


async def test_a_seed_is_the_clients_or_drawn(bench: TestBench) -> None:
    assert (await prepared(bench, PlainPrompts(prompts=["Hello"]), seed=3)).seed == 3
    drawn = {(await prepared(bench, PlainPrompts(prompts=["Hello"]))).seed for _ in range(3)}
    assert len(drawn) == 3


async def test_what_the_model_cannot_take_is_refused_before_anything_runs(bench: TestBench) -> None:
    with pytest.raises(ContextLengthExceeded):
        await prepared(bench, PlainPrompts(prompts=[[5] * MAX_MODEL_LEN]))
    with pytest.raises(ContextLengthExceeded, match=f"maximum context length is {MAX_MODEL_LEN} tokens.*you requested 600 tokens"):
        await prepared(bench, PlainPrompts(prompts=[[5] * 500]), max_tokens=100)
    with pytest.raises(InvalidRequest, match="token ids"):
        await prepared(bench, PlainPrompts(prompts=[[10**6]]))


async def test_time_and_chance_come_from_the_sources_alone(text: TextModel) -> None:
    """Two gateways with the same sources answer alike, to the seed and the second; what a clock says is what is logged and counted.

    How often the clock is read, and so how long a request seems to take, depends on background tasks, too.
    """
    answers = []
    for _ in range(2):
        sources = Sources(
            clock=partial(next, count(1000.0)),
            unix_time=lambda: 1_800_000_000.5,
            draw_seed=partial(next, count(100)),
            random=Random(3),
        )
        async with open_bench(text, sources=sources, models=two_replicas()) as bench:
            for replica in bench.replicas.values():
                replica.snapshot = SeenLoad(snapshot(), 1e9)
            response = await bench.chat(max_tokens=2)
            assert response.json()["created"] == 1_800_000_000
            assert (await bench.client.get("/v1/models")).json()["data"][0]["created"] == 1_800_000_000
            await bench.chat(max_tokens=2)
            seen = [(name, request.params.seed) for name, replica in bench.replicas.items() for request in replica.requests]
            latency = metric(bench.gateway, "headrace_request_latency_seconds_sum", model=MODEL, replica=seen[0][0])
            assert latency == int(latency) > 0
            answers.append(seen)
    assert answers[0] == answers[1]
    assert sorted(seed or 0 for _, seed in answers[0]) == [100, 101]


async def test_a_finished_request_says_where_its_cached_prompt_ended_and_why(bench: TestBench) -> None:
    chat = [{"role": "system", "content": "Be brief. " * 4}, {"role": "user", "content": "What is the capital of France?"}]
    made = await prepared(bench, Conversation(messages=chat), max_tokens=2)
    bench.replica.cached_tokens, bench.replica.miss_reason = 16, MissReason.EVICTED
    stream = made.stream()
    while await stream.events():
        pass
    miss = stream.facts(0).cache_miss
    assert miss == CacheMiss(16, MissReason.EVICTED)
    assert made.prompts[0].part_at(16) == "messages[0]"
    assert (await prepared(bench, PlainPrompts(prompts=["Hello"]))).prompts[0].part_at(0) is None, "a text has no messages"
