"""Simulates replicas of one model behind gateways, on virtual time: admission, the choice of a replica, deaths and their failover.

A step is computed when it begins, and its result is known when it ends.
"""

from __future__ import annotations

import heapq
import itertools
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from headrace.core.errors import ConfigError, Overloaded
from headrace.core.ids import RequestId
from headrace.core.load import LoadSnapshot
from headrace.core.request import EngineRequest, PriorityClass
from headrace.core.sampling import SamplingParams
from headrace.core.update import FinishReason, Rejected
from headrace.lab.metrics import LoadRecord
from headrace.lab.simulate.build import SimulatedModel, SimulatedReplica, Update
from headrace.lab.simulate.load import Arrival
from headrace.lab.simulate.scaling import TICK_S, Counts, Scaling, ScalingChange, scaling_facts
from headrace.policy.admission import AdmissionOutcome, OverloadWatch, QueueState, decide, queue_state
from headrace.policy.config import AdmissionRules
from headrace.policy.routing.choice import UNMEASURED_DIVISOR, Candidate, Decision, ReplicaId
from headrace.policy.routing.moves import MOVES_EVERY_S, moving
from headrace.policy.routing.predicted_time import NOTHING_SENT, RequestSize, SentSince, mean_output_tokens
from headrace.policy.routing.prefix_index import PrefixIndex, prompt_chunks
from headrace.policy.routing.replicas import DEFAULT_POLICY, POLICIES, choose
from headrace.policy.scaling.autoscaler import ScalingFacts

MAX_REQUESTS = 1_000_000
MAX_OUTPUT_TOKENS = 50_000_000
"""Records of the requests and tokens take about 2 GB."""

MAX_BLOCKS = 1 << 25
"""Tables of all replicas together take about 50 bytes for each block."""


@dataclass(frozen=True, slots=True)
class Death:
    """has_standby: another replica is back in its place"""

    at: float
    replica: int
    back_s: float
    has_standby: bool = False


@dataclass(slots=True, eq=False)
class _Open:
    """gateway: that it came to; attempt: number of times it was sent"""

    number: int
    arrival: Arrival
    gateway: int
    times: array[float] = field(default_factory=lambda: array("d"))
    cached_tokens: int = 0
    attempt: int = 0


@dataclass(slots=True)
class _Place:
    """
    replica     None while it loads or is down
    generation  number of losses
    sent        since its last report, by each gateway
    left_by     its report when waiting requests last moved away
    """

    number: int
    model: SimulatedModel
    replica: SimulatedReplica | None
    sent: list[SentSince]
    is_busy: bool = False
    generation: int = 0
    open: dict[RequestId, _Open] = field(default_factory=dict)
    is_leaving: bool = False
    is_given_back: bool = False
    left_by: LoadSnapshot | None = None

    def candidate(self, gateway: int) -> Candidate:
        return Candidate(ReplicaId(str(self.number)), None if self.replica is None else self.replica.report, self.sent[gateway])

    def waiting(self, gateway: int) -> list[RequestId]:
        """As far as the gateway knows: the last ones that it sent and that have no token."""
        if self.replica is None or self.replica.report is self.left_by:
            return []
        num_waiting = self.replica.report.num_waiting + self.sent[gateway].num_requests
        unbegun = [name for name, request in self.open.items() if request.gateway == gateway and not request.times]
        return unbegun[-num_waiting:] if num_waiting else []


class SimulatedSite:
    def __init__(
        self,
        models: Sequence[SimulatedModel],
        *,
        rules: AdmissionRules | None = None,
        gateway_s: float = 0.0,
        failover_s: float = 60.0,
        routing: str = DEFAULT_POLICY,
        num_gateways: int = 1,
        scaling: Scaling | None = None,
        seed: int = 0,
    ) -> None:
        """gateway_s    from a request to its engine plus from a token to its client
        num_gateways  each gets its part of the requests at random, and knows only what it sent itself
        scaling       adds replicas of the first model, and takes them away; None: they stay

        Raises ConfigError for more than MAX_BLOCKS blocks.
        """
        if (num_blocks := sum(model.num_blocks for model in models)) > MAX_BLOCKS:
            reason = f"{num_blocks:,} blocks in {len(models)} replicas are more than one simulation keeps ({MAX_BLOCKS:,})"
            raise ConfigError("num_kv_blocks", reason, "Give fewer, a larger block_size, or fewer replicas.")
        self._num_gateways = num_gateways
        self._places = [_Place(number, model, model.replica(0.0), self._nothing_sent()) for number, model in enumerate(models)]
        self._routing = routing
        self._indexes = [PrefixIndex[ReplicaId]() for _ in range(num_gateways)]
        self._num_decisions = 0
        self._rules = rules or AdmissionRules()
        self._gateway_s = gateway_s
        self._failover_s = failover_s
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._records: list[LoadRecord] = []
        self._overload = OverloadWatch()
        self._num_tokens = self._num_arrived = self._num_prompt_tokens = 0
        self._waiting: list[_Open] = []
        self._scaling = scaling
        self._num_ended, self._num_output, self._is_arriving = 0, 0, True
        self._used: list[tuple[float, int]] = [(0.0, len(models))]
        self._reported: ScalingFacts | None = None
        self.changes: list[ScalingChange] = []

    @property
    def replicas(self) -> list[SimulatedReplica]:
        return [place.replica for place in self._places if place.replica is not None]

    def run(self, arrivals: Iterable[Arrival], deaths: Sequence[Death] = ()) -> list[LoadRecord]:
        """Arrivals must be in the order of their times. Raises ConfigError for more than MAX_REQUESTS."""
        if self._scaling is not None:
            self._at(0.0, self._scale)
        for death in deaths:
            self._at(death.at, lambda now, death=death: self._die(death, now))  # type: ignore[misc]
        self._arrive_next(iter(arrivals), 0)
        while self._events:
            at, _, event = heapq.heappop(self._events)
            event(at)
        for replica in self.replicas:
            replica.engine.scheduler.check()
        return self._records

    def _nothing_sent(self) -> list[SentSince]:
        return [NOTHING_SENT] * self._num_gateways

    def _at(self, at: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), event))

    # -- the gateway -------------------------------------------------------------------------------------------------------------

    def _arrive_next(self, arrivals: Iterator[Arrival], number: int) -> None:
        arrival = next(arrivals, None)
        if arrival is None:
            self._is_arriving = False
            return
        if number >= MAX_REQUESTS or self._num_tokens + arrival.output_tokens > MAX_OUTPUT_TOKENS:
            limit = f"{MAX_REQUESTS:,} requests and {MAX_OUTPUT_TOKENS:,} output tokens"
            raise ConfigError("load", f"one simulation takes at most {limit}", "Simulate a shorter time, or a part of the trace.")
        self._num_tokens += arrival.output_tokens
        self._num_arrived += 1
        self._num_prompt_tokens += len(arrival.prompt_ids)

        def arrive(now: float) -> None:
            self._admit(_Open(number, arrival, self._random.randrange(self._num_gateways)), now)
            self._arrive_next(arrivals, number + 1)

        self._at(arrival.at, arrive)

    def _admit(self, request: _Open, now: float) -> None:
        queue, num_open = self._queue(request.gateway), len(self._waiting) + sum(len(place.open) for place in self._places) + 1
        if queue is not None:
            queue = self._overload.arrive(queue, self._rules, num_open=num_open, now=now)
        verdict = decide(queue, rules=self._rules)
        waits_for_scaling = self._scaling is not None and queue is not None and queue.wait_s <= self._scaling.hold_s
        if verdict.outcome is AdmissionOutcome.REFUSED and queue is not None and not waits_for_scaling:
            self._overload.refuse(queue, self._rules, now=now)
            self._end(request, now, status=429, error="refused", retry_after_s=verdict.retry_after_s)
        else:
            self._send(request, now)

    def _queue(self, gateway: int) -> QueueState | None:
        size = RequestSize(self._num_prompt_tokens // max(1, self._num_arrived), self._expected_output_tokens())
        states = [
            queue_state(place.replica.report, place.sent[gateway], size, lowest=PriorityClass.STANDARD, block_size=self._block_size)
            for place in self._serving()
            if place.replica is not None
        ]
        return min(states, key=lambda state: (state.wait_s, state.depth), default=None)

    @property
    def _block_size(self) -> int:
        return next((replica.engine.info.block_size for replica in self.replicas), 16)

    def _expected_output_tokens(self) -> int:
        counters = [replica.report.counters for replica in self.replicas]
        return mean_output_tokens(sum(sum(each.finished.values()) for each in counters), sum(each.generation_tokens for each in counters))

    def _send(self, request: _Open, now: float) -> None:
        """Without a replica it waits."""
        running = {ReplicaId(str(place.number)): place for place in self._serving()}
        arrival, gateway, index = request.arrival, request.gateway, self._indexes[request.gateway]
        chunks = self._chunks(request)
        candidates = [
            place.candidate(gateway)._replace(cached_tokens=index.tokens(name, str(place.generation), chunks))
            for name, place in running.items()
        ]
        self._num_decisions += 1
        decision = Decision(
            RequestSize(len(arrival.prompt_ids), min(self._expected_output_tokens(), arrival.output_tokens)),
            self._block_size,
            self._random,
            arrival.session,
            self._num_decisions,
            is_blind=self._random.randrange(UNMEASURED_DIVISOR) == 0,
        )
        longest, first_new = index.find(chunks)
        chosen = choose(self._routing, candidates, decision, longest=longest, first_new=first_new)
        if chosen is None:
            self._waiting.append(request)
            self._at(now + (self._failover_s if self._scaling is None else self._scaling.hold_s), lambda at: self._give_up(request, at))
            return
        self._submit(running[chosen.replica_id], request, now, chunks)

    def _submit(self, place: _Place, request: _Open, now: float, chunks: Sequence[int]) -> None:
        arrival, gateway = request.arrival, request.gateway
        request.attempt += 1
        name = RequestId(f"{request.number}.{request.attempt}")
        place.open[name] = request
        place.sent[gateway] = place.sent[gateway].plus(SentSince(1, len(arrival.prompt_ids)))
        kv_tokens = place.model.num_blocks * place.model.config.block_size
        self._indexes[gateway].add(ReplicaId(str(place.number)), str(place.generation), chunks, kv_tokens=kv_tokens)
        assert place.replica is not None
        place.replica.submit(_engine_request(name, request), now + self._gateway_s / 2)
        if not place.is_busy:
            self._turn(place, now + self._gateway_s / 2)

    def _chunks(self, request: _Open) -> Sequence[int]:
        has_index = POLICIES[self._routing].has_index
        return prompt_chunks(request.arrival.prompt_ids, salt=b"", adapter_digest="") if has_index else ()

    def _move_waiting(self, gateway: int, new: _Place, generation: int, waited: Sequence[tuple[_Place, RequestId]], now: float) -> None:
        """waited: when `new` became ready, in the order of their places"""
        if new.replica is None or new.is_leaving or new.generation != generation:
            return
        still = {(place.number, name) for place in self._places for name in place.waiting(gateway)}
        waited = [(place, name) for place, name in waited if name in place.open and not place.open[name].times]
        left = [(place, name) for place, name in waited if (place.number, name) in still]
        if not waited:
            return
        size = RequestSize(self._num_prompt_tokens // max(1, self._num_arrived), self._expected_output_tokens())
        queues = {each.replica_id: each for each in (place.candidate(gateway) for place, _ in left)}
        names = [ReplicaId(str(place.number)) for place, _ in left]
        for moved in moving(names, queues, new.candidate(gateway), size, block_size=self._block_size):
            place, name = left[moved]
            assert place.replica is not None
            place.left_by = place.replica.report
            place.replica.engine.cancel(name)
            request = place.open.pop(name)
            self._submit(new, request, now, self._chunks(request))
            self._give_back_if_done(place, now)
        self._at(now + MOVES_EVERY_S, lambda at: self._move_waiting(gateway, new, generation, waited, at))

    # -- a replica ---------------------------------------------------------------------------------------------------------------

    def _turn(self, place: _Place, now: float) -> None:
        replica = place.replica
        assert replica is not None
        place.sent = self._nothing_sent()  # the load published as the step begins includes all requests sent so far
        updates = replica.turn(now)
        place.is_busy = updates is not None
        if updates is not None:
            self._at(replica.now, lambda at, generation=place.generation: self._end_step(place, generation, updates, at))  # type: ignore[misc]

    def _end_step(self, place: _Place, generation: int, updates: list[Update], now: float) -> None:
        if generation != place.generation or place.replica is None:
            return  # the replica died during the step
        seen_at = now + self._gateway_s / 2
        for update in updates:
            request = place.open.get(update.request_id)
            if request is None:
                continue
            if isinstance(update, Rejected):
                self._refuse(place, request, update, seen_at)
                continue
            self._num_output += len(update.token_ids)
            if len(update.token_ids) == 1:
                request.times.append(seen_at)
            else:
                request.times.extend([seen_at] * len(update.token_ids))
            if update.num_cached_tokens is not None:
                request.cached_tokens = update.num_cached_tokens
            if update.finish is not None:
                del place.open[update.request_id]
                is_whole = update.finish in (FinishReason.LENGTH, FinishReason.STOP)
                self._end(request, seen_at, status=200, error=None if is_whole else update.finish.value)
        self._turn(place, now)
        self._give_back_if_done(place, now)

    def _refuse(self, place: _Place, request: _Open, refused: Rejected, seen_at: float) -> None:
        del place.open[refused.request_id]
        is_busy = isinstance(refused.error, Overloaded)
        retry_after_s = refused.error.retry_after_s if isinstance(refused.error, Overloaded) else None
        status = 429 if is_busy else 400
        self._end(request, seen_at, status=status, error="refused", detail=str(refused.error), retry_after_s=retry_after_s)

    def _die(self, death: Death, now: float) -> None:
        place = self._places[death.replica]
        if place.replica is None:
            return
        place.replica, place.is_busy, place.sent = None, False, self._nothing_sent()
        place.generation += 1
        orphans, place.open = list(place.open.values()), {}
        self._at(now + death.back_s, lambda at: self._revive(place, at))
        for request in orphans:
            self._send(request, now)

    def _give_up(self, request: _Open, now: float) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
            self._end(request, now, status=503, error="unavailable", detail="no replica came")

    def _revive(self, place: _Place, now: float) -> None:
        if place.is_given_back:
            return
        place.replica = place.model.replica(now)
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self._send(request, now)
        for gateway in range(self._num_gateways):
            queues = [(other, other.waiting(gateway)) for other in self._places if other is not place]
            waited = sorted([(rank, other.number, name) for other, names in queues for rank, name in enumerate(names)])
            self._move_waiting(gateway, place, place.generation, [(self._places[number], name) for _, number, name in waited], now)

    # -- scaling -----------------------------------------------------------------------------------------------------------------

    def _serving(self) -> list[_Place]:
        return [place for place in self._places if place.replica is not None and not place.is_leaving]

    def _scale(self, now: float) -> None:
        scaling = self._scaling
        assert scaling is not None
        serving, queue = self._serving(), self._queue(0)
        reports = [place.replica.report for place in serving if place.replica is not None]
        counts = Counts(self._num_arrived, self._num_ended, self._num_output)
        facts = scaling_facts(reports, counts, num_held=len(self._waiting), wait_s=queue.wait_s if queue else 0.0)
        age_s = scaling.age_s(now)
        if not age_s or self._reported is None:
            self._reported = facts
        decision = scaling.policy.decide(replace(self._reported, age_s=age_s), now)
        if not self.changes or decision.num_replicas != self.changes[-1].num_replicas:
            self.changes.append(ScalingChange(now, decision.num_replicas, decision.reason))
        staying = [place for place in self._places if not place.is_leaving and not place.is_given_back]
        for _ in range(decision.num_replicas - len(staying)):
            self._add(scaling, now)
        for place in sorted(staying, key=lambda each: (each.replica is not None, len(each.open)))[: len(staying) - decision.num_replicas]:
            place.is_leaving = True
            self._give_back_if_done(place, now)
        if self._is_arriving or self._waiting or any(place.open for place in self._places):
            self._at(now + TICK_S, self._scale)

    def _add(self, scaling: Scaling, now: float) -> None:
        """One that was about to leave stays; else another one loads."""
        leaving = next((place for place in self._places if place.is_leaving and not place.is_given_back), None)
        if leaving is not None:
            leaving.is_leaving = False
            return
        place = _Place(len(self._places), self._places[0].model, None, self._nothing_sent())
        self._places.append(place)
        self._use(1, now)
        self._at(now + scaling.load_s, lambda at: self._revive(place, at))

    def _give_back_if_done(self, place: _Place, now: float) -> None:
        if place.is_leaving and not place.open and not place.is_given_back:
            place.replica, place.is_given_back = None, True
            place.generation += 1
            self._use(-1, now)

    def _use(self, more: int, now: float) -> None:
        self._used.append((now, self._used[-1][1] + more))

    def replica_s(self, since: float = 0.0) -> float:
        """Seconds of all replicas together, loading and draining included, from `since` to the end of the last request."""
        until = max((record.end_s for record in self._records), default=since)
        changes = [*self._used, (until, 0)]
        return sum(num * max(0.0, min(end, until) - max(begin, since)) for (begin, num), (end, _) in itertools.pairwise(changes))

    # -- records -----------------------------------------------------------------------------------------------------------------

    def _end(
        self, request: _Open, now: float, *, status: int, error: str | None, detail: str = "", retry_after_s: float | None = None
    ) -> None:
        arrival = request.arrival
        self._num_ended += status == 200
        self._records.append(
            LoadRecord(
                intended_s=arrival.at,
                sent_s=arrival.at,
                chunk_s=tuple(request.times),
                end_s=now,
                prompt_tokens=len(arrival.prompt_ids),
                cached_tokens=request.cached_tokens,
                output_tokens=len(request.times),
                status=status,
                error=error,
                detail=detail,
                retry_after_s=retry_after_s,
            )
        )


def _engine_request(name: RequestId, request: _Open) -> EngineRequest:
    arrival, num_known = request.arrival, len(request.times)
    return EngineRequest(
        request_id=name,
        prompt_ids=arrival.prompt_ids,
        output_ids=(0,) * num_known,
        params=SamplingParams(seed=0, max_tokens=arrival.output_tokens, ignore_eos=True),
    )
