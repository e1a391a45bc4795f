"""Compares the policies that choose a replica: in simulation on one trace of shared beginnings, and by the time that a decision takes.

    python -m bench.routing policies -> bench/results/routing-policies.json     virtual time: the same on every machine
    python -m bench.routing decision -> bench/results/routing-decision.json     on a quiet machine

The trace is of conversations: each begins with one of several system prompts, and each turn with all that was said before. A decision is
measured in a pool of 100 replicas that report loads, whose prefix index is full.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any, cast

from bench.harness import RESULTS, write_portable
from headrace.core.ids import RequestId
from headrace.core.load import EngineCounters, LoadSnapshot
from headrace.core.model_info import ModelInfo
from headrace.core.request import EngineRequest, PriorityClass
from headrace.core.sampling import SamplingParams
from headrace.engine.config import EngineConfig
from headrace.gateway.upstream.own.replica_health import Replica
from headrace.gateway.upstream.own.replicas import ReplicaPool
from headrace.lab.environment import environment
from headrace.lab.metrics import summarize
from headrace.lab.simulate.build import SimulatedModel
from headrace.lab.simulate.load import Arrival
from headrace.lab.simulate.site import SimulatedSite
from headrace.lab.simulate.step_times import FittedLatency
from headrace.policy.routing.choice import ReplicaId
from headrace.policy.routing.prefix_index import CHUNK_TOKENS, MAX_CHUNKS
from headrace.policy.routing.replicas import POLICIES
from headrace.wire.client import ConnectionState, ReplicaClient, ReplicaInfo, SeenLoad

LATENCY = FittedLatency(step_s=0.01, row_s=0.0001, context_s=0.0, prompt_s=0.0001, attention_s=0.0)
"""A step takes 10 ms and 0.1 ms for each row and each prompt token: 10,000 prompt tokens a second."""

NUM_SYSTEM_PROMPTS, SYSTEM_TOKENS, TURN_TOKENS, ANSWER_TOKENS, NUM_TURNS, PAUSE_S = 32, 1024, 128, 96, 6, 10.0
NUM_BLOCKS = 4096
"""65,536 tokens of KV: about a fifth of the system prompts and open conversations of 4 replicas fit one."""

SECONDS = 300.0
CONVERSATIONS_PER_S = 1.0
"""For each replica. Without a cache that would be 10,400 prompt tokens a second, more than it computes."""


def conversations(num_replicas: int, *, seed: int) -> Iterator[Arrival]:
    """In the order of their times. Popular system prompts begin more conversations (Zipf). A simulated answer is of zeros."""
    draw = random.Random(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple([draw.randrange(1, 1 << 30) for _ in range(count)])

    systems, weights = [ids(SYSTEM_TOKENS) for _ in range(NUM_SYSTEM_PROMPTS)], [1 / rank for rank in range(1, NUM_SYSTEM_PROMPTS + 1)]
    due: list[tuple[float, int, int, tuple[int, ...]]] = []
    begins_at, number = 0.0, 0
    while begins_at < SECONDS or due:
        if begins_at < SECONDS and (not due or begins_at <= due[0][0]):
            heapq.heappush(due, (begins_at, number, 0, draw.choices(systems, weights)[0]))
            begins_at, number = begins_at + draw.expovariate(CONVERSATIONS_PER_S * num_replicas), number + 1
            continue
        at, conversation, turn, before = heapq.heappop(due)
        prompt = before + ids(TURN_TOKENS)
        yield Arrival(at, prompt, ANSWER_TOKENS, f"conversation {conversation}")
        if turn + 1 < NUM_TURNS:
            next_at = at + PAUSE_S * draw.uniform(0.5, 1.5)
            heapq.heappush(due, (next_at, conversation, turn + 1, prompt + (0,) * ANSWER_TOKENS))


def simulated(policy: str, num_replicas: int, num_gateways: int) -> dict[str, Any]:
    config = EngineConfig(model="simulated", max_num_seqs=64, num_kv_blocks=NUM_BLOCKS).checked()
    models = [SimulatedModel(config, LATENCY, NUM_BLOCKS, 8192)] * num_replicas
    site = SimulatedSite(models, routing=policy, num_gateways=num_gateways)
    records = site.run(conversations(num_replicas, seed=1))
    report, counted = summarize(records), [replica.engine.snapshot().counters for replica in site.replicas]
    computed = [each.prompt_tokens - each.prefix_cache_hit_tokens + each.generation_tokens for each in counted]
    hits = sum(each.prefix_cache_hit_tokens for each in counted) / sum(each.prompt_tokens for each in counted)
    return {
        "policy": policy,
        "replicas": num_replicas,
        "gateways": num_gateways,
        "requests": len(records),
        "failed": report.failed,
        "hit_rate": round(hits, 4),
        "ttft_p50_ms": round(1000 * report.ttft_s.quantiles["p50"], 1),
        "ttft_p99_ms": round(1000 * report.ttft_s.quantiles["p99"], 1),
        "load_spread": round(max(computed) / statistics.fmean(computed), 3),
    }


def compare_policies() -> list[dict[str, Any]]:
    cases = [(policy, replicas, 1) for replicas in (4, 8) for policy in POLICIES]
    cases += [("prefix-aware", replicas, gateways) for replicas in (4, 8) for gateways in (2, 4)]
    rows = []
    for case in cases:
        rows.append(simulated(*case))
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    for row in compare_policies():
        pass
