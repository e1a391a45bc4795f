"""Keeps the replicas of one model as this gateway sees them.

docs/failover.md says what becomes of the streams of one that hangs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from types import TracebackType
from typing import NamedTuple

from headrace.core.clock import Clock
from headrace.core.errors import Unavailable
from headrace.core.model_info import ModelInfo, Numerics, may_resume, numerics_digest, why_not_resume
from headrace.core.request import EngineRequest, PriorityClass
from headrace.core.tasks import RunningTasks, end_tasks
from headrace.gateway.upstream.model_config import PoolRules
from headrace.gateway.upstream.own.holding import HOLD_S, HeldRequests
from headrace.gateway.upstream.own.moves import QueueMoves
from headrace.gateway.upstream.own.replica_health import EJECTED, Replica, ReplicaAttempt, ReplicaInstance, stalled_s
from headrace.gateway.upstream.seam import Hold, ReplicaHealth
from headrace.policy.admission import BUSY_DEPTH, AdmissionOutcome, QueueState, UnsentRequest, UnsentRequests, decide, queue_state
from headrace.policy.config import AdmissionRules
from headrace.policy.holding import HeldTerms, HeldTotals
from headrace.policy.queues import traits_of
from headrace.policy.queues.queue import QueueTraits
from headrace.policy.routing.choice import (
    ONLY,
    UNMEASURED_DIVISOR,
    Candidate,
    Decision,
    Random,
    ReplicaChoice,
    ReplicaId,
    WeightedDraw,
    draw_weights,
    home_of,
    seed_of,
    started,
    started_share,
    two_of,
)
from headrace.policy.routing.failures import RetryBudget, ejected
from headrace.policy.routing.predicted_time import RequestSize, SentSince, mean_output_tokens
from headrace.policy.routing.prefix_index import PrefixIndex, prompt_chunks
from headrace.policy.routing.replicas import DEFAULT_POLICY, POLICIES, choose, compare, some_holders
from headrace.wire.client import ConnectionState
from headrace.wire.stream import ReplicaStream

log = logging.getLogger(__name__)

RESUME_BURST = 100.0
RESUME_SHARE = 0.2
"""Budget of a model's resumes that follow one without a new token: RESUME_BURST, and RESUME_SHARE more with each request."""


UNAVAILABLE_RETRY_S = 10.0
"""Seconds after which a client may try a model again that has no replica at all."""

RETIRED = "retired"

CLOSE_CHECK_S = 0.05

UNKNOWN_PROMPT_TOKENS = 128


TICK_S = 0.1

MOVE_AFTER_S = 2.0

WANTED_S = 30.0

STARVED_S = 2.0
"""No held request found room for this long: other gateways fill the queue. Each look then releases one that admission would take."""

RETRY_S = 0.5
"""A replica that is ready and takes no call may be full."""

FEW = 16
"""Among at most this many replicas each decision looks at all. Among more it looks at those that are drawn, by what was known of all
GLANCE_S ago at most, and at all only where a drawn one does not take the request.
"""

GLANCE_S = 0.25

NUM_SHORTEST = 4
"""Among many replicas, this number with the shortest queues is looked at for GLANCE_S."""


DEFAULT_ADMISSION = AdmissionRules()


class Glance(NamedTuple):
    """What was seen of many replicas at one moment.

    mean      of a finished request
    draw      of the ready ones; None: there are fewer than two
    seeds     of the ready ones, as `seed_of` makes them
    shortest  by the lowest class that is served before a request, those with the shortest queues; filled as it is asked for
    """

    at: float
    mean: RequestSize
    ready: Sequence[Replica]
    draw: WeightedDraw[Replica] | None
    seeds: Sequence[int]
    shortest: dict[PriorityClass, Sequence[Replica]]


class ReplicaPool:
    """unavailable    why there is no replica, in words that clients may read; empty if there are some, or `starts_on_demand`
    closed_until  seconds on `clock`: without a replica, no request starts one before then
    num_wanted  the supervisor that wrote the configuration starts them, and drops one that cannot start; None: they run elsewhere
    failover_s, routing, admission  as in `PoolRules`
    """

    def __init__(
        self,
        model: str,
        replicas: Sequence[Replica],
        *,
        random: Random,
        clock: Clock = time.monotonic,
        failover_s: float = 0.0,
        routing: str = DEFAULT_POLICY,
        admission: AdmissionRules = DEFAULT_ADMISSION,
        slow_start_s: float = 0.0,
        on_closed: Callable[[ReplicaId], None] = lambda _: None,
        totals: HeldTotals | None = None,
    ) -> None:
        self.model = model
        self.replicas = tuple(replicas)
        self.retired: tuple[Replica, ...] = ()
        self.unavailable, self.starts_on_demand = "", False
        self.closed_until = clock()
        self.num_wanted: int | None = None
        self._is_leaving = False
        self._held = HeldRequests(totals or HeldTotals(), clock)
        self._wanted_until = self._had_room_at = clock()
        self._connected_before: frozenset[Replica] = frozenset()
        self.failover_s, self.routing, self.admission = failover_s, routing, admission
        self.resume_budget = RetryBudget(share=RESUME_SHARE, burst=RESUME_BURST)
        self.clock = clock
        self._moves = QueueMoves()
        self._change: asyncio.Future[None] | None = None
        self._last_ready: frozenset[tuple[str, str, str]] = frozenset()
        self._woken_at = clock()
        self._watching: asyncio.Task[None] | None = None
        self._random = random
        self._slow_start_s = slow_start_s
        self._on_closed = on_closed
        self._closing = RunningTasks()
        self._last_models: Sequence[ModelInfo] = ()
        self._index = PrefixIndex[Replica]()
        self._num_decisions = 0
        self._glance: Glance | None = None

    async def __aenter__(self) -> ReplicaPool:
        for replica in self.replicas:
            replica.connection.start()
        self._start_watch()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await end_tasks([*self._closing, *([] if self._watching is None else [self._watching])])
        for replica in (*self.replicas, *self.retired):
            await replica.connection.close()

    def follow(self, rules: PoolRules) -> None:
        if rules.routing != self.routing:
            self._index = PrefixIndex()
        self.failover_s, self.routing, self.admission = rules
        self._start_watch()

    def _start_watch(self) -> None:
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch(), name="replica watch")

    def leave(self) -> None:
        """Its requests wait for no other replica than one that takes them now."""
        self._is_leaving = True
        self._release()

    def change(self, *, add: Collection[Replica] = (), retire: Collection[Replica] = ()) -> None:
        assert set(retire) <= set(self.replicas), "a replica is retired once"
        self.replicas = (*(replica for replica in self.replicas if replica not in retire), *add)
        self.retired = (*self.retired, *retire)
        for replica in add:
            replica.connection.start()
        for replica in retire:
            self._closing.start(self._close_unused(replica), f"retired {replica.name}")
            self._index.forget(replica)
        self._glance = None

    async def _close_unused(self, replica: Replica) -> None:
        """If its engine ends before its last request, its requests move to other replicas."""
        while replica.connection.num_open:
            await asyncio.sleep(CLOSE_CHECK_S)
        await replica.connection.close()
        self.retired = tuple(other for other in self.retired if other is not replica)
        self._on_closed(replica.name)

    def check(self) -> None:
        assert len(set(self.replicas)) == len(self.replicas)
        assert len({replica.name for replica in self.replicas}) == len(self.replicas), "two replicas with one name"
        assert not set(self.replicas) & set(self.retired)
        assert len(self._closing) >= len(self.retired)
        self._index.check()
        self._held.check()

    @property
    def info(self) -> ModelInfo | None:
        """From the replica with the largest `max_model_len`; without a connection, the last known facts."""
        return max(self._models(), key=lambda model: model.max_model_len, default=None)

    @property
    def version(self) -> str:
        """Answers are kept under it; while replicas differ, as in a rollout, none of them has it alone."""
        distinct: list[ModelInfo] = []
        for model in self._models():
            if not any((model.digests, model.numerics) == (other.digests, other.numerics) for other in distinct):
                distinct.append(model)
        return "+".join(sorted(model.version for model in distinct))

    def _first_facts(self) -> ModelInfo | None:
        """Block size and queue policy are the same at all."""
        return next((info.model for replica in self.replicas if (info := replica.connection.info) is not None), None)

    def _models(self) -> Sequence[ModelInfo]:
        models = [info.model for replica in self.replicas if (info := replica.connection.info) is not None]
        self._last_models = models or self._last_models
        return self._last_models

    def adapter_names(self) -> set[str]:
        return {name for model in self._models() for name in model.adapters}

    def adapter_digest(self, name: str) -> str | None:
        """The one that most replicas have, of those that are ready if any has it: they differ during a reload."""
        ready = [replica.adapters for replica in self.ready()]
        for announced in (ready, [model.adapters for model in self._models()]):
            counts = Counter(adapters[name] for adapters in announced if name in adapters)
            if counts:
                return max(counts, key=lambda digest: (counts[digest], digest))
        return None

    # -- requests that wait for a replica ------------------------------------------------------------------------------------------

    @property
    def num_held(self) -> int:
        """Also 1 for WANTED_S after a request that did not wait came to a model that sleeps."""
        return len(self._held) or int(self._can_wake and self.clock() < self._wanted_until)

    def note_wanted(self) -> None:
        if self._can_wake:
            self._wanted_until = self.clock() + WANTED_S

    @property
    def _can_wake(self) -> bool:
        return self.is_awaited or (not self._is_open and any(replica.is_asleep for replica in self.replicas))

    def hold(self, terms: Callable[[], HeldTerms], unsent: UnsentRequest | None) -> Hold | None:
        """None: the request need not wait, or no replica would come. Raises Unavailable at a bound."""
        is_open = self._is_open
        limit_s = HOLD_S if is_open else self._hold_s
        if not limit_s or (is_open and not self._held):
            return None
        hold = self._held.add(terms(), unsent, limit_s)
        self._release()
        return hold

    def hold_again(self, terms: HeldTerms, unsent: UnsentRequest | None) -> Hold | None:
        """For a request that no replica took. None: an open one does not fit it, or none would come. Raises as `hold`."""
        return None if self._is_open else self.hold(lambda: terms, unsent)

    @property
    def _is_open(self) -> bool:
        return any(replica.connection.state is ConnectionState.CONNECTED and not replica.is_asleep for replica in self.replicas)

    @property
    def is_awaited(self) -> bool:
        """There is no replica, and one starts or is started for a request."""
        return self.starts_on_demand and not (self.replicas or self.unavailable)

    @property
    def is_closed(self) -> bool:
        return not self.replicas and self.clock() < self.closed_until

    @property
    def is_asleep(self) -> bool:
        return self.is_awaited and not self.num_wanted

    @property
    def _hold_s(self) -> float:
        """The longest wait for a replica; 0: none would come."""
        if self._is_leaving:
            return 0.0
        if not self.replicas:
            return HOLD_S if self.is_awaited and not self.is_closed else 0.0
        may_come = self._has_new or any(replica.is_asleep for replica in self.replicas)
        return HOLD_S if may_come else self.failover_s

    @property
    def _has_new(self) -> bool:
        """A replica that was never connected."""
        return not self._ever_connected().issuperset(self.replicas)

    def _ever_connected(self) -> frozenset[Replica]:
        connected = frozenset([replica for replica in self.replicas if replica.connection.info is not None])
        return connected | self._connected_before.intersection(self.replicas)

    def _release(self) -> None:
        now, is_open = self.clock(), self._is_open
        if not is_open and not self._hold_s:
            self._held.refuse(self.why_unavailable)
        elif not is_open or self._held.release(self._has_room):
            self._had_room_at = now
        elif now - self._had_room_at >= STARVED_S:
            self._held.release(self._may_join, at_most=1)

    def _has_room(self, num_unsent: int) -> bool:
        queue = self._queue(PriorityClass.BATCH, num_unsent)
        return queue is not None and queue.depth < BUSY_DEPTH

    def _may_join(self, num_unsent: int) -> bool:
        queue = self._queue(PriorityClass.BATCH, num_unsent)
        return queue is not None and decide(queue, rules=self.admission).outcome is not AdmissionOutcome.REFUSED

    def chunks(self, request: EngineRequest) -> Sequence[int]:
        """The prompt's, for `pick` and `note_sent`; empty where no choice depends on them."""
        if len(self.replicas) < 2 or not POLICIES[self.routing].has_index:
            return ()
        return prompt_chunks(request.prompt_ids, salt=request.salt, adapter_digest=request.adapter_digest)

    def pick(
        self,
        request: EngineRequest,
        *,
        num_output: int = 0,
        tried: Collection[ReplicaInstance] = (),
        numerics: Numerics | None = None,
        session: str = "",
        chunks: Sequence[int] = (),
    ) -> tuple[Replica, ReplicaChoice]:
        """The replica for a request, and why it is that one. Raises Unavailable when no connected replica is left that fits the request,
        has its adapter, and was not tried.

        num_output         tokens of its output that there are
        numerics           for a resume, numerics of the replica that computed the output ids; only a replica of equal numerics is chosen

        A silent replica is never chosen; one that is not ready, or that failed several requests in a row, only when no other is left.
        """
        max_output_tokens = None if request.params.max_tokens is None else request.params.max_tokens - num_output
        prompt_tokens = len(request.prompt_ids) + num_output
        num_tokens = prompt_tokens + (max_output_tokens or 1)

        def fits(replica: Replica) -> bool:
            if replica.instance in tried or replica.max_model_len < num_tokens:
                return False
            is_equal = numerics is None or not why_not_resume(numerics, replica.numerics)
            return is_equal and replica.has_adapter(request.adapter, request.adapter_digest)

        self._num_decisions += 1
        decision = Decision(
            self._size(prompt_tokens, max_output_tokens),
            self._block_size,
            self._random,
            session,
            self._num_decisions,
            is_blind=self._random.randrange(UNMEASURED_DIVISOR) == 0,
        )
        if POLICIES[self.routing].draws and (drawn := self._drawn_of_many(fits, decision, chunks)):
            chosen = compare(self.routing, [self._candidate(replica, request, chunks) for replica in drawn], decision)
            return next(replica for replica in drawn if replica.name == chosen.replica_id), chosen
        return self._choose([replica for replica in self.replicas if fits(replica)], decision, request, chunks)

    def queue(self, priority: PriorityClass, unsent: UnsentRequests) -> QueueState | None:
        """The shortest queue ahead of a request of this class at a ready replica; None: no connected replica has reported its load.

        Where no replica is ready, the queues of the connected ones count: otherwise requests would join without a bound.
        """
        lowest = self._traits.lowest_before(priority)
        return self._queue(lowest, unsent.num_requests(lowest) + self._held.num_requests(lowest))

    @property
    def _block_size(self) -> int:
        facts = self._first_facts()
        return facts.block_size if facts else 16

    @property
    def _traits(self) -> QueueTraits:
        facts = self._first_facts()
        return traits_of(facts.queue_policy if facts else "")

    def _queue(self, lowest: PriorityClass, num_joining: int) -> QueueState | None:
        """num_joining: requests that come before, at any replica"""
        size, glance, now, traits = self._mean_size(), self._glance_at_many(), self.clock(), self._traits
        block_size = self._block_size
        shortest = () if glance is None else glance.shortest.get(lowest, ())
        replicas = [replica for replica in shortest if not replica.verdict(now)] or self.ready() or self.replicas
        joined = _joined(num_joining, len((glance and glance.ready) or replicas), size)
        queues = []
        for replica in replicas:
            _, load, sent, *_ = replica.candidate(lowest)
            if load is not None:
                state = queue_state(load, sent.plus(joined), size, lowest=lowest, block_size=block_size)
                queues.append((state, load.max_num_seqs if traits.has_tenants else 0, replica))
        queues.sort(key=lambda queue: (queue[0].wait_s, queue[0].depth))
        if glance is not None and len(replicas) > NUM_SHORTEST:
            glance.shortest[lowest] = [replica for _, _, replica in queues[:NUM_SHORTEST]]
        # Among many one more makes no difference.
        is_growing = self.num_wanted is not None and len(self.replicas) <= FEW and self._has_new
        return replace(queues[0][0], num_slots=queues[0][1], is_growing=is_growing) if queues else None

    def note_sent(self, replica: Replica, chunks: Sequence[int] = ()) -> ReplicaAttempt:
        """The caller must report the outcome to the result. chunks: of the prompt that was sent"""
        info = replica.connection.info
        if replica not in self._connected_before:
            self._connected_before |= {replica}
        if info is not None and chunks:
            kv_tokens = min(info.model.num_blocks) * info.model.block_size
            self._index.add(replica, info.instance_id, chunks, kv_tokens=kv_tokens)
        return replica.circuit.send(None if info is None else (info.instance_id, info.connected_at), self.clock)

    def _ejected(self, ready: Sequence[Replica]) -> frozenset[ReplicaId]:
        return ejected({replica.name: replica.circuit.breaker for replica in ready}, self.clock())

    def _started(self, fit: Sequence[Replica]) -> list[Replica]:
        now, infos = self.clock(), [replica.connection.info for replica in fit]
        connected_s = [0.0 if info is None else now - info.connected_at for info in infos]
        return started(fit, [started_share(seconds, self._slow_start_s) for seconds in connected_s], self._random)

    def why_unavailable(self) -> Unavailable:
        if self.is_closed:
            reason = f"The model {self.model} cannot be served now. The hours of its replicas are used up until midnight UTC."
            return Unavailable(reason, retry_after_s=self.closed_until - self.clock())
        if self.unavailable and not self.replicas:
            return Unavailable(f"The model {self.model} cannot be served now. {self.unavailable}", retry_after_s=UNAVAILABLE_RETRY_S)
        return Unavailable(f"No replica of {self.model} takes requests now.", retry_after_s=1.0)

    def _drawn_of_many(self, fits: Callable[[Replica], bool], decision: Decision, chunks: Sequence[int]) -> list[Replica]:
        """Two of more than FEW, and holders of the prompt's beginning. Empty where it takes a look at all to choose."""
        glance, now = self._glance_at_many(), self.clock()
        if glance is None or glance.draw is None:
            return []

        def is_usual(replica: Replica) -> bool:
            info = replica.connection.info
            is_started = info is not None and now - info.connected_at >= self._slow_start_s
            return is_started and replica.circuit.breaker.can_send(now) and not replica.verdict(now) and fits(replica)

        drawn = two_of(glance.ready, self._random) if decision.is_blind else glance.draw.two(self._random)
        if not all(map(is_usual, drawn)):
            return []
        longest, first_new = self._index.find(chunks)
        homes = () if first_new is None else [glance.ready[home_of(first_new, glance.seeds)]]
        holders = some_holders(longest, self._random)
        return list(dict.fromkeys([*filter(is_usual, homes), *drawn, *filter(is_usual, holders)]))

    def _glance_at_many(self) -> Glance | None:
        if len(self.replicas) <= FEW:
            return None
        now = self.clock()
        if self._glance is None or now - self._glance.at >= GLANCE_S:
            mean, ready = self._counted_mean(), self.ready()
            weights = draw_weights([replica.candidate().snapshot for replica in ready], mean)
            draw = WeightedDraw(ready, weights) if len(ready) > 1 else None
            self._glance = Glance(now, mean, ready, draw, [seed_of(replica.name) for replica in ready], {})
        return self._glance

    def _choose(
        self, left: Sequence[Replica], decision: Decision, request: EngineRequest, chunks: Sequence[int]
    ) -> tuple[Replica, ReplicaChoice]:
        ready = self.ready()
        left_out = self._ejected(ready)
        first = [replica for replica in ready if replica in left and replica.name not in left_out]
        fit = first or [replica for replica in left if replica.connection.state is ConnectionState.CONNECTED and not replica.is_asleep]
        if not fit:
            raise self.why_unavailable()
        if len(fit) == 1:
            return fit[0], ReplicaChoice(fit[0].name, ONLY)
        candidates = [self._candidate(replica, request, chunks) for replica in self._started(fit)]
        longest, first_new = self._index.find(chunks)
        chosen = choose(self.routing, candidates, decision, longest=[replica.name for replica in longest], first_new=first_new)
        assert chosen is not None, "one of the largest share always takes part"
        return next(replica for replica in fit if replica.name == chosen.replica_id), chosen

    def _candidate(self, replica: Replica, request: EngineRequest, chunks: Sequence[int]) -> Candidate:
        cached_tokens = self._index.tokens(replica, replica.instance[1], chunks) if chunks else 0
        return replica.candidate(cached_tokens=cached_tokens, adapter=request.adapter)

    def _size(self, prompt_tokens: int, max_output_tokens: int | None) -> RequestSize:
        mean = self._mean_size().output_tokens
        return RequestSize(prompt_tokens, mean if max_output_tokens is None else max(1, min(mean, max_output_tokens)))

    def _mean_size(self) -> RequestSize:
        glance = self._glance_at_many()
        return self._counted_mean() if glance is None else glance.mean

    def _counted_mean(self) -> RequestSize:
        counted = [seen.load.counters for replica in self.replicas if (seen := replica.connection.snapshot) is not None]
        num_finished = sum([sum(counters.finished.values()) for counters in counted])
        prompt_tokens = sum([counters.prompt_tokens for counters in counted]) // num_finished if num_finished else UNKNOWN_PROMPT_TOKENS
        return RequestSize(prompt_tokens, mean_output_tokens(num_finished, sum([counters.generation_tokens for counters in counted])))

    def why_not_resume(self, numerics: Numerics | None, adapter: str | None = None, adapter_digest: str = "") -> str:
        """Per connected replica; empty: one may. None: nothing was computed yet."""
        connected = [replica for replica in self.replicas if replica.connection.state is ConnectionState.CONNECTED]
        reasons = {replica.name: "" if numerics is None else why_not_resume(numerics, replica.numerics) for replica in connected}
        lacking = [replica.name for replica in connected if not replica.has_adapter(adapter, adapter_digest)]
        reasons |= dict.fromkeys(lacking, f"the adapter {adapter} has other files there, or is not loaded")
        if "" in reasons.values():
            return ""
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "no other replica is connected"

    def ready(self) -> list[Replica]:
        now = self.clock()
        return [replica for replica in self.replicas if not replica.verdict(now)]

    def health(self) -> list[ReplicaHealth]:
        now, left_out = self.clock(), self._ejected(self.ready())
        return [replica.health(EJECTED if replica.name in left_out else replica.verdict(now), now) for replica in self.replicas]

    def retired_health(self) -> list[ReplicaHealth]:
        now = self.clock()
        return [replica.health(RETIRED, now) for replica in self.retired]

    # -- the watch over its replicas -----------------------------------------------------------------------------------------------

    async def wait_for_change(self) -> None:
        """Or until RETRY_S have passed and a replica is ready."""
        if self._change is None:
            self._change = asyncio.get_running_loop().create_future()
            self._woken_at = self.clock()
            self._last_ready = self._ready_instances()
        await asyncio.shield(self._change)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                every = (*self.replicas, *self.retired) if self.failover_s else ()
                for replica in every:
                    self._look_at(replica)
                if every:
                    self._moves.look(self.ready(), every, self._mean_size(), self._block_size, self.clock())
                self._connected_before = self._ever_connected()
                if self._held:
                    self._release()
                if self._change is not None:
                    self._wake()
            except Exception:  # the outermost loop: without it a bug of ours would leave every later stall unnoticed
                log.exception("looking at the replicas failed")

    def _look_at(self, replica: Replica) -> None:
        """Move requests off a replica that hangs (any), or does not read (those that it has not counted)."""
        connection, name = replica.connection, replica.instance[0]
        is_hanging = stalled_s(connection.state, connection.snapshot, connection.silent_s, self.clock()) >= MOVE_AFTER_S
        if not connection.num_open or not (is_hanging or connection.unread_s >= MOVE_AFTER_S):
            return
        reason = f"replica {name} {'hangs' if is_hanging else 'does not read what is sent'}"
        others = [other for other in self.ready() if other is not replica]
        digest = numerics_digest(replica.numerics)
        equal = [other for other in others if may_resume(digest, numerics_digest(other.numerics))]
        unseen = connection.unseen_handles

        def may_move(stream: ReplicaStream) -> bool:
            able = others if stream.is_unbegun else equal
            return (is_hanging or stream.handle in unseen) and any(each.can_take(stream) for each in able)

        if num_moved := connection.abandon(lambda: Unavailable(reason), may_move):
            log.warning("%s: %d of its requests move to another one", reason, num_moved)

    def _wake(self) -> None:
        assert self._change is not None
        ready, now = self._ready_instances(), self.clock()
        if ready - self._last_ready or (ready and now - self._woken_at >= RETRY_S):
            self._change.set_result(None)
            self._change = None
        self._last_ready = ready

    def _ready_instances(self) -> frozenset[tuple[str, str, str]]:
        return frozenset((*replica.instance, numerics_digest(replica.numerics)) for replica in self.ready())


def _joined(num_requests: int, num_replicas: int, mean: RequestSize) -> SentSince:
    num_each = -(-num_requests // max(1, num_replicas))
    return SentSince(num_each, num_each * mean.prompt_tokens)
