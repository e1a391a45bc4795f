"""Tests the queue that admission judges by: the shortest of all replicas, and of many the shortest of those that were short lately."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from gateway_kit import FakeReplica, model_info, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.load import ClassLoad, summed
from headrace.core.request import PriorityClass
from headrace.gateway.upstream.own.replica_health import Replica
from headrace.gateway.upstream.own.replicas import FEW, GLANCE_S, UNKNOWN_PROMPT_TOKENS, ReplicaPool
from headrace.policy.admission import QueueState, UnsentRequests, queue_state
from headrace.policy.queues import traits_of
from headrace.policy.routing.choice import ReplicaId
from headrace.policy.routing.predicted_time import UNKNOWN_OUTPUT_TOKENS, RequestSize, SentSince
from headrace.text.folder import TextModel
from headrace.wire.client import ConnectionState, ReplicaInfo, SeenLoad

pytestmark = pytest.mark.loop

SLOTS = 8
MEAN = RequestSize(UNKNOWN_PROMPT_TOKENS, UNKNOWN_OUTPUT_TOKENS)


def fake(text: TextModel, name: str, policy: str) -> FakeReplica:
    made = FakeReplica(text, name)
    made.info = ReplicaInfo("first", name, model_info(text, queue_policy=policy))
    return made


def change(replica: FakeReplica, draw: random.Random) -> None:
    classes = tuple([ClassLoad(draw.randrange(SLOTS), draw.randrange(30), draw.randrange(10**5)) for _ in PriorityClass])
    load = snapshot(step_fixed_s=0.01, step_token_s=0.001, max_num_seqs=SLOTS, classes=classes, **summed(classes)._asdict())
    replica.snapshot = SeenLoad(load, 1e6)
    replica.state = draw.choice([ConnectionState.CONNECTED, ConnectionState.CONNECTED, ConnectionState.SILENT])
    replica.sent = {each: draw.choices(range(5000), k=draw.randrange(3)) for each in PriorityClass}


def plain_queues(replicas: list[FakeReplica], priority: PriorityClass, policy: str, joined: SentSince) -> list[QueueState]:
    """The twin looks at all; the shortest comes first."""
    traits = traits_of(policy)
    lowest, queues = traits.lowest_before(priority), []
    for replica in [each for each in replicas if each.state is ConnectionState.CONNECTED] or replicas:
        assert replica.snapshot is not None
        sent = replica.sent_since_snapshot(lowest)
        queue = queue_state(replica.snapshot.load, SentSince(len(sent), sum(sent)).plus(joined), MEAN, lowest=lowest, block_size=16)
        queues.append(replace(queue, num_slots=SLOTS if traits.has_tenants else 0))
    return sorted(queues, key=lambda queue: (queue.wait_s, queue.depth))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["fcfs", "priority", "fair"]), st.sampled_from([1, 4, FEW + 4]), st.integers(0, 50))
def test_the_shortest_queue_is_that_of_a_look_at_all_replicas(text: TextModel, seed: int, policy: str, size: int, num_unsent: int) -> None:
    """Of many it may be overestimated for GLANCE_S, and is that of a replica which takes part."""
    draw, now, unsent = random.Random(seed), [100.0], UnsentRequests()
    replicas = [fake(text, f"r{number}", policy) for number in range(size)]
    pool = ReplicaPool("fake", [Replica(ReplicaId(each.name), each) for each in replicas], random=draw, clock=lambda: now[0])
    for _ in range(num_unsent):
        unsent.add(PriorityClass.PREMIUM)
    for _ in range(4):
        for replica in replicas:
            change(replica, draw)
        num_ready = sum(each.state is ConnectionState.CONNECTED for each in replicas)
        num_each = -(-num_unsent // (num_ready or size))
        joined = SentSince(num_each, num_each * UNKNOWN_PROMPT_TOKENS)
        asked = draw.choices(list(PriorityClass), k=4)
        for priority in asked:
            assert pool.queue(priority, unsent) == plain_queues(replicas, priority, policy, joined)[0]
        if size > FEW and num_ready:
            changed = draw.sample(replicas, draw.randrange(6))
            for replica in changed:
                change(replica, draw)
            for priority in asked:
                queues = plain_queues(replicas, priority, policy, joined)
                assert pool.queue(priority, unsent) in (queues if changed else queues[:1])
        now[0] += GLANCE_S
