"""The seam between the HTTP surface and whatever makes tokens, and our own implementation of it over the wire.

A `Call` is one prompt with everything needed to run it, and to run it again: prompt ids, seed, parameters. `Upstream.stream(call)` gives
an `EventStream`: text with its tokens, and the end of each sequence. `TokenUpstream` sends token ids to a replica, turns token ids back
into text, tells the engine when a stop string ended a sequence, and re-routes a request once if a replica is full.

What a later replay needs is kept while the stream is open: the call itself, the epoch, and the output ids given out so far.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import Protocol

from headrace.core.errors import HeadraceError, Overloaded, Unavailable
from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest, PriorityClass
from headrace.core.sampling import SamplingParams
from headrace.core.update import Rejected, SequenceUpdate
from headrace.gateway.upstream.replicas import Replica, ReplicaPool, UpdateStream
from headrace.policy.routing.choice import ReplicaId
from headrace.text.assemble import OutputAssembler, OutputDelta
from headrace.text.tokenizer import Tokenizer

LOST = "The engine that worked on this request was lost; it can be sent again."
MAX_TRIES = 2
"""A replica's rejection is re-routed once, then final: under overload more tries only add load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One prompt. Parameters are checked and have their seed; `salt` and tenant come from the key, never from a client's words alone."""

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    tenant: str = ""
    weight: float = 1.0
    priority: PriorityClass = PriorityClass.STANDARD
    salt: bytes = b""
    deadline_s: float | None = None

    def engine_request(self, epoch: int) -> EngineRequest:
        return EngineRequest(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            params=self.params,
            epoch=epoch,
            tenant=self.tenant,
            weight=self.weight,
            priority=self.priority,
            salt=self.salt,
            deadline_s=self.deadline_s,
        )


@dataclass(frozen=True, slots=True)
class OutputEvent:
    """News of one sequence. index: within the answer (over all prompts of a request)."""

    index: int
    delta: OutputDelta


@dataclass(slots=True)
class SequenceUsage:
    """What one sequence cost so far."""

    num_tokens: int = 0
    num_cached_tokens: int = 0
    queue_time_s: float | None = None


class EventStream(Protocol):
    """An open call. Ends after the last sequence's finish, or when cancelled."""

    @property
    def replica(self) -> Replica | None:
        """Who works on it."""
        ...

    @property
    def unread_bytes(self) -> int:
        """About how much memory the updates take that were not asked for yet."""
        ...

    async def events(self) -> list[OutputEvent]:
        """Everything new, at most one event per sequence; empty = ended. Raises a HeadraceError: rejected, or lost."""
        ...

    def usage(self, index: int) -> SequenceUsage: ...

    def cancel(self) -> None:
        """Nobody wants the rest: the engine frees everything within its running step. Harmless after the end."""
        ...


class Upstream(Protocol):
    """Where calls go."""

    def stream(self, call: Call) -> EventStream:
        """Begin a call; it is under way once its first `events` are asked for."""
        ...


class TokenUpstream:
    """Our own engines, reached over the wire."""

    def __init__(self, pool: ReplicaPool, tokenizer: Tokenizer) -> None:
        self._pool = pool
        self._tokenizer = tokenizer

    def stream(self, call: Call) -> TokenStream:
        return TokenStream(self._pool, self._tokenizer, call)


@dataclass(frozen=True, slots=True)
class _Sent:
    """Where a call is, and what comes back."""

    replica: Replica
    updates: UpdateStream


class TokenStream:
    """One call at one replica (or, after a rejection, at the next)."""

    def __init__(self, pool: ReplicaPool, tokenizer: Tokenizer, call: Call) -> None:
        self._pool = pool
        self.call = call
        self.epoch = 0
        self.output_ids = [array("i") for _ in range(call.params.n)]
        self._assemblers = [OutputAssembler(tokenizer, call.params) for _ in range(call.params.n)]
        self._tried: list[ReplicaId] = []
        self._sent: _Sent | None = None
        self._is_over = False

    @property
    def replica(self) -> Replica | None:
        return self._sent.replica if self._sent else None

    @property
    def unread_bytes(self) -> int:
        return self._sent.updates.unread_bytes if self._sent else 0

    async def events(self) -> list[OutputEvent]:
        while not self._is_over:
            sent = self._sent or await self._submit()
            if sent is None:
                return []
            try:
                news = await sent.updates.batch()
            except Unavailable as error:  # its text names sockets; the operator finds it in the log through the cause
                self._is_over = True
                raise Unavailable(LOST) from error
            if not news:
                self._is_over = True
                return []
            if isinstance(news[0], Rejected):
                await self._reroute(news[0].error)
                continue
            events = self._read(sent, [update for update in news if isinstance(update, SequenceUpdate)])
            if events:
                return events
        return []

    def usage(self, index: int) -> SequenceUsage:
        assembler = self._assemblers[index]
        return SequenceUsage(assembler.num_tokens, assembler.num_cached_tokens or 0, assembler.queue_time_s)

    def cancel(self) -> None:
        if not self._is_over:
            self._is_over = True
            if self._sent is not None:
                self._sent.replica.connection.cancel(self.call.request_id)

    async def _submit(self) -> _Sent | None:
        """To the replica the router picks; one that went away between picking and sending counts as tried. None: cancelled meanwhile."""
        while True:
            replica = await self._pool.pick(prompt_tokens=len(self.call.prompt_ids), tried=self._tried)
            if self._is_over:  # picking may wait, and `cancel` found nothing to tell an engine
                return None
            self._tried.append(replica.name)
            try:
                updates = replica.connection.submit(self.call.engine_request(self.epoch))
            except Unavailable:
                continue
            self._sent = _Sent(replica, updates)
            return self._sent

    async def _reroute(self, error: Exception) -> None:
        """A request that a full or draining replica turned away goes to another one, once.

        Raises the rejection where there is none, or for any other reason. (Draining: the request crossed its notice on the way.)
        """
        if isinstance(error, Overloaded | Unavailable) and len(self._tried) < MAX_TRIES:
            self.epoch += 1
            try:
                await self._submit()
                return
            except Unavailable:
                pass
        self._is_over = True
        raise error if isinstance(error, HeadraceError) else Unavailable(LOST)

    def _read(self, sent: _Sent, updates: list[SequenceUpdate]) -> list[OutputEvent]:
        """Feed the assemblers; several updates of one sequence become one event."""
        merged: dict[int, OutputDelta] = {}
        for update in updates:
            delta = self._assemblers[update.index].feed(update)
            if delta.engine_finish is not None:
                end = delta.engine_finish
                sent.replica.connection.finish(self.call.request_id, update.index, end.keep_tokens, end.reason)
            if not delta.is_empty:
                self.output_ids[update.index].extend(delta.token_ids)
                before = merged.get(update.index)
                merged[update.index] = delta if before is None else joined(before, delta)
        return [OutputEvent(index, delta) for index, delta in merged.items()]


def joined(first: OutputDelta, second: OutputDelta) -> OutputDelta:
    """Two consecutive deltas of one sequence as one."""
    return replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs + second.prompt_logprobs,
    )
