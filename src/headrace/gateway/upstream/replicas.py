"""The replicas of one model as this gateway sees them: their connections, and the choice among them.

Replicas come and go while requests run. A retired one gets no new request; its connection stays until its last request has left, or its
engine has ended. Whether a replica is ready is judged in `replica_health`, which also moves calls off a replica that hangs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from types import TracebackType

from headrace.core.clock import Clock
from headrace.core.errors import Unavailable
from headrace.core.model_info import ModelInfo
from headrace.core.numerics import Numerics, why_not_resume
from headrace.core.request import PriorityClass
from headrace.gateway.upstream.replica_health import EJECTED, Replica, ReplicaAttempt, ReplicaInstance, ReplicaWatch
from headrace.gateway.upstream.seam import ReplicaHealth
from headrace.policy.admission.joining import JoiningRequests
from headrace.policy.admission.ladder import QueueState, queue_state, served_before
from headrace.policy.queues import traits_of
from headrace.policy.routing.choice import Candidate, Random, ReplicaId, choose
from headrace.policy.routing.ejection import ejected
from headrace.policy.routing.predicted_time import NOTHING_SENT, RequestSize, SentSince, mean_output_tokens
from headrace.policy.routing.retry_budget import RetryBudget
from headrace.policy.routing.slow_start import started, started_share
from headrace.wire.client import ConnectionState

RESUME_BURST = 100.0
RESUME_SHARE = 0.2
"""Budget of a model's resumes that follow one without a new token: RESUME_BURST, and RESUME_SHARE more with each request."""


UNAVAILABLE_RETRY_S = 10.0
"""Seconds after which a client may try a model again that has no replica at all: its engines cannot be started, or are being replaced."""

RETIRED = "retired"
"""Why a retired replica is not ready."""

CLOSE_CHECK_S = 0.05
"""Seconds between two looks whether the last request of a retired replica has left."""

UNKNOWN_PROMPT_TOKENS = 128
"""Length expected of a prompt before any of the model's replicas has finished a request."""


class ReplicaPool:
    """All replicas of one model. `async with` keeps the connections open.

    replicas       where new requests go
    retired        no longer replicas, and still connected
    unavailable    why there is no replica, in words that clients may read; empty where there are some
    failover_s     how long a call whose replica was lost may wait for another one; 0: it ends
    resume_budget  of resumes that follow one without a new token
    """

    def __init__(
        self,
        model: str,
        replicas: Sequence[Replica],
        *,
        random: Random,
        clock: Clock = time.monotonic,
        failover_s: float = 0.0,
        slow_start_s: float = 0.0,
        on_closed: Callable[[ReplicaId], None] = lambda _: None,
    ) -> None:
        """
        slow_start_s  how long the share of a replica grows that has just connected (`policy.routing.slow_start`)
        on_closed     called when the connection of a retired replica was closed
        """
        self.model = model
        self.replicas = tuple(replicas)
        self.retired: tuple[Replica, ...] = ()
        self.unavailable = ""
        self.failover_s = failover_s
        self.resume_budget = RetryBudget(share=RESUME_SHARE, burst=RESUME_BURST)
        self.clock = clock
        self.watch = ReplicaWatch(self, clock)
        self._random = random
        self._slow_start_s = slow_start_s
        self._on_closed = on_closed
        self._closing: set[asyncio.Task[None]] = set()
        self._last_info: ModelInfo | None = None

    async def __aenter__(self) -> ReplicaPool:
        for replica in self.replicas:
            replica.connection.start()
        if self.failover_s:
            self.watch.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.watch.close()
        closing = list(self._closing)
        for task in closing:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
        for replica in (*self.replicas, *self.retired):
            await replica.connection.close()

    def follow(self, *, failover_s: float, slow_start_s: float) -> None:
        """Other values for later losses and connections. A wait that has begun ends when it was to end."""
        self.failover_s, self._slow_start_s = failover_s, slow_start_s
        if failover_s:
            self.watch.start()

    def change(self, *, add: Collection[Replica] = (), retire: Collection[Replica] = ()) -> None:
        """Send requests to `add` as soon as they are connected, and none to `retire` from now on, which are among `replicas`."""
        assert set(retire) <= set(self.replicas), "a replica is retired once"
        self.replicas = (*(replica for replica in self.replicas if replica not in retire), *add)
        self.retired = (*self.retired, *retire)
        for replica in add:
            replica.connection.start()
        for replica in retire:
            task = asyncio.get_running_loop().create_task(self._close_unused(replica), name=f"retired {replica.name}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close_unused(self, replica: Replica) -> None:
        """Close a retired replica's connection once no request is left at it. An engine that ends fails its requests, which move on."""
        while replica.connection.num_open:
            await asyncio.sleep(CLOSE_CHECK_S)
        await replica.connection.close()
        self.retired = tuple(other for other in self.retired if other is not replica)
        self._on_closed(replica.name)

    def check(self) -> None:
        """Every replica is in use or retired, never both, and each retired one is being closed."""
        assert len(set(self.replicas)) == len(self.replicas)
        assert len({replica.name for replica in self.replicas}) == len(self.replicas), "two replicas with one name"
        assert not set(self.replicas) & set(self.retired)
        assert len(self._closing) >= len(self.retired)

    @property
    def info(self) -> ModelInfo | None:
        """Model facts from the replica with the largest `max_model_len`; with none connected, the last ones known.

        Replicas of one model may differ in `max_model_len`: it follows from the memory each has.
        """
        largest: ModelInfo | None = None
        for replica in self.replicas:
            info = replica.connection.info
            if info is not None and (largest is None or info.model.max_model_len > largest.max_model_len):
                largest = info.model
        self._last_info = largest or self._last_info
        return self._last_info

    @property
    def has_silent(self) -> bool:
        """Whether a replica is connected and does not answer or read now: it may in a moment."""
        silent = (ConnectionState.SILENT, ConnectionState.NOT_READING)
        return any(replica.connection.state in silent for replica in self.replicas)

    def pick(
        self,
        *,
        prompt_tokens: int,
        max_output_tokens: int | None = None,
        tried: Collection[ReplicaInstance] = (),
        numerics: Numerics | None = None,
        preferred: str = "",
    ) -> Replica:
        """The replica to send a request to. Raises Unavailable at once when none takes work that fits it and was not tried.

        max_output_tokens  of one sequence; None where what the context leaves will do
        numerics           a resume: of the replica that computed its output ids. Only a replica of equal numerics is chosen
        preferred          name of one whose prefix cache has the prompt's beginning; empty: none is known

        A silent replica is never chosen. One that is connected and not ready (its step hangs, its heartbeats go on), or that failed several
        requests in a row, is chosen only when no other is left.
        """
        num_tokens = prompt_tokens + (max_output_tokens or 1)
        size = RequestSize(prompt_tokens, self._expected_output_tokens(max_output_tokens))
        left = [replica for replica in self.replicas if replica.instance not in tried and replica.max_model_len >= num_tokens]
        if numerics is not None:
            left = [replica for replica in left if not why_not_resume(numerics, replica.numerics)]
        ready = [replica for replica, reason in self.verdicts() if not reason]
        left_out = self._ejected(ready)
        chosen = self._choose([replica for replica in ready if replica in left and replica.name not in left_out], size, preferred)
        if chosen is None:
            connected = [replica for replica in left if replica.connection.state is ConnectionState.CONNECTED]
            chosen = self._choose(connected, size, preferred)
        if chosen is None:
            raise self.why_unavailable()
        return chosen

    def queue(self, priority: PriorityClass, joining: JoiningRequests) -> QueueState | None:
        """The shortest queue that a request of this class finds at a ready replica; None where none is ready, or none has reported its
        load. Engines whose queue policy knows no classes serve all that waits before it.

        joining  requests that the replicas will be sent, in equal parts
        """
        info, size = self.info, RequestSize(0, self._expected_output_tokens(None))
        traits = traits_of(info.queue_policy if info else "")
        lowest = traits.lowest_before(priority)
        seen = [_candidate(replica, lowest) for replica, reason in self.verdicts() if not reason]
        num_joining = joining.num_requests(lowest)
        joined = self._joined(num_joining, len(seen)) if num_joining and seen else NOTHING_SENT
        loads = [(served_before(each.snapshot, lowest), each.sent.plus(joined)) for each in seen if each.snapshot is not None]
        states = [queue_state(load, sent, size, block_size=info.block_size if info else 16) for load, sent in loads]
        if traits.has_tenants:
            states = [replace(state, num_slots=load.max_num_seqs) for state, (load, _) in zip(states, loads, strict=True)]
        return min(states, key=lambda state: (state.wait_s, state.depth), default=None)

    def note_sent(self, replica: Replica) -> ReplicaAttempt:
        """A request was sent there. The caller reports how it ended."""
        info = replica.connection.info
        return replica.circuit.send(None if info is None else (info.instance_id, info.connected_at), self.clock)

    def _ejected(self, ready: Sequence[Replica]) -> frozenset[ReplicaId]:
        """The ready replicas that get no request, because they failed several."""
        return ejected({replica.name: replica.circuit.breaker for replica in ready}, self.clock())

    def _started(self, fit: Sequence[Replica]) -> list[Replica]:
        """The replicas of `fit` that take part in a decision: a replica that has just connected does in a part of them."""
        now, infos = self.clock(), [replica.connection.info for replica in fit]
        connected_s = [0.0 if info is None else now - info.connected_at for info in infos]
        return started(fit, [started_share(seconds, self._slow_start_s) for seconds in connected_s], self._random)

    def why_unavailable(self) -> Unavailable:
        """What a request gets that no replica takes."""
        if self.unavailable and not self.replicas:
            return Unavailable(f"The model {self.model} cannot be served now. {self.unavailable}", retry_after_s=UNAVAILABLE_RETRY_S)
        return Unavailable(f"No replica of {self.model} takes requests now.", retry_after_s=1.0)

    def _choose(self, fit: Sequence[Replica], size: RequestSize, preferred: str) -> Replica | None:
        if len(fit) < 2:
            return fit[0] if fit else None
        info = self.info
        chosen = choose(
            [_candidate(replica) for replica in self._started(fit)],
            size=size,
            block_size=info.block_size if info else 16,
            random=self._random,
            preferred=ReplicaId(preferred),
        )
        return None if chosen is None else next(replica for replica in fit if replica.name == chosen.replica_id)

    def _expected_output_tokens(self, max_output_tokens: int | None) -> int:
        """Mean length of the answers that this model's replicas gave, as far as `max_output_tokens` allows it."""
        num_finished, _, num_tokens = self._counted()
        mean = mean_output_tokens(num_finished, num_tokens)
        return mean if max_output_tokens is None else max(1, min(mean, max_output_tokens))

    def _counted(self) -> tuple[int, int, int]:
        """Requests that this model's replicas finished, and the tokens of their prompts and outputs."""
        num_finished = prompt_tokens = output_tokens = 0
        for replica in self.replicas:
            if (seen := replica.connection.snapshot) is not None:
                counters = seen.load.counters
                num_finished += sum(counters.finished.values())
                prompt_tokens += counters.prompt_tokens
                output_tokens += counters.generation_tokens
        return num_finished, prompt_tokens, output_tokens

    def _joined(self, num_requests: int, num_replicas: int) -> SentSince:
        """One replica's part of requests that join, whose prompts are taken to be of the mean length."""
        num_finished, num_tokens, _ = self._counted()
        mean = num_tokens // num_finished if num_finished else UNKNOWN_PROMPT_TOKENS
        num_each = -(-num_requests // num_replicas)
        return SentSince(num_each, num_each * mean)

    def why_not_resume(self, numerics: Numerics | None) -> str:
        """Why no connected replica may continue a stream, with a reason for each; empty: one may.

        numerics  of the replica that computed the stream's tokens so far; None: there are none, and any replica may begin
        """
        connected = [replica for replica in self.replicas if replica.connection.state is ConnectionState.CONNECTED]
        reasons = {replica.name: "" if numerics is None else why_not_resume(numerics, replica.numerics) for replica in connected}
        if "" in reasons.values():
            return ""
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "no other replica is connected"

    def verdicts(self) -> Iterator[tuple[Replica, str]]:
        """Each replica and why it is not ready; an empty reason means ready."""
        now = self.clock()
        for replica in self.replicas:
            yield replica, replica.verdict(now)

    def health(self) -> list[ReplicaHealth]:
        verdicts, now = list(self.verdicts()), self.clock()
        left_out = self._ejected([replica for replica, reason in verdicts if not reason])
        return [_health(replica, EJECTED if replica.name in left_out else reason, now) for replica, reason in verdicts]

    def retired_health(self) -> list[ReplicaHealth]:
        now = self.clock()
        return [_health(replica, RETIRED, now) for replica in self.retired]


def _health(replica: Replica, reason: str, now: float) -> ReplicaHealth:
    connection = replica.connection
    return ReplicaHealth(
        replica.name,
        connection.state is not ConnectionState.DOWN,
        reason,
        connection.snapshot.load if connection.snapshot else None,
        num_open=connection.num_open,
        has_tried=connection.has_tried,
        is_failing=not replica.circuit.breaker.can_send(now),
    )


def _candidate(replica: Replica, lowest: PriorityClass = PriorityClass.BATCH) -> Candidate:
    """lowest: class of the requests sent since the snapshot that are counted, with the classes above it"""
    connection = replica.connection
    seen = connection.snapshot
    sent = connection.sent_since_snapshot(lowest)
    return Candidate(replica.name, seen.load if seen else None, SentSince(len(sent), sum(sent)))
