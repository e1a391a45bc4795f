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
from collections.abc import Callable, Iterator
from typing import Any

from bench.harness import RESULTS, write_portable
from headrace.core.ids import RequestId
from headrace.core.load import ClassLoad, EngineCounters, LoadSnapshot
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
from headrace.policy.admission import UnsentRequests
from headrace.policy.routing.choice import ReplicaId
from headrace.policy.routing.prefix_index import CHUNK_TOKENS, MAX_CHUNKS
from headrace.policy.routing.replicas import POLICIES
from headrace.wire.client import ReplicaClient, ReplicaInfo, SeenLoad
from headrace.wire.service import Expectation, Handle
from headrace.wire.session import Session

LATENCY = FittedLatency(step_s=0.01, row_s=0.0001, context_s=0.0, prompt_s=0.0001, attention_s=0.0)
"""A step takes 10 ms and 0.1 ms for each row and each prompt token: 10,000 prompt tokens a second."""

NUM_SYSTEM_PROMPTS, SYSTEM_TOKENS, TURN_TOKENS, ANSWER_TOKENS, NUM_TURNS, PAUSE_S = 32, 1024, 128, 96, 6, 10.0
NUM_BLOCKS = 4096
"""65,536 tokens of KV: about a fifth of the system prompts and open conversations of 4 replicas fit one."""

SECONDS = 120.0
CONVERSATIONS_PER_S = 1.5
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
        "failed": len(records) - report.finished,
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


class LoadedReplica(ReplicaClient):
    """Its session is open, was last heard in an hour, and has sent three requests since its report. It takes none."""

    def __init__(self, info: ReplicaInfo, load: LoadSnapshot) -> None:
        super().__init__("unix:/nowhere", name=info.replica)
        self.info, self.snapshot = info, SeenLoad(load, time.monotonic() + 3600.0)
        ignore: Callable[[object], None] = lambda _: None  # noqa: E731
        self._session = Session(
            self._dialer,
            Expectation(),
            on_hello=ignore,
            on_load=ignore,
            on_weights_digest=ignore,
            on_adapters=ignore,
            on_beat=lambda: None,
            clock=time.monotonic,
        )
        self._session.is_open, self._session.last_frame_at = True, self.snapshot.received_s
        self._session._unseen.extend((Handle(number), 500 * (number + 1), PriorityClass.STANDARD) for number in range(3))


def pool_of_many(policy: str, num_replicas: int, draw: random.Random) -> ReplicaPool:
    info = ModelInfo(
        architecture="none",
        vocab_size=150_000,
        max_model_len=131_072,
        eos_token_ids=(),
        kv_groups=(),
        block_size=16,
        num_blocks=(MAX_CHUNKS * CHUNK_TOKENS // 16 // num_replicas,),
        dtype="none",
        weight_bytes=0,
        queue_policy="priority",
    )
    replicas = []
    for number in range(num_replicas):
        standard = ClassLoad(num_running=draw.randrange(30), num_waiting=draw.randrange(5), num_queued_tokens=draw.randrange(20_000))
        load = LoadSnapshot(
            num_running=standard.num_running,
            num_waiting=standard.num_waiting,
            kv_blocks_free=10_000,
            kv_blocks_cached=40_000,
            kv_blocks_used=30_000,
            kv_blocks_total=80_000,
            counters=EngineCounters(prompt_tokens=10**7, generation_tokens=10**6, finished={"stop": 5000, "length": 100}),
            step_age_s=0.01,
            step_predicted_s=0.03,
            num_queued_tokens=standard.num_queued_tokens,
            max_num_seqs=64,
            step_fixed_s=draw.uniform(0.008, 0.012),
            step_token_s=draw.uniform(0.00008, 0.00012),
            step_prompt_tokens=2048,
            classes=(ClassLoad(), standard, ClassLoad()),
        )
        seen = ReplicaInfo(f"instance-{number}", f"r{number}", info, time.monotonic() - 100.0)
        replicas.append(Replica(ReplicaId(f"r{number}"), LoadedReplica(seen, load)))
    return ReplicaPool("measured", replicas, random=draw, routing=policy, slow_start_s=10.0)


NUM_REPLICAS, NUM_PROMPTS, PROMPT_TOKENS, NUM_DECISIONS = 100, 1000, 4096, 20_000
SHARED_TOKENS = 2048
"""Of each measured prompt: the beginning of one that was sent before."""


def measured_decision(policy: str) -> dict[str, Any]:
    """Microseconds of the look at queues, the hashing of a prompt, the choice, and the noting of what was sent."""
    draw = random.Random(0)
    pool = pool_of_many(policy, NUM_REPLICAS, draw)
    for replica in pool.replicas if POLICIES[policy].has_index else ():
        pool.note_sent(replica, [draw.getrandbits(62) for _ in range(MAX_CHUNKS // NUM_REPLICAS)]).succeed()
    prompts = [tuple(draw.choices(range(150_000), k=PROMPT_TOKENS)) for _ in range(NUM_PROMPTS)]
    for number, prompt in enumerate(prompts):
        pool.note_sent(pool.replicas[number % NUM_REPLICAS], pool.chunks(_request(number, prompt))).succeed()
    unsent = UnsentRequests()
    unsent.add(PriorityClass.STANDARD)
    took: dict[str, list[float]] = {"queue": [], "hash": [], "choose": [], "note": []}
    for number in range(NUM_DECISIONS):
        request = _request(number, draw.choice(prompts)[:SHARED_TOKENS] + draw.choice(prompts)[SHARED_TOKENS:])
        moments = [time.perf_counter()]
        pool.queue(request.priority, unsent)
        moments.append(time.perf_counter())
        chunks = pool.chunks(request)
        moments.append(time.perf_counter())
        replica, _ = pool.pick(request, chunks=chunks)
        moments.append(time.perf_counter())
        attempt = pool.note_sent(replica, chunks)
        moments.append(time.perf_counter())
        attempt.succeed()
        for name, begin, end in zip(took, moments, moments[1:], strict=False):
            took[name].append(1e6 * (end - begin))
    pool.check()
    return {"policy": policy, **{name: _quantiles(values) for name, values in took.items()}}


def _request(number: int, prompt: tuple[int, ...]) -> EngineRequest:
    return EngineRequest(request_id=RequestId(f"r{number}"), prompt_ids=prompt, params=SamplingParams(seed=0, max_tokens=500))


def _quantiles(values: list[float]) -> dict[str, float]:
    values.sort()
    return {name: round(values[int(share * len(values))], 1) for name, share in (("p50_us", 0.5), ("p99_us", 0.99), ("p999_us", 0.999))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("policies", "decision"))
    parser.add_argument("--no-file", action="store_true", help="leave the file in bench/results as it is")
    given = parser.parse_args()
    settings = {"replicas": NUM_REPLICAS, "chunks": MAX_CHUNKS, "prompt_tokens": PROMPT_TOKENS, "shared_tokens": SHARED_TOKENS}
    if given.what == "policies":
        found: dict[str, Any] = {"seconds": SECONDS, "conversations_per_s": CONVERSATIONS_PER_S, "runs": compare_policies()}
    else:
        rows = [measured_decision(policy) for policy in POLICIES]
        print(*rows, sep="\n")
        found = {"environment": environment(), "settings": settings, "policies": rows}
    if not given.no_file:
        write_portable(RESULTS / f"routing-{given.what}.json", found)


if __name__ == "__main__":
    main()
