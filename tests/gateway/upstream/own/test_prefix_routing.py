"""Tests where prompts that begin alike go: to a replica that was sent the beginning, in every gateway, among few replicas and many."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest
from gateway_kit import FakeReplica, model_info, open_bench, snapshot, some_replicas
from hypothesis import given, settings
from hypothesis import strategies as st
from session_kit import turn

from headrace.core.errors import Unavailable
from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.gateway.upstream.own.replica_health import Replica, ReplicaCircuit
from headrace.gateway.upstream.own.replicas import FEW, GLANCE_S, ReplicaPool
from headrace.policy.routing.choice import ReplicaChoice, ReplicaId
from headrace.policy.routing.failures import REPLICA_LIMITS
from headrace.text.folder import TextModel
from headrace.wire.client import ConnectionState, ReplicaInfo, SeenLoad

pytestmark = pytest.mark.loop

SIZES = (4, FEW + 14)
"""Of a pool in which each decision looks at all replicas, and of one in which it looks at those that it draws."""


class Now:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def pool_of(text: TextModel, size: int, now: Now, *, seed: int = 1, num_blocks: int = 4096) -> ReplicaPool:
    """Idle replicas of one speed: a prompt token takes a millisecond."""
    facts = model_info(text, num_blocks=(num_blocks,), max_model_len=4096)
    known = snapshot(step_fixed_s=0.01, step_token_s=0.001, max_num_seqs=8)
    replicas = [Replica(ReplicaId(f"r{number}"), FakeReplica(text, f"r{number}")) for number in range(size)]
    for each in replicas:
        each.connection.info, each.connection.snapshot = ReplicaInfo("first", each.name, facts), SeenLoad(known, 1e6)
    return ReplicaPool("fake", replicas, random=random.Random(seed), clock=now)


def prompt(*words: int) -> tuple[int, ...]:
    """128 tokens for each word."""
    return tuple([100 * word + place % 97 for word in words for place in range(128)])


def request(*words: int, **facts: Any) -> EngineRequest:
    return EngineRequest(request_id=RequestId("r"), prompt_ids=prompt(*words) or (7,), params=SamplingParams(seed=0, max_tokens=8), **facts)


def send(pool: ReplicaPool, asked: EngineRequest) -> tuple[Replica, ReplicaChoice]:
    chunks = pool.chunks(asked)
    replica, choice = pool.pick(asked, chunks=chunks)
    pool.note_sent(replica, chunks).succeed()
    pool.check()
    return replica, choice


@pytest.mark.parametrize("size", SIZES)
async def test_a_conversation_stays_at_its_replica(text: TextModel, size: int) -> None:
    pool = pool_of(text, size, Now())
    for conversation in range(20):
        first, _ = send(pool, request(1, 50 + conversation))
        later = [send(pool, request(1, 50 + conversation, *range(2, turn))) for turn in range(3, 8)]
        seen = [replica for replica, _ in later]
        assert Counter(seen)[first] >= 4, "apart from choices that are made without speeds"
        figures = later[-1][1].figures[0]
        assert figures.cached_tokens == 128 * 6 or seen[-1] is not seen[-2]
        assert later[-1][1].policy == "prefix-aware"


@pytest.mark.parametrize("size", SIZES)
async def test_conversations_with_one_system_prompt_are_spread(text: TextModel, size: int) -> None:
    """One holder would have them all: it is left as its queue grows."""
    pool, taken = pool_of(text, size, Now()), Counter[str]()
    for conversation in range(10 * size):
        replica, _ = send(pool, request(1, 1, 1, 50 + conversation))
        taken[replica.name] += 1
        seen = replica.connection.snapshot
        assert seen is not None
        replica.connection.snapshot = SeenLoad(replace(seen.load, num_queued_tokens=seen.load.num_queued_tokens + 128), 1e6)
    assert max(taken.values()) <= 10 * 2.5


@pytest.mark.parametrize("size", SIZES)
async def test_another_gateway_sends_a_conversations_next_turn_to_the_same_replica(text: TextModel, size: int) -> None:
    """Each has sent the system prompt everywhere, and knows nothing of the other one's turns."""
    here, there = pool_of(text, size, Now(), seed=1), pool_of(text, size, Now(), seed=2)
    for pool in (here, there):
        for replica in pool.replicas:
            pool.note_sent(replica, pool.chunks(request(1))).succeed()
    num_same = 0
    for conversation in range(60):
        first, _ = send(here, request(1, 50 + conversation, 0, 0, 0, 0, 0, 0))
        second, _ = send(there, request(1, 50 + conversation, 0, 0, 0, 0, 0, 0, 2))
        num_same += first.name == second.name
    assert num_same > 50


@pytest.mark.parametrize("size", SIZES)
async def test_tenants_and_adapters_begin_anew(text: TextModel, size: int) -> None:
    pool = pool_of(text, size, Now())
    for salt in range(20):
        _, choice = send(pool, request(1, 2, 3, salt=bytes([salt])))
        assert not any(each.cached_tokens for each in choice.figures)


async def test_a_replica_that_was_started_again_has_nothing_cached(text: TextModel) -> None:
    pool = pool_of(text, 2, Now())
    replica, _ = send(pool, request(1, 2, 3))
    assert replica.connection.info is not None
    replica.connection.info = replace(replica.connection.info, instance_id="another")
    assert not any(each.cached_tokens for each in send(pool, request(1, 2, 3))[1].figures)
    assert any(each.cached_tokens for each in send(pool, request(1, 2, 3))[1].figures)


async def test_a_replica_holds_what_its_kv_cache_holds(text: TextModel) -> None:
    """101 blocks of 16 tokens: 12 chunks."""
    pool = pool_of(text, 2, Now(), num_blocks=101)
    for number in range(80):
        send(pool, request(number))
    chunks = [pool.chunks(request(number)) for number in range(80)]
    held = [pool._index.tokens(replica, replica.instance[1], each) for replica in pool.replicas for each in chunks]
    assert sum(held) == 24 * 128


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_of_many_only_those_are_chosen_that_a_look_at_all_would_allow(text: TextModel, data: st.DataObject) -> None:
    """Replicas fail, fall silent and come back between decisions, while what was seen of all is kept."""
    now = Now()
    pool = pool_of(text, FEW + 4, now, seed=data.draw(st.integers(0, 99)))
    number = st.integers(0, FEW + 3)
    for _ in range(data.draw(st.integers(1, 12))):
        for place in data.draw(st.lists(number, max_size=6)):
            cast(FakeReplica, pool.replicas[place].connection).state = data.draw(st.sampled_from(ConnectionState))
        for place in data.draw(st.lists(number, max_size=2)):
            circuit: ReplicaCircuit = pool.replicas[place].circuit
            for failure in range(REPLICA_LIMITS.max_failures):
                circuit.send(("instance", now() + failure), now).lose()
        tried = {pool.replicas[place].instance for place in data.draw(st.lists(number, max_size=6))}
        asked = request(data.draw(st.integers(0, 3)))
        chunks, left_out = pool.chunks(asked), pool._ejected(pool.ready())
        first = [each for each in pool.ready() if each.instance not in tried and each.name not in left_out]
        second = [each for each in pool.replicas if each.instance not in tried and each.connection.state is ConnectionState.CONNECTED]
        try:
            replica, choice = pool.pick(asked, tried=tried, chunks=chunks)
        except Unavailable:
            assert not first
            assert not second
            continue
        assert replica in (first or second)
        assert choice.replica_id == replica.name
        pool.note_sent(replica, chunks).succeed()
        now.s += data.draw(st.sampled_from([0.0, GLANCE_S / 2, GLANCE_S, 20.0]))
    pool.check()


async def test_an_adapter_is_read_once_while_requests_use_it(text: TextModel) -> None:
    """A read takes 0.4 s; the replica that has the adapter in use is busier by 0.2 s."""
    pool = pool_of(text, 2, Now())
    loads: list[dict[str, Any]] = [{"running_adapters": ("sql",), "num_queued_tokens": 200}, {}]
    for replica, changes in zip(pool.replicas, loads, strict=True):
        seen, info = replica.connection.snapshot, replica.connection.info
        assert seen is not None
        assert info is not None
        counters = replace(seen.load.counters, adapter_reads=10, adapter_read_microseconds=4_000_000)
        replica.connection.snapshot = SeenLoad(replace(seen.load, counters=counters, **changes), 1e6)
        replica.connection.info = replace(info, model=replace(info.model, adapters={"sql": "aa", "chat": "bb"}))
    taken = {name: Counter[str]() for name in ("sql", "chat")}
    for name, digest in (("sql", "aa"), ("chat", "bb")):
        for _ in range(200):
            taken[name][pool.pick(replace(request(), adapter=name, adapter_digest=digest))[0].name] += 1
    assert taken["sql"]["r0"] > 190
    assert taken["chat"]["r1"] > 190


async def test_a_sessions_turns_go_to_one_replica(text: TextModel) -> None:
    async with open_bench(text, models=some_replicas(4), routing="session") as bench:
        await asyncio.sleep(20.0)
        before = [0] * 4
        homes = []
        for session in [*map(str, range(12))] * 2:
            assert (await turn(bench, session, "Hello", max_tokens=1)).status_code == 200
            now = [len(replica.requests) for replica in bench.replicas.values()]
            homes.append([one - other for one, other in zip(now, before, strict=True)].index(1))
            before = now
        assert homes[:12] == homes[12:]
        assert len(set(homes)) > 1


async def test_a_reload_changes_the_policy(text: TextModel) -> None:
    async with open_bench(text, models=some_replicas(4), routing="round-robin") as bench:
        await asyncio.sleep(20.0)
        for _ in range(8):
            assert (await bench.chat(max_tokens=1)).status_code == 200
        assert [len(replica.requests) for replica in bench.replicas.values()] == [2, 2, 2, 2]
        config = replace(bench.reloader.config, routing="session")
        await bench.reloader.reload(lambda: config)
        answer = await bench.chat(max_tokens=1)
        explained = (await bench.client.get(f"/v1/requests/{answer.headers['x-request-id']}/explain")).json()
        assert [each["policy"] for each in explained["route"]["attempts"]] == ["session"]
