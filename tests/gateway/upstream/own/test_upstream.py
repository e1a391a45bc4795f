"""Tests calls over replicas: routing, one re-route after a rejection, loss, and what is kept for a replay."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from gateway_kit import (
    MAX_MODEL_LEN,
    MODEL,
    SAID,
    FakeReplica,
    TestBench,
    chat_body,
    eventually,
    headers,
    metric,
    open_bench,
    snapshot,
    some_replicas,
    two_replicas,
)

from headrace.core.errors import InvalidRequest, Overloaded, RequestTooLarge, Unavailable
from headrace.core.ids import RequestId
from headrace.core.model_info import may_resume, numerics_digest
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.core.update import SequenceUpdate
from headrace.gateway.generation.run import DEADLINE_GRACE_S
from headrace.gateway.upstream.own.attempts import LOST, PromptCall
from headrace.gateway.upstream.own.stream import TokenStream
from headrace.gateway.upstream.own.upstream import TokenUpstream
from headrace.gateway.upstream.seam import OutputEvent, ReplicaLost
from headrace.text.folder import TextModel
from headrace.wire.client import ConnectionState, SeenLoad
from headrace.wire.stream import ReplicaStream

pytestmark = pytest.mark.loop

FRESH = 1e9
"""Of a report: it never gets old."""


def full(request: EngineRequest, stream: ReplicaStream) -> None:
    stream.reject(Overloaded("full", retry_after_s=1))


async def test_a_full_replica_is_passed_over_once(text: TextModel) -> None:
    async with open_bench(text, models=two_replicas()) as bench:
        first, second = bench.replicas.values()
        first.on_submit = second.on_submit = full
        response = await bench.chat()
        assert response.status_code == 429
        assert len(first.requests) == len(second.requests) == 1
        assert sorted([first.requests[0].epoch, second.requests[0].epoch]) == [0, 1]


async def test_of_many_full_replicas_two_are_tried(text: TextModel) -> None:
    """Under overload every further try only adds load."""
    async with open_bench(text, models=some_replicas(5)) as bench:
        for replica in bench.replicas.values():
            replica.on_submit = full
        assert (await bench.chat()).status_code == 429
        assert sum(len(replica.requests) for replica in bench.replicas.values()) == 2


async def test_a_rejected_request_is_answered_by_the_other_replica(text: TextModel) -> None:
    async with open_bench(text, models=two_replicas()) as bench:
        first, second = bench.replicas.values()
        first.on_submit = full
        for _ in range(8):
            response = await bench.chat()
            assert response.status_code == 200
            assert response.json()["choices"][0]["message"]["content"] == SAID
        assert len(second.requests) == 8
        assert metric(bench.gateway, "headrace_requests_total", model=MODEL, replica="r1", outcome="stop") == 8


async def test_a_request_that_crosses_a_draining_notice_is_answered_by_the_other_replica(text: TextModel) -> None:
    async with open_bench(text, models=two_replicas()) as bench:
        leaving, idle = bench.replicas.values()
        idle.snapshot = SeenLoad(snapshot(num_running=5), FRESH)
        leaving.on_submit = lambda request, stream: stream.reject(Unavailable("draining"))
        assert (await bench.chat(max_tokens=1)).status_code == 200
        assert (len(leaving.requests), len(idle.requests)) == (1, 1)
        idle.on_submit = leaving.on_submit
        assert (await bench.chat(max_tokens=1)).status_code == 503


async def test_an_invalid_request_is_not_tried_elsewhere(text: TextModel) -> None:
    async with open_bench(text, models=two_replicas()) as bench:
        for replica in bench.replicas.values():
            replica.on_submit = lambda request, stream: stream.reject(InvalidRequest("prompt", "blocks that fit", 5))
        response = await bench.chat()
        assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
        assert sum(len(replica.requests) for replica in bench.replicas.values()) == 1


def resize(replica: FakeReplica, max_model_len: int) -> None:
    assert replica.info is not None
    replica.info = replace(replica.info, model=replace(replica.info.model, max_model_len=max_model_len))


async def test_a_request_goes_where_it_fits(text: TextModel) -> None:
    """Replicas differ in the memory they have. What is refused is what fits none of them, and the largest one is what is told."""
    async with open_bench(text, models=two_replicas()) as bench:
        small, large = bench.replicas.values()
        resize(small, 100)
        resize(large, 200)
        large.snapshot = SeenLoad(snapshot(num_running=9), FRESH)
        for num_tokens in (99, 100, 199):
            assert (await bench.complete(prompt=[5] * (num_tokens - 1), max_tokens=1)).status_code == 200
        assert (await bench.complete(prompt=[5], max_tokens=150)).status_code == 200
        assert [len(request.prompt_ids) for request in small.requests] == [98, 99]
        assert [len(request.prompt_ids) for request in large.requests] == [198, 1]
        error = (await bench.complete(prompt=[5], max_tokens=200)).json()["error"]
        assert (error["param"], "maximum context length is 200 tokens" in error["message"]) == ("max_tokens", True)
        assert (await bench.client.get("/v1/models")).json()["data"][0]["max_model_len"] == 200
        large.state = ConnectionState.DRAINING
        assert (await bench.complete(prompt=[5] * 150, max_tokens=1)).status_code == 503
        assert (await bench.complete(prompt=[5] * 50, max_tokens=1)).status_code == 200


async def test_what_is_too_large_for_one_replica_is_tried_at_another(text: TextModel) -> None:
    def too_large(request: EngineRequest, stream: ReplicaStream) -> None:
        stream.reject(RequestTooLarge("prompt", "blocks that fit", 5))

    async with open_bench(text, models=two_replicas()) as bench:
        first, second = bench.replicas.values()
        second.snapshot = SeenLoad(snapshot(num_running=9), FRESH)
        first.on_submit = too_large
        assert (await bench.chat(max_tokens=1)).status_code == 200
        assert (len(first.requests), len(second.requests)) == (1, 1)
        second.on_submit = too_large
        assert (await bench.chat(max_tokens=1)).status_code == 413


async def test_the_less_busy_replica_is_taken(text: TextModel) -> None:
    async with open_bench(text, models=two_replicas()) as bench:
        first, second = bench.replicas.values()
        first.snapshot = SeenLoad(snapshot(num_running=5), FRESH)
        for _ in range(5):
            await bench.chat(max_tokens=1)
        assert (len(first.requests), len(second.requests)) == (0, 5)


def look_busier(replica: FakeReplica, request: EngineRequest, stream: ReplicaStream) -> None:
    """The next request goes to another one."""
    replica.snapshot = SeenLoad(snapshot(num_running=len(replica.requests)), FRESH)


async def test_each_prompt_is_counted_where_it_ran(text: TextModel) -> None:
    async with open_bench(text, models=two_replicas()) as bench:
        for replica in bench.replicas.values():
            replica.on_submit = partial(look_busier, replica)
        assert (await bench.complete(prompt=["Hello", "fox", "dog", "lazy"], max_tokens=3, n=2)).status_code == 200
        for name, replica in bench.replicas.items():
            served = len(replica.requests)
            assert served == 2
            for metric_name, count in (("queue_time", served), ("time_per_output_token", 2 * served)):
                found = metric(bench.gateway, f"headrace_{metric_name}_seconds_count", model=MODEL, replica=name)
                assert found == count, (metric_name, name)


async def test_a_replica_whose_step_hangs_is_taken_only_when_no_other_is(text: TextModel) -> None:
    """Its heartbeats go on, so it stays connected and looks less busy than the other one."""
    async with open_bench(text, models=two_replicas()) as bench:
        stuck, busy = bench.replicas.values()
        stuck.snapshot = SeenLoad(snapshot(num_running=1, step_age_s=100.0, step_predicted_s=0.1), asyncio.get_running_loop().time())
        busy.snapshot = SeenLoad(snapshot(num_running=9), FRESH)
        for _ in range(3):
            assert (await bench.chat(max_tokens=1)).status_code == 200
        assert (len(stuck.requests), len(busy.requests)) == (0, 3)
        busy.state = ConnectionState.DRAINING
        assert (await bench.chat(max_tokens=1)).status_code == 200
        assert len(stuck.requests) == 1


@pytest.mark.parametrize("state", [ConnectionState.DOWN, ConnectionState.SILENT, ConnectionState.DRAINING])
async def test_replicas_that_take_no_work_are_skipped(text: TextModel, state: ConnectionState) -> None:
    async with open_bench(text, models=two_replicas()) as bench:
        first, second = bench.replicas.values()
        first.state = state
        assert (await bench.chat(max_tokens=1)).status_code == 200
        second.state = state
        response = await bench.chat(max_tokens=1)
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert (len(first.requests), len(second.requests)) == (0, 1)


async def test_a_replica_lost_while_sending_is_passed_over(text: TextModel) -> None:
    """It looked connected when it was picked; `submit` finds out."""
    async with open_bench(text, models=two_replicas()) as bench:
        first, second = bench.replicas.values()
        second.snapshot = SeenLoad(snapshot(num_running=9), FRESH)

        def gone(request: EngineRequest, stream: ReplicaStream) -> None:
            raise Unavailable("lost just now")

        first.on_submit = gone
        assert (await bench.chat(max_tokens=1)).status_code == 200
        assert (len(first.requests), len(second.requests)) == (1, 1)


def stream_of(bench: TestBench, text: TextModel, **params: object) -> TokenStream:
    """One prompt, as the upstream of the bench's model would run it."""
    given = SamplingParams(seed=5, max_tokens=None).with_(**params)
    ids = tuple(text.tokenizer.encode("Hello", add_special_tokens=True))
    request = EngineRequest(request_id=RequestId("call"), prompt_ids=ids, params=given)
    call = PromptCall(request=request, max_output_tokens=MAX_MODEL_LEN - len(ids))
    upstream = bench.gateway.service.models.get(MODEL).upstream
    assert isinstance(upstream, TokenUpstream)
    return TokenStream(upstream._pool, text.tokenizer, call)


async def read_all(stream: TokenStream) -> list[OutputEvent]:
    found: list[OutputEvent] = []
    while events := await stream.events():
        found += events
    return found


async def test_a_stream_keeps_what_a_replay_needs(bench: TestBench, text: TextModel) -> None:
    stream = stream_of(bench, text, n=2)
    await read_all(stream)
    said = text.tokenizer.encode(SAID, add_special_tokens=False)
    assert [list(ids)[: len(said)] for ids in stream.attempts.output_ids] == [said, said]
    assert stream.call.request.params.seed == 5
    assert stream.attempts.epoch == 0


class Listener:
    """Takes what the stream has at once."""

    has_room = True

    def __init__(self) -> None:
        self.texts: list[str] = []

    def take(self, events: Sequence[OutputEvent]) -> None:
        self.texts += [event.text for event in events]


async def test_ids_taken_on_the_short_way_are_kept_as_well(bench: TestBench, text: TextModel) -> None:
    """What a client has read and the stream has not kept, another engine would say again."""
    stream, listener = stream_of(bench, text), Listener()
    stream.listen(listener)
    read = await read_all(stream)
    said = text.tokenizer.encode(SAID, add_special_tokens=False)
    assert len(listener.texts) > 3
    assert len(listener.texts) + len(read) == len(stream.attempts.output_ids[0])
    assert list(stream.attempts.output_ids[0])[: len(said)] == said


async def test_kept_ids_are_those_before_the_stop_string(bench: TestBench, text: TextModel) -> None:
    stream = stream_of(bench, text, stop=("brown",))
    await read_all(stream)
    assert len(stream.attempts.output_ids[0]) == bench.replica.finished[0][2] == stream.usage().completion_tokens


async def test_a_replica_that_was_started_anew_may_be_tried_again(text: TextModel) -> None:
    """Its name is the same, its process is another one: what was lost with the first does not speak against the second."""
    async with open_bench(text) as bench:
        replica = bench.replica

        def restarted(request: EngineRequest, stream: ReplicaStream) -> None:
            if len(replica.requests) == 1:
                replica.info = replace(replica.info, instance_id="another process") if replica.info else None
                raise Unavailable("lost just now")

        replica.on_submit = restarted
        assert (await bench.chat(max_tokens=1)).status_code == 200
        assert len(replica.requests) == 2


NUMERICS = {"weights": "ab", "kernels": "avx512"}


def compute_with(replica: FakeReplica, **numerics: str) -> None:
    assert replica.info is not None
    replica.info = replace(replica.info, model=replace(replica.info.model, numerics=numerics))


async def test_ids_fed_and_a_resume_are_what_the_engine_generated(text: TextModel) -> None:
    """The text of a possible stop string is held back, its tokens are not forgotten: the engine is past them when it is lost."""
    generated = tuple(text.tokenizer.encode("The quick brown fox jumps over the lazy", add_special_tokens=False))
    async with open_bench(text) as bench:
        compute_with(bench.replica, **NUMERICS)
        bench.replica.go.clear()
        bench.replica.on_submit = lambda request, updates: updates.put(
            SequenceUpdate(request_id=request.request_id, epoch=0, index=0, token_ids=generated)
        )
        stream = stream_of(bench, text, stop=("jumps over the lazy cat",), max_tokens=60)
        (event,) = await stream.events()
        assert event.text == "The quick brown fox "
        assert event.num_tokens < len(generated)
        bench.replica.die()
        with pytest.raises(Unavailable):
            await stream.events()
        digest = numerics_digest(stream.attempts.numerics)
        resumed = replace(stream.call.request, epoch=stream.attempts.epoch + 1).resumed(0, stream.attempts.output_ids[0], digest)
        assert resumed.numerics_digest == numerics_digest(NUMERICS) != ""
        resumed.checked(vocab_size=text.tokenizer.vocab_size, max_model_len=MAX_MODEL_LEN)
        assert resumed.prompt_ids == bench.replica.requests[0].prompt_ids
        assert resumed.output_ids == generated
        assert resumed.params == bench.replica.requests[0].params


def say_one_and_hold(replica: FakeReplica, request: EngineRequest, updates: ReplicaStream) -> None:
    replica.go.clear()
    updates.put(SequenceUpdate(request_id=request.request_id, epoch=request.epoch, index=0, token_ids=(7,)))


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (NUMERICS, NUMERICS, ""),
        (NUMERICS, {**NUMERICS, "kernels": "avx2"}, "r1: kernels: avx512 and avx2"),
        (NUMERICS, {**NUMERICS, "weights": "cd"}, "r1: weights: ab and cd"),
        (NUMERICS, {**NUMERICS, "weights": ""}, "r1: the weights of the second replica are not hashed yet"),
        ({**NUMERICS, "weights": ""}, NUMERICS, "r1: the weights of the first replica are not hashed yet"),
    ],
    ids=["equal", "other kernels", "other weights", "unknown there", "unknown here"],
)
async def test_a_lost_stream_knows_whether_another_replica_could_go_on(
    text: TextModel, first: dict[str, str], second: dict[str, str], why: str
) -> None:
    """The lost replica's hello is gone with its connection; what it computed with is kept with what it said. The client may send again."""
    async with open_bench(text, models=two_replicas()) as bench:
        lost, other = bench.replicas.values()
        compute_with(lost, **first)
        compute_with(other, **second)
        other.snapshot = SeenLoad(snapshot(num_running=9), FRESH)
        lost.on_submit = partial(say_one_and_hold, lost)
        stream = stream_of(bench, text, ignore_eos=True)
        await stream.events()
        lost.die()
        with pytest.raises(ReplicaLost) as raised:
            await stream.events()
        assert raised.value.why_not_resume == why
        assert may_resume(numerics_digest(stream.attempts.numerics), numerics_digest(second)) is (why == "")
        assert stream.attempts.numerics == first
        assert other.requests == []
        assert str(raised.value) == LOST, "neither numerics nor names are for clients"


@pytest.mark.parametrize("state", [ConnectionState.CONNECTED, ConnectionState.DRAINING])
async def test_what_a_lost_replica_never_began_could_begin_wherever_work_is_taken(text: TextModel, state: ConnectionState) -> None:
    async with open_bench(text, models=two_replicas()) as bench:
        lost, other = bench.replicas.values()
        other.snapshot = SeenLoad(snapshot(num_running=9), FRESH)
        lost.go.clear()
        stream = stream_of(bench, text)
        reader = asyncio.create_task(stream.events())
        await eventually(lambda: len(lost.requests) == 1)
        other.state = state
        lost.die()
        with pytest.raises(ReplicaLost) as raised:
            await reader
        assert raised.value.why_not_resume == ("" if state is ConnectionState.CONNECTED else "no other replica is connected")


@pytest.mark.parametrize("is_equal", [True, False])
async def test_the_request_log_says_whether_a_lost_request_could_have_been_resumed(text: TextModel, tmp_path: Path, is_equal: bool) -> None:
    log = tmp_path / "requests.jsonl"
    async with open_bench(text, models=two_replicas(), request_log=str(log)) as bench:
        lost, other = bench.replicas.values()
        compute_with(lost, **NUMERICS)
        compute_with(other, **(NUMERICS if is_equal else {**NUMERICS, "kernels": "avx2"}))
        other.snapshot = SeenLoad(snapshot(num_running=9), FRESH)
        lost.on_submit = partial(say_one_and_hold, lost)
        asked = asyncio.create_task(bench.chat(ignore_eos=True))
        await eventually(lambda: len(lost.requests) == 1)
        await asyncio.sleep(0)
        lost.die()
        response = await asked
        assert (response.status_code, response.json()["error"]["message"]) == (503, LOST)
        assert response.headers["retry-after"]
    (line,) = [json.loads(line) for line in log.read_text().splitlines()]
    assert line["detail"] == ("not resumed" if is_equal else "cannot be resumed: r1: kernels: avx512 and avx2")


async def test_kept_ids_are_bounded_by_what_was_asked_for(bench: TestBench, text: TextModel) -> None:
    """An engine that says more than it was asked for."""
    stream = stream_of(bench, text, ignore_eos=True)
    stream.attempts._max_output_tokens = 3
    await read_all(stream)
    assert len(stream.attempts.output_ids[0]) == 3


async def test_cancel_is_harmless_whenever_it_comes(bench: TestBench, text: TextModel) -> None:
    done = stream_of(bench, text)
    while await done.events():
        pass
    done.cancel()
    assert bench.replica.cancelled == []
    bench.replica.go.clear()
    held = stream_of(bench, text)
    reader = asyncio.create_task(held.events())
    await eventually(lambda: len(bench.replica.requests) == 2)
    held.cancel()
    held.cancel()
    assert await reader == []
    assert bench.replica.cancelled == [RequestId("call")]


async def test_without_failover_a_request_is_refused_at_once_while_its_replica_is_stopped(bench: TestBench) -> None:
    bench.replica.state = ConnectionState.SILENT
    began = asyncio.get_running_loop().time()
    assert (await bench.chat()).status_code == 503
    assert asyncio.get_running_loop().time() == began
    assert bench.replica.requests == []


async def test_a_deadline_counts_from_the_requests_arrival(text: TextModel) -> None:
    async with open_bench(text, timeouts={"request_s": 30}) as bench:
        arrived_at = asyncio.get_running_loop().time()
        asking = asyncio.create_task(bench.client.post("/v1/chat/completions", content=late_body(), headers=headers()))
        await asyncio.sleep(5)
        assert (await asking).status_code == 200
        assert bench.replica.requests[0].deadline_at == arrived_at + 30


async def late_body() -> AsyncIterator[bytes]:
    """Its end comes four seconds after its beginning."""
    body = json.dumps(chat_body(max_tokens=1)).encode()
    yield body[:10]
    await asyncio.sleep(4)
    yield body[10:]


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_deadline_ends_requests_of_an_engine_that_hangs(text: TextModel, is_streaming: bool) -> None:
    """The engine cannot end them: its loop stands still. In a stream that has begun the error is an event."""
    async with open_bench(text, timeouts={"request_s": 20.0}) as bench:
        bench.replica.go.clear()
        began = asyncio.get_running_loop().time()
        response = await bench.chat(stream=is_streaming)
        assert asyncio.get_running_loop().time() == pytest.approx(began + 20 + DEADLINE_GRACE_S)
        assert response.status_code == (200 if is_streaming else 504)
        body = response.text.split("data: ")[-1]
        assert json.loads(body)["error"]["code"] == "deadline_exceeded"
        assert len(bench.replica.cancelled) == 1
        assert metric(bench.gateway, "headrace_requests_total", model=MODEL, replica="r0", outcome="deadline") == 1
