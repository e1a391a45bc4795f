"""Tests streams whose replica is lost, hangs or rejects: they go on elsewhere, and nothing is lost, repeated or changed."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from gateway_kit import (
    MODEL,
    SAID,
    FakeReplica,
    TestBench,
    eventually,
    gateway_config,
    metric,
    open_bench,
    snapshot,
    some_replicas,
    token_logprobs,
    two_replicas,
)
from virtual_time import virtual_loop

from headrace.core.errors import InvalidRequest, Overloaded, Unavailable
from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.core.update import FinishReason, SequenceUpdate
from headrace.gateway.upstream.own.attempts import MAX_FRUITLESS_LOSSES, PromptCall
from headrace.gateway.upstream.own.replica_health import stalled_s
from headrace.gateway.upstream.own.replicas import MOVE_AFTER_S
from headrace.gateway.upstream.own.stream import TokenStream
from headrace.gateway.upstream.own.upstream import TokenUpstream
from headrace.gateway.upstream.seam import OutputEvent, ReplicaLost
from headrace.text.folder import TextModel
from headrace.wire.client import ConnectionState, ReplicaInfo, SeenLoad
from headrace.wire.stream import ReplicaStream

pytestmark = pytest.mark.loop

NUMERICS = {"weights": "ab", "kernels": "avx512"}
WAIT = {"failover_s": 30}
FAR = 1e6
"""Seconds by which a report lies in the future, so that it never grows old in a test."""


def equal_replicas(bench: TestBench) -> list[FakeReplica]:
    """The bench's replicas, all of equal numerics; requests go to the first while it is there."""
    replicas = list(bench.replicas.values())
    for number, replica_ in enumerate(replicas):
        assert replica_.info is not None
        replica_.info = replace(replica_.info, model=replace(replica_.info.model, numerics=NUMERICS))
        replica_.snapshot = SeenLoad(snapshot(num_running=5 * number), virtual_loop().time() + FAR)
    return replicas


def start_anew(replica: FakeReplica, old: ReplicaInfo | None, instance_id: str) -> None:
    assert old is not None
    replica.info = replace(old, instance_id=instance_id)
    replica.snapshot = SeenLoad(snapshot(), virtual_loop().time() + FAR)
    replica.state = ConnectionState.CONNECTED


def stream_of(bench: TestBench, text: TextModel, **params: Any) -> TokenStream:
    """params: of the sampling, and the call's `name`, `max_output_tokens` and `has_fallback`"""
    ids = tuple(text.tokenizer.encode("Hello there", add_special_tokens=True))
    name, room = RequestId(params.pop("name", "call")), params.pop("max_output_tokens", 1)
    has_fallback = params.pop("has_fallback", False)
    given = SamplingParams(**{"seed": 5, "max_tokens": 40, "ignore_eos": True, **params})
    request = EngineRequest(request_id=name, prompt_ids=ids, params=given)
    call = PromptCall(request=request, max_output_tokens=given.max_tokens or room, has_fallback=has_fallback)
    upstream = bench.gateway.service.models.get(MODEL).upstream
    assert isinstance(upstream, TokenUpstream)
    return TokenStream(upstream._pool, text.tokenizer, call)


def update_of(request: EngineRequest, index: int, **fields: Any) -> SequenceUpdate:
    return SequenceUpdate(**{"request_id": request.request_id, "epoch": request.epoch, "index": index, "token_ids": (7,), **fields})


class Answer:
    """What a client would see of each sequence."""

    def __init__(self) -> None:
        self.events: dict[int, list[OutputEvent]] = {}

    def take(self, events: Sequence[OutputEvent]) -> None:
        for event in events:
            self.events.setdefault(event.index, []).append(event)

    @property
    def num_tokens(self) -> int:
        return sum(event.num_tokens for events in self.events.values() for event in events)

    def seen(self) -> object:
        joined = {index: OutputEvent.joined(events) for index, events in self.events.items()}
        return {
            index: (
                event.text,
                event.num_tokens,
                [tuple(part.columns.token_ids) for part in event.logprobs if len(part)] and _ids(event),
                [position for page in event.prompt_logprobs for position in page.token_ids],
                event.finish,
                event.stop_reason,
            )
            for index, event in sorted(joined.items())
        }


def _ids(event: OutputEvent) -> list[int]:
    return [token_id for part in event.logprobs for token_id in part.columns.token_ids]


async def read(stream: TokenStream, answer: Answer, *, until: int = 10**9) -> bool:
    """Read until that many tokens have come (True), or to the end (False)."""
    while answer.num_tokens < until:
        events = await stream.events()
        if not events:
            return False
        answer.take(events)
    return True


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("seed", range(4))
async def test_a_stream_cut_anywhere_again_and_again_is_the_unbroken_one(text: TextModel, n: int, seed: int) -> None:
    """Each loss leaves sequences at different places; those that a stop string has ended are not submitted again."""
    draw = random.Random(seed)
    params = {"n": n, "logprobs": 1, "prompt_logprobs": 0, "stop": ("the lazy",) if seed % 2 else ()}
    async with open_bench(text, models=some_replicas(6), timeouts=WAIT) as bench:
        whole = Answer()
        unbroken = stream_of(bench, text, **params)
        await read(unbroken, whole)
    async with open_bench(text, models=some_replicas(6), timeouts=WAIT) as bench:
        left = equal_replicas(bench)
        for replica in left:
            replica.cached_tokens = len(left)
        answer, stream = Answer(), stream_of(bench, text, **params)
        num_losses = 0
        while len(left) > 1 and await read(stream, answer, until=answer.num_tokens + draw.randrange(1, 12)):
            running = [replica for replica in left if replica.num_open]
            if not running:
                break
            running[0].die()
            left.remove(running[0])
            num_losses += 1
        await read(stream, answer)
        assert num_losses > 1
        assert answer.seen() == whole.seen()
        assert stream.usage()[:2] == unbroken.usage()[:2]
        assert stream.num_resumes >= num_losses - 1
        for replica in bench.replicas.values():
            for request in replica.requests:
                if request.output_ids:
                    assert request.params.n == 1
                    assert request.numerics_digest
        epochs = [request.epoch for replica in bench.replicas.values() for request in replica.requests]
        assert len(set(epochs)) == len(epochs), "every submission has an epoch of its own"


async def test_nothing_is_submitted_again_of_a_request_whose_sequences_have_ended(text: TextModel) -> None:
    async with open_bench(text, models=two_replicas(), timeouts=WAIT) as bench:
        first, second = equal_replicas(bench)
        stream, answer = stream_of(bench, text, stop=(SAID.split()[0],)), Answer()
        assert not await read(stream, answer)
        first.die()
        assert await stream.events() == []
        assert second.requests == []


async def test_after_a_loss_only_the_sequences_that_have_not_ended_are_submitted_again(text: TextModel) -> None:
    async with open_bench(text, models=two_replicas(), timeouts=WAIT) as bench:
        first, second = equal_replicas(bench)
        first.go.clear()

        def end_one(request: EngineRequest, updates: ReplicaStream) -> None:
            updates.put(update_of(request, 0, finish=FinishReason.STOP))
            updates.put(update_of(request, 1))

        first.on_submit = end_one
        stream, answer = stream_of(bench, text, n=2), Answer()
        answer.take(await stream.events())
        first.die()
        await read(stream, answer)
        (request,) = second.requests
        assert (request.first_index, request.params.n, request.output_ids) == (1, 1, (7,))
        assert [len([e for e in answer.events[index] if e.finish]) for index in (0, 1)] == [1, 1]


async def test_log_probabilities_of_a_prompt_that_came_in_part_come_once(text: TextModel) -> None:
    """Pages of a long prompt travel before its first token."""
    async with open_bench(text, models=two_replicas(), timeouts=WAIT) as bench:
        first, second = equal_replicas(bench)
        first.go.clear()

        def say_one_position(request: EngineRequest, updates: ReplicaStream) -> None:
            updates.put(update_of(request, 0, token_ids=(), prompt_logprobs=(token_logprobs(request.prompt_ids[1], 0),)))

        first.on_submit = say_one_position
        stream, answer = stream_of(bench, text, prompt_logprobs=0), Answer()
        answer.take(await stream.events())
        first.die()
        await read(stream, answer)
        (request,) = second.requests
        assert request.params.prompt_logprobs == 0
        shown = [token_id for event in answer.events[0] for page in event.prompt_logprobs for token_id in page.token_ids]
        assert shown == list(request.prompt_ids[1:])


async def test_what_was_never_begun_begins_whole_at_another_replica_of_any_numerics(text: TextModel) -> None:
    async with open_bench(text, models=two_replicas(), timeouts=WAIT) as bench:
        lost, other = bench.replicas.values()
        other.snapshot = SeenLoad(snapshot(num_running=9), virtual_loop().time() + FAR)
        lost.go.clear()
        answer, stream = Answer(), stream_of(bench, text, n=2)
        reader = asyncio.create_task(read(stream, answer))
        await eventually(lambda: len(lost.requests) == 1)
        lost.die()
        await reader
        (request,) = other.requests
        assert (request.params.n, request.output_ids, request.epoch) == (2, (), 1)
        assert stream.facts(0).replica == stream.facts(1).replica == "r1"


async def test_a_stream_waits_for_its_own_replica_to_be_started_anew(text: TextModel) -> None:
    async with open_bench(text, timeouts=WAIT) as bench:
        (replica,) = equal_replicas(bench)
        whole = Answer()
        await read(stream_of(bench, text), whole)
        answer, stream = Answer(), stream_of(bench, text)
        await read(stream, answer, until=7)
        info = replica.info
        replica.die()
        reader = asyncio.create_task(read(stream, answer))
        await asyncio.sleep(0.3)
        assert not reader.done()
        start_anew(replica, info, "another process")
        await reader
        assert answer.seen() == whole.seen()
        assert stream.num_resumes == 1


async def test_a_stream_waits_for_no_replica_where_the_hours_of_the_day_are_used_up(text: TextModel) -> None:
    async with open_bench(text, timeouts=WAIT) as bench:
        (replica,) = equal_replicas(bench)
        stream, began = stream_of(bench, text), virtual_loop().time()
        await read(stream, Answer(), until=7)
        closed = {"replicas": [], "starts_on_demand": True, "closed_until": virtual_loop().unix_time() + 3600.0}
        await bench.reloader.reload(lambda: gateway_config(models=[{"name": MODEL, "folder": "/nowhere", **closed}], timeouts=WAIT))
        replica.die()
        with pytest.raises(ReplicaLost):
            await read(stream, Answer())
        assert virtual_loop().time() - began < 1.0


async def test_a_resume_that_is_rejected_is_tried_again_while_there_is_time(text: TextModel) -> None:
    async with open_bench(text, models=two_replicas(), timeouts=WAIT) as bench:
        first, second = equal_replicas(bench)
        answer, stream = Answer(), stream_of(bench, text)
        await read(stream, answer, until=3)

        def full_twice(request: EngineRequest, updates: ReplicaStream) -> None:
            if len(second.requests) < 3:
                updates.reject(Overloaded("full", retry_after_s=1))

        second.on_submit = full_twice
        first.die()
        await read(stream, answer)
        assert len(second.requests) == 3
        assert answer.events[0][-1].finish is FinishReason.LENGTH
        assert answer.num_tokens == 40


async def test_a_resume_that_breaks_a_rule_is_final(text: TextModel) -> None:
    async with open_bench(text, models=two_replicas(), timeouts=WAIT) as bench:
        first, second = equal_replicas(bench)
        answer, stream = Answer(), stream_of(bench, text)
        await read(stream, answer, until=3)
        second.on_submit = lambda request, updates: updates.reject(InvalidRequest("output_ids", "fewer", 5))
        first.die()
        with pytest.raises(InvalidRequest):
            await read(stream, answer)


async def test_when_one_sequence_cannot_be_resumed_the_engines_stop_computing_the_rest(text: TextModel) -> None:
    async with open_bench(text, models=two_replicas(), timeouts=WAIT) as bench:
        first, second = equal_replicas(bench)
        answer, stream = Answer(), stream_of(bench, text, n=3)
        await read(stream, answer, until=3)
        second.go.clear()

        def refuse_the_last(request: EngineRequest, updates: ReplicaStream) -> None:
            if request.first_index == 2:
                updates.reject(InvalidRequest("output_ids", "fewer", 5))

        second.on_submit = refuse_the_last
        first.die()
        with pytest.raises(InvalidRequest):
            await read(stream, answer)
        await stream.close()
        assert len(second.requests) == 3
        assert second.num_open == 0
        assert len(second.cancelled) == 2


async def test_a_sequence_that_ended_without_a_token_is_not_submitted_again(text: TextModel) -> None:
    async with open_bench(text, models=two_replicas(), timeouts=WAIT) as bench:
        first, second = equal_replicas(bench)
        first.go.clear()
        first.on_submit = lambda request, updates: updates.put(update_of(request, 0, token_ids=(), finish=FinishReason.ERROR))
        stream, answer = stream_of(bench, text, n=2), Answer()
        answer.take(await stream.events())
        first.die()
        await read(stream, answer)
        (request,) = second.requests
        assert (request.first_index, request.params.n, request.output_ids) == (1, 1, ())


async def test_an_answer_without_a_limit_goes_on_only_where_its_context_has_room(text: TextModel) -> None:
    """Replicas of one model may have contexts of different lengths. The nearest one has no room for what was said already."""
    async with open_bench(text, models=some_replicas(3), timeouts=WAIT) as bench:
        replicas = equal_replicas(bench)
        stream, answer = stream_of(bench, text, max_tokens=None, max_output_tokens=200), Answer()
        await read(stream, answer, until=100)
        (first,) = [replica for replica in replicas if replica.num_open]
        short, far = [replica for replica in replicas if replica is not first]
        assert short.info is not None
        short.info = replace(short.info, model=replace(short.info.model, max_model_len=len(stream.call.request.prompt_ids) + 100))
        first.die()
        await read(stream, answer, until=150)
        assert (len(short.requests), len(far.requests)) == (0, 1)
        await stream.close()


@pytest.mark.parametrize(
    ("other", "reason"), [({"kernels": "avx2"}, "r1: kernels: avx512 and avx2"), ({"weights": "cd"}, "r1: weights: ab and cd")]
)
async def test_other_numerics_are_never_taken_and_the_wait_ends(text: TextModel, other: dict[str, str], reason: str) -> None:
    async with open_bench(text, models=two_replicas(), timeouts={"failover_s": 0.3}) as bench:
        first, second = equal_replicas(bench)
        assert second.info is not None
        second.info = replace(second.info, model=replace(second.info.model, numerics=NUMERICS | other))
        answer, stream = Answer(), stream_of(bench, text)
        await read(stream, answer, until=3)
        first.die()
        lost_at = virtual_loop().time()
        with pytest.raises(ReplicaLost) as raised:
            await read(stream, answer)
        assert virtual_loop().time() - lost_at == pytest.approx(0.3)
        assert raised.value.why_not_resume == reason
        assert second.requests == []


@pytest.mark.parametrize(
    ("params", "read_already"), [({"n": 2}, {"token_ids": (7,)}), ({"prompt_logprobs": 0}, {"token_ids": ()})], ids=["choice", "prompt"]
)
async def test_no_part_of_an_answer_comes_from_other_weights(text: TextModel, params: dict[str, Any], read_already: dict[str, Any]) -> None:
    """Neither a choice of which nothing was read beside one that has begun, nor log-probabilities of the rest of a prompt."""
    async with open_bench(text, models=two_replicas(), timeouts={"failover_s": 0.3}) as bench:
        first, second = equal_replicas(bench)
        assert second.info is not None
        second.info = replace(second.info, model=replace(second.info.model, numerics=NUMERICS | {"weights": "cd"}))
        first.go.clear()

        def say_once(request: EngineRequest, updates: ReplicaStream) -> None:
            logprobs = (token_logprobs(request.prompt_ids[1], 0),) if "prompt_logprobs" in params else ()
            updates.put(update_of(request, 0, prompt_logprobs=logprobs, **read_already))

        first.on_submit = say_once
        stream, answer = stream_of(bench, text, **params), Answer()
        answer.take(await stream.events())
        first.die()
        with pytest.raises(ReplicaLost):
            await read(stream, answer)
        assert second.requests == []


SLOW = {"step_fixed_s": 0.5, "step_token_s": 0.001, "max_num_seqs": 1}
FULL_QUEUE = {**SLOW, "num_running": 1, "num_waiting": 2, "num_queued_tokens": 40_000}


def come(replica: FakeReplica) -> None:
    replica.state = ConnectionState.CONNECTED
    replica.snapshot = SeenLoad(snapshot(**SLOW), virtual_loop().time() + FAR)


def keep_away(replica: FakeReplica) -> None:
    replica.state = ConnectionState.DRAINING
    replica.snapshot = SeenLoad(snapshot(is_asleep=True), virtual_loop().time() + FAR)


@pytest.mark.parametrize("weights", ["ab", "cd"])
@pytest.mark.parametrize(
    ("params", "read_already"), [({"n": 2}, {"token_ids": (7,)}), ({"prompt_logprobs": 0}, {"token_ids": ()})], ids=["choice", "prompt"]
)
async def test_the_rest_of_an_answer_that_waits_moves_to_a_replica_that_comes_only_where_it_is_of_the_same_model(
    text: TextModel, params: dict[str, Any], read_already: dict[str, Any], weights: str
) -> None:
    async with open_bench(text, models=some_replicas(3), timeouts=WAIT) as bench:
        first, second, third = equal_replicas(bench)
        assert third.info is not None
        third.info = replace(third.info, model=replace(third.info.model, numerics=NUMERICS | {"weights": weights}))
        keep_away(third)
        for replica in (first, second):
            replica.go.clear()

        def say_once(request: EngineRequest, updates: ReplicaStream) -> None:
            logprobs = (token_logprobs(request.prompt_ids[1], 0),) if "prompt_logprobs" in params else ()
            updates.put(update_of(request, 0, prompt_logprobs=logprobs, **read_already))

        first.on_submit = say_once
        second.snapshot = SeenLoad(snapshot(**FULL_QUEUE), virtual_loop().time() + FAR)
        stream, answer = stream_of(bench, text, **params), Answer()
        answer.take(await stream.events())
        first.die()
        reader = asyncio.create_task(read(stream, answer))
        await eventually(lambda: len(second.requests) == params.get("n", 1))
        come(third)
        await asyncio.sleep(2.0)
        second.go.set()
        await reader
        assert len(third.requests) == (weights == "ab")
        assert [len([event for event in events if event.finish]) for events in answer.events.values()] == [1] * params.get("n", 1)
        assert stream.num_resumes == params.get("n", 1), "a move is no resume"


@pytest.mark.parametrize("weights", ["ab", "cd"])
async def test_a_choice_without_a_token_of_an_earlier_stream_moves_only_to_the_same_model(text: TextModel, weights: str) -> None:
    async with open_bench(text, models=two_replicas(), timeouts=WAIT) as bench:
        first, second = equal_replicas(bench)
        assert second.info is not None
        second.info = replace(second.info, model=replace(second.info.model, numerics=NUMERICS | {"weights": weights}))
        keep_away(second)
        first.go.clear()
        first.snapshot = SeenLoad(snapshot(**FULL_QUEUE), virtual_loop().time() + FAR)
        stream, answer = stream_of(bench, text, n=2), Answer()
        stream.attempts.keep(0, [7])
        stream.attempts.continue_earlier(NUMERICS)
        reader = asyncio.create_task(read(stream, answer))
        await eventually(lambda: len(first.requests) == 2)
        come(second)
        await asyncio.sleep(2.0)
        first.go.set()
        await reader
        assert [request.first_index for request in second.requests] == ([1] if weights == "ab" else [])
        assert stream.num_resumes == 0


@pytest.mark.parametrize("has_fallback", [False, True])
async def test_a_request_that_the_replica_it_moves_to_refuses_goes_on_at_another(text: TextModel, has_fallback: bool) -> None:
    async with open_bench(text, models=two_replicas(), timeouts={"failover_s": 5}) as bench:
        first, second = equal_replicas(bench)
        keep_away(second)
        first.go.clear()
        first.snapshot = SeenLoad(snapshot(**FULL_QUEUE), virtual_loop().time() + FAR)
        second.on_submit = lambda request, updates: updates.reject(Overloaded("full", retry_after_s=1.0))
        stream, answer = stream_of(bench, text, has_fallback=has_fallback), Answer()
        reader = asyncio.create_task(read(stream, answer))
        await eventually(lambda: len(first.requests) == 1)
        come(second)
        await eventually(lambda: len(first.requests) == 2)
        first.go.set()
        await reader
        assert (len(second.requests), answer.num_tokens, stream.num_resumes) == (1, 40, 0)


def die_soon(replica: FakeReplica, request: EngineRequest, updates: ReplicaStream) -> None:
    asyncio.get_running_loop().call_soon(replica.die)


async def test_a_request_that_ends_every_engine_is_not_passed_on_for_ever(text: TextModel) -> None:
    async with open_bench(text, models=some_replicas(6), timeouts=WAIT) as bench:
        replicas = equal_replicas(bench)
        for replica in replicas:
            replica.on_submit = partial(die_soon, replica)
            replica.go.clear()
        with pytest.raises(ReplicaLost):
            await read(stream_of(bench, text), Answer())
        assert sum(len(replica.requests) for replica in replicas) == MAX_FRUITLESS_LOSSES


async def test_sequences_that_lose_one_replica_together_have_lost_it_once(text: TextModel) -> None:
    """A replica that dies before it has continued any of four sequences is one loss without a new token, and not four."""
    async with open_bench(text, models=some_replicas(3), timeouts=WAIT) as bench:
        replicas = equal_replicas(bench)
        answer, stream = Answer(), stream_of(bench, text, n=4)
        await read(stream, answer, until=8)
        (first,) = [replica for replica in replicas if replica.num_open]
        second, third = [replica for replica in replicas if replica is not first]
        second.go.clear()
        third.state = ConnectionState.DRAINING
        first.die()
        reader = asyncio.create_task(read(stream, answer))
        await eventually(lambda: second.num_open == 4)
        third.state = ConnectionState.CONNECTED
        second.die()
        await reader
        assert [len([event for event in answer.events[index] if event.finish]) for index in range(4)] == [1, 1, 1, 1]


async def test_a_client_that_leaves_during_the_wait_ends_it_at_once(text: TextModel) -> None:
    async with open_bench(text, timeouts=WAIT) as bench:
        (replica,) = equal_replicas(bench)
        answer, stream = Answer(), stream_of(bench, text, n=2)
        await read(stream, answer, until=4)
        replica.die()
        reader = asyncio.create_task(read(stream, answer))
        await asyncio.sleep(0.05)
        left_at = virtual_loop().time()
        stream.cancel()
        assert await reader is False
        assert virtual_loop().time() == left_at
        await stream.close()
        assert not [task for task in asyncio.all_tasks() if "CallAttempts" in str(task.get_coro())]


@pytest.mark.parametrize("has_other", [True, False])
async def test_streams_leave_a_replica_that_hangs_only_where_another_can_continue(text: TextModel, has_other: bool) -> None:
    async with open_bench(text, models=two_replicas(), timeouts=WAIT) as bench:
        hanging, other = equal_replicas(bench)
        if not has_other:
            other.state = ConnectionState.DRAINING
        answer, stream = Answer(), stream_of(bench, text)
        await read(stream, answer, until=5)
        hanging.go.clear()
        hanging.state, hanging.silent_s = ConnectionState.SILENT, MOVE_AFTER_S + 0.1
        reader = asyncio.create_task(read(stream, answer))
        await asyncio.sleep(0.4)
        if has_other:
            await reader
            assert hanging.cancelled == [RequestId("call")]
            assert answer.num_tokens == 40
        else:
            assert not reader.done()
            hanging.state, hanging.silent_s = ConnectionState.CONNECTED, 0.0
            hanging.go.set()
            await reader
            assert (len(hanging.requests), hanging.cancelled, other.requests) == (1, [], [])


async def test_a_request_that_its_replica_does_not_read_is_answered_by_another(text: TextModel) -> None:
    async with open_bench(text, models=two_replicas(), timeouts=WAIT) as bench:
        deaf, other = equal_replicas(bench)
        deaf.go.clear()
        answer, stream = Answer(), stream_of(bench, text)
        reader = asyncio.create_task(read(stream, answer))
        await eventually(lambda: bool(deaf.requests))
        deaf.state, deaf.unread_s = ConnectionState.NOT_READING, MOVE_AFTER_S - 0.1
        await asyncio.sleep(0.3)
        assert (deaf.cancelled, other.requests) == ([], []), "it may read in a moment"
        deaf.unread_s = MOVE_AFTER_S
        await reader
        assert (deaf.cancelled, len(other.requests), answer.num_tokens) == ([RequestId("call")], 1, 40)


async def test_what_has_not_begun_leaves_a_replica_that_hangs_for_one_of_other_numerics(text: TextModel) -> None:
    async with open_bench(text, models=two_replicas(), timeouts=WAIT) as bench:
        hanging, other = equal_replicas(bench)
        assert other.info is not None
        other.info = replace(other.info, model=replace(other.info.model, numerics=NUMERICS | {"weights": "cd"}))
        other.state = ConnectionState.DRAINING
        begun, begun_answer, waiting, waiting_answer = stream_of(bench, text), Answer(), stream_of(bench, text, name="second"), Answer()
        await read(begun, begun_answer, until=5)
        hanging.go.clear()
        readers = [asyncio.create_task(read(begun, begun_answer)), asyncio.create_task(read(waiting, waiting_answer))]
        await eventually(lambda: len(hanging.requests) == 2)
        other.state = ConnectionState.CONNECTED
        hanging.state, hanging.silent_s = ConnectionState.SILENT, MOVE_AFTER_S + 0.1
        await readers[1]
        assert (waiting_answer.num_tokens, len(other.requests)) == (40, 1)
        assert not readers[0].done(), "ids computed there cannot go on elsewhere: it stays until the lease ends"
        hanging.state, hanging.silent_s = ConnectionState.CONNECTED, 0.0
        hanging.go.set()
        await readers[0]
        assert begun_answer.num_tokens == 40


def announce(replica: FakeReplica, draw: random.Random) -> None:
    """Some numerics, adapters and a context."""
    assert replica.info is not None
    numerics = draw.choice([NUMERICS, NUMERICS, NUMERICS | {"weights": "cd"}, NUMERICS | {"weights": ""}])
    adapters = {name: draw.choice(["aa", "bb"]) for name in "ab" if draw.random() < 0.7}
    model = replace(replica.info.model, numerics=numerics, adapters=adapters, max_model_len=draw.choice([10, 64, 64]))
    replica.info = replace(replica.info, model=model)


@pytest.mark.parametrize("is_hanging", [True, False])
@pytest.mark.parametrize("seed", range(50))
async def test_a_stream_moves_exactly_where_routing_then_finds_a_ready_replica(text: TextModel, seed: int, is_hanging: bool) -> None:
    """Of a replica that does not read, only what it has not counted moves."""
    draw, may_move = random.Random(seed), set[RequestId]()
    async with open_bench(text, models=some_replicas(3)) as bench:
        upstream = bench.gateway.service.models.get(MODEL).upstream
        assert isinstance(upstream, TokenUpstream)
        pool, (bad, *others) = upstream._pool, bench.replicas.values()
        for replica in bench.replicas.values():
            announce(replica, draw)
        for other in others:
            other.state = draw.choice([ConnectionState.CONNECTED, ConnectionState.CONNECTED, ConnectionState.DRAINING])
        assert bad.info is not None
        bad.go.clear()
        for number in range(24):
            adapter, digest = draw.choice([(None, ""), *bad.info.model.adapters.items()])
            params = SamplingParams(seed=1, max_tokens=draw.choice([None, 8, 9]))  # 9 do not fit a context of 10
            asked = EngineRequest(
                request_id=RequestId(f"r{number}"), prompt_ids=(1, 2), params=params, adapter=adapter, adapter_digest=digest
            )
            is_resumed, has_update = draw.random() < 0.2, draw.random() < 0.5
            stream = bad.submit(asked.resumed(0, [7], "") if is_resumed else asked)
            if has_update:
                stream.put(update_of(asked, 0))
            if draw.random() < 0.5:
                bad.counted.add(asked.request_id)
            with suppress(Unavailable):
                numerics = stream.numerics if is_resumed or has_update else None
                pool.pick(asked, num_output=1, tried={pool.replicas[0].instance}, numerics=numerics)
                may_move.add(asked.request_id)
        if is_hanging:
            bad.state, bad.silent_s = ConnectionState.SILENT, MOVE_AFTER_S
        else:
            bad.state, bad.unread_s = ConnectionState.NOT_READING, MOVE_AFTER_S
        pool._look_at(pool.replicas[0])
        assert set(bad.cancelled) == (may_move if is_hanging else may_move - bad.counted)
        for request_id in list(bad.streams):
            bad.cancel(request_id)


@pytest.mark.pure
def test_a_stall_is_counted_beyond_the_predicted_step_and_not_from_ones_own_delay() -> None:
    stepping = SeenLoad(snapshot(step_age_s=3.0, step_predicted_s=1.5), 10.0)
    assert stalled_s(ConnectionState.CONNECTED, stepping, 0.0, 10.25) == pytest.approx(1.75)
    assert stalled_s(ConnectionState.CONNECTED, stepping, 0.0, 500.0) == pytest.approx(2.25), "it may be this process that was stopped"
    idle = SeenLoad(snapshot(loop_age_s=0.1), 10.0)
    assert stalled_s(ConnectionState.CONNECTED, idle, 0.0, 10.1) == pytest.approx(0.2)
    assert stalled_s(ConnectionState.SILENT, idle, 4.0, 500.0) == 4.0
    assert stalled_s(ConnectionState.DOWN, None, 4.0, 500.0) == 0.0


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_the_client_reads_one_answer_and_the_log_counts_the_resumes(text: TextModel, tmp_path: Any, is_streaming: bool) -> None:
    log = tmp_path / "log"
    async with open_bench(text, models=two_replicas(), timeouts=WAIT, request_log=str(log)) as bench:
        first, second = equal_replicas(bench)

        async def die_after_some_tokens() -> None:
            await asyncio.sleep(0.085)
            first.die()

        def die_in_the_middle(request: EngineRequest, updates: ReplicaStream) -> None:
            first.tasks.add(asyncio.create_task(die_after_some_tokens()))

        first.on_submit, first.token_delay_s = die_in_the_middle, 0.01
        response = await bench.chat(stream=is_streaming)
        assert response.status_code == 200
        if is_streaming:
            chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
            said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
            assert response.text.rstrip().endswith("data: [DONE]")
        else:
            said = response.json()["choices"][0]["message"]["content"]
        assert said == SAID
        (request,) = second.requests
        assert request.output_ids
        assert metric(bench.gateway, "headrace_sequences_resumed_total", model=MODEL, replica="r1") == 1
    (line,) = [json.loads(line) for line in log.read_text().splitlines()]
    assert (line["num_resumes"], line["replica"], line["outcome"]) == (1, "r1", "completed")
