"""Routing over replicas of different speed, in virtual time: the real choice (`policy.routing`), replicas of a few lines, no engine.

A replica computes steps of `fixed_s + tokens * token_s` seconds: one token per decoding sequence, and prompts in chunks up to its token
budget. It reports its load at the start of each step; what was sent since is known as in the gateway. Equal seeds give equal runs.
`python -m bench.routing` prints the comparison that docs/experiments.md quotes.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

from headrace.core.load import EngineCounters, LoadSnapshot
from headrace.policy.routing.choice import Candidate, ReplicaId, cheaper_of_two, choose, cost
from headrace.policy.routing.predicted_time import NOTHING_SENT, RequestSize, SentSince, StepSpeed, num_blocks

BLOCK_SIZE = 16


@dataclass(slots=True)
class SimulatedRequest:
    """first_s, done_s: when its first and its last token came; 0 before"""

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    prompt_left: int = 0
    output_left: int = 0
    first_s: float = 0.0
    done_s: float = 0.0

    @property
    def num_blocks(self) -> int:
        return num_blocks(self.prompt_tokens + self.output_tokens, BLOCK_SIZE)


@dataclass(slots=True)
class SimulatedReplica:
    """step_ends_s: when the running step ends; None while idle"""

    speed: StepSpeed
    max_num_seqs: int = 32
    token_budget: int = 512
    total_blocks: int = 4096
    waiting: deque[SimulatedRequest] = field(default_factory=deque)
    running: list[SimulatedRequest] = field(default_factory=list)
    step_ends_s: float | None = None
    num_served: int = 0
    sent: SentSince = NOTHING_SENT
    report: LoadSnapshot | None = None
    _chunks: list[tuple[SimulatedRequest, int]] = field(default_factory=list)

    def submit(self, request: SimulatedRequest, now_s: float) -> None:
        request.prompt_left, request.output_left = request.prompt_tokens, request.output_tokens
        self.waiting.append(request)
        self.num_served += 1
        self.sent = SentSince(self.sent.num_requests + 1, self.sent.num_tokens + request.prompt_tokens)
        if self.step_ends_s is None:
            self.begin_step(now_s)

    def begin_step(self, now_s: float) -> None:
        """Plan and start a step, and report the load; idle where there is nothing to do."""
        free = self._free_blocks
        while self.waiting and len(self.running) < self.max_num_seqs and self.waiting[0].num_blocks <= free:
            free -= self.waiting[0].num_blocks
            self.running.append(self.waiting.popleft())
        budget = self.token_budget - sum(not each.prompt_left for each in self.running)
        self._chunks = []
        for each in self.running:
            chunk = min(each.prompt_left, max(budget, 0)) if each.prompt_left else 1
            budget -= chunk if each.prompt_left else 0
            self._chunks.append((each, chunk))
        seconds = self.speed.step_s(sum(chunk for _, chunk in self._chunks)) if self.running else 0.0
        self.step_ends_s = now_s + seconds if self.running else None
        self.sent = NOTHING_SENT
        self.report = self._load(seconds)

    def end_step(self) -> None:
        assert self.step_ends_s is not None
        now_s = self.step_ends_s
        for each, chunk in self._chunks:
            if each.prompt_left:
                each.prompt_left -= chunk
                if each.prompt_left:
                    continue
                each.first_s = now_s
            each.output_left -= 1
            if each.output_left <= 0:
                each.done_s = now_s
        self.running = [each for each in self.running if not each.done_s]
        self.begin_step(now_s)

    def copied(self) -> SimulatedReplica:
        """The same state, independent of this one's requests."""
        copies = {id(each): copy(each) for each in (*self.running, *self.waiting)}
        return replace(
            self,
            waiting=deque(copies[id(each)] for each in self.waiting),
            running=[copies[id(each)] for each in self.running],
            _chunks=[(copies[id(each)], chunk) for each, chunk in self._chunks],
        )

    @property
    def _free_blocks(self) -> int:
        return self.total_blocks - sum(each.num_blocks for each in self.running)

    def _load(self, step_s: float) -> LoadSnapshot:
        planned = {id(each): chunk for each, chunk in self._chunks}
        left = sum(each.prompt_left - planned[id(each)] for each in self.running if each.prompt_left)
        return LoadSnapshot(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_blocks_free=self._free_blocks,
            kv_blocks_cached=0,
            kv_blocks_used=self.total_blocks - self._free_blocks,
            kv_blocks_total=self.total_blocks,
            counters=EngineCounters(),
            step_age_s=0.0 if self.running else None,
            step_predicted_s=step_s,
            num_queued_tokens=left + sum(each.prompt_tokens for each in self.waiting),
            max_num_seqs=self.max_num_seqs,
            step_fixed_s=self.speed.fixed_s,
            step_token_s=self.speed.token_s,
        )


Route = Callable[[Sequence[SimulatedReplica], SimulatedRequest, int, random.Random], int]
"""replicas, request, expected output tokens, random numbers -> index of the replica that gets it"""


def by_predicted_time(replicas: Sequence[SimulatedReplica], request: SimulatedRequest, output_tokens: int, draw: random.Random) -> int:
    """The gateway's choice."""
    size = RequestSize(request.prompt_tokens, output_tokens)
    chosen = choose(_candidates(replicas), size=size, block_size=BLOCK_SIZE, random=draw)
    assert chosen is not None
    return int(chosen.replica_id)


def by_outstanding(replicas: Sequence[SimulatedReplica], request: SimulatedRequest, _output_tokens: int, draw: random.Random) -> int:
    """Two random choices by the number of requests: what is done while no speed is known."""
    chosen = cheaper_of_two(
        _candidates(replicas), lambda each: cost(each, prompt_tokens=request.prompt_tokens, block_size=BLOCK_SIZE), draw
    )
    return int(chosen.replica_id)


def by_oracle(replicas: Sequence[SimulatedReplica], request: SimulatedRequest, _output_tokens: int, _draw: random.Random) -> int:
    """The replica where the request would be done first if no other came: each is run ahead with the true lengths."""
    return min(range(len(replicas)), key=lambda index: _done_s(replicas[index], request))


def _candidates(replicas: Sequence[SimulatedReplica]) -> list[Candidate]:
    return [Candidate(ReplicaId(str(number)), replica.report, replica.sent) for number, replica in enumerate(replicas)]


def _done_s(replica: SimulatedReplica, request: SimulatedRequest) -> float:
    ahead, mine = replica.copied(), copy(request)
    ahead.submit(mine, request.arrived_s)
    while not mine.done_s:
        ahead.end_step()
    return mine.done_s


@dataclass(frozen=True, slots=True)
class RoutingResult:
    """shares: of the requests, per replica; seconds from arrival to the first and to the last token"""

    shares: tuple[float, ...]
    mean_ttft_s: float
    p99_ttft_s: float
    mean_e2e_s: float
    p99_e2e_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """num_requests  arrive at random times; lengths are drawn from exponential distributions
    load          share of what all replicas can do together
    """

    num_requests: int = 2000
    load: float = 0.8
    prompt_tokens: int = 256
    output_tokens: int = 64
    seed: int = 0


def simulate(replicas: Sequence[SimulatedReplica], workload: Workload, route: Route) -> RoutingResult:
    """Run the workload to its end. The replicas are used up. A request goes to no replica whose cache can never hold it: one rejects it."""
    draw = random.Random(workload.seed)
    requests = _requests(replicas, workload, draw)
    ends: list[tuple[float, int]] = []
    for request in requests:
        _run_until(replicas, ends, request.arrived_s)
        able = [number for number, replica in enumerate(replicas) if request.num_blocks <= replica.total_blocks]
        index = able[route([replicas[number] for number in able], request, workload.output_tokens, draw)]
        was_idle = replicas[index].step_ends_s is None
        replicas[index].submit(request, request.arrived_s)
        if was_idle:
            _push(replicas, ends, index)
    _run_until(replicas, ends, float("inf"))
    return _result(replicas, requests)


def capacity_per_s(replica: SimulatedReplica, workload: Workload) -> float:
    """Requests per second that a replica finishes while all its slots are in use."""
    speed = replica.speed
    token_s = speed.token_s + speed.fixed_s / replica.max_num_seqs
    return 1.0 / (workload.prompt_tokens * speed.token_s + workload.output_tokens * token_s)


def _requests(replicas: Sequence[SimulatedReplica], workload: Workload, draw: random.Random) -> list[SimulatedRequest]:
    rate = workload.load * sum(capacity_per_s(replica, workload) for replica in replicas)
    now_s, requests = 0.0, []
    for _ in range(workload.num_requests):
        now_s += draw.expovariate(rate)
        prompt, output = (1 + int(draw.expovariate(1.0 / mean)) for mean in (workload.prompt_tokens, workload.output_tokens))
        requests.append(SimulatedRequest(now_s, min(prompt, 16 * workload.prompt_tokens), output))
    return requests


def _run_until(replicas: Sequence[SimulatedReplica], ends: list[tuple[float, int]], until_s: float) -> None:
    while ends and ends[0][0] <= until_s:
        _, index = heapq.heappop(ends)
        replicas[index].end_step()
        _push(replicas, ends, index)


def _push(replicas: Sequence[SimulatedReplica], ends: list[tuple[float, int]], index: int) -> None:
    if (ends_s := replicas[index].step_ends_s) is not None:
        heapq.heappush(ends, (ends_s, index))


def _result(replicas: Sequence[SimulatedReplica], requests: Sequence[SimulatedRequest]) -> RoutingResult:
    ttfts = sorted(each.first_s - each.arrived_s for each in requests)
    e2es = sorted(each.done_s - each.arrived_s for each in requests)
    last = int(0.99 * (len(requests) - 1))
    return RoutingResult(
        tuple(replica.num_served / len(requests) for replica in replicas),
        sum(ttfts) / len(ttfts),
        ttfts[last],
        sum(e2es) / len(e2es),
        e2es[last],
    )
