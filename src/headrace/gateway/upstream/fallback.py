"""Streams an answer from what comes next when what was asked first fails without output: a model's foreign servers after its replicas, and
a model's fallbacks after the model (`generation.stages.model_choice`).

docs/foreign.md, "Behind our own engines", has the rules.

No request falls back after its first token, nor a stream that a client continues: the text of another model cannot follow.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError, InvalidRequest, Overloaded, RequestTooLarge, Unavailable
from headrace.core.request import PriorityClass
from headrace.gateway.http.errors import ContentRefused, ContextLengthExceeded, forget_frames
from headrace.gateway.upstream.generation_request import Conversation, GenerationRequest, PlainPrompts, PrincipalFacts
from headrace.gateway.upstream.seam import (
    NO_USAGE,
    EventListener,
    EventStream,
    Hold,
    OutputEvent,
    Prepared,
    ReplicaHealth,
    SequenceFacts,
    Tokenization,
    TokenUsage,
    Upstream,
)
from headrace.observe.finished_request import AnswerHandling
from headrace.observe.logs import LimitedLog
from headrace.policy.admission import QueueState, UnsentRequest, UnsentRequests
from headrace.policy.holding import HeldTerms
from headrace.policy.routing.wishes import OWN_ENGINES, RoutingWishes, server_places

log = logging.getLogger("headrace.gateway")

FALLS_BACK = "a request falls back to another server of its model: %s"

TOO_LONG = (ContextLengthExceeded, RequestTooLarge)
"""Errors of a request that is longer than the replicas' context, or that needs more KV blocks than a replica has."""


class FallbackUpstream(Upstream):
    def __init__(self, own: Upstream, foreign: Upstream, clock: Clock) -> None:
        self.own = own
        self.foreign = foreign
        self._log = LimitedLog(log, clock)

    @property
    def server_names(self) -> Sequence[str]:
        return [OWN_ENGINES, *self.foreign.server_names]

    @property
    def max_model_len(self) -> int | None:
        return max(self.own.max_model_len or 0, self.foreign.max_model_len or 0) or None

    @property
    def fingerprint(self) -> str | None:
        return self.own.fingerprint

    def hold(self, terms: Callable[[], HeldTerms], unsent: UnsentRequest | None, wishes: RoutingWishes) -> Hold | None:
        """Foreign servers that may answer are asked instead."""
        places = server_places(self.server_names, wishes)
        is_own = OWN_ENGINES in places and (len(places) == 1 or not self.foreign.is_alive)
        if is_own:
            return self.own.hold(terms, unsent, wishes)
        if OWN_ENGINES in places:
            self.own.note_wanted()
        return None

    def note_wanted(self) -> None:
        self.own.note_wanted()

    @property
    def num_held(self) -> int:
        return self.own.num_held

    @property
    def is_asleep(self) -> bool:
        return self.own.is_asleep

    def queue(self, priority: PriorityClass, unsent: UnsentRequests) -> QueueState | None:
        return self.own.queue(priority, unsent)

    def is_queue_first(self, wishes: RoutingWishes) -> bool:
        """Foreign servers come before our engines only while one of them is alive."""
        places = server_places(self.server_names, wishes)
        if (own_place := places.get(OWN_ENGINES)) == min(places.values()):
            return True
        before = (server for server in self.foreign.replicas() if not server.reason)
        return own_place is not None and all(places.get(server.name, own_place) >= own_place for server in before)

    @property
    def version(self) -> str:
        return self.own.version

    @property
    def knows_adapters(self) -> bool:
        return self.own.knows_adapters

    def adapter_names(self) -> Collection[str]:
        return self.own.adapter_names()

    def adapted(self, name: str) -> Upstream | None:
        """Foreign servers do not have it."""
        return self.own.adapted(name)

    @property
    def is_alive(self) -> bool:
        return self.own.is_alive or self.foreign.is_alive

    def replicas(self) -> list[ReplicaHealth]:
        return [*self.own.replicas(), *self.foreign.replicas()]

    def retired_replicas(self) -> list[ReplicaHealth]:
        return [*self.own.retired_replicas(), *self.foreign.retired_replicas()]

    async def prepare(self, request: GenerationRequest, principal: PrincipalFacts) -> Prepared:
        if request.earlier is not None:
            return await self.own.prepare(request, principal)
        wishes = request.routing
        places = server_places(self.server_names, wishes)
        own_place = places.pop(OWN_ENGINES, None)
        before = tuple([name for name, place in places.items() if own_place is None or place < own_place])
        if before and request.unsent is not None:
            request.unsent.uncount()  # it does not wait for our engines
        if own_place is None:
            return await self.foreign.prepare(request, principal)
        after = () if wishes.keeps_first_server else tuple([name for name in places if name not in before])
        ahead: Prepared | None = None
        if before:
            with suppress(InvalidRequest):
                ahead = await self.foreign.prepare(replace(request, routing=wishes._replace(only=before)), principal)
            if ahead is None and request.admit is not None:
                request.admit()
        try:
            rest, is_own = await self._own_first(replace(request, routing=wishes._replace(only=after)), principal, has_foreign=bool(after))
        except (Unavailable, *TOO_LONG) as error:
            if ahead is None or not (isinstance(error, Unavailable) or self._takes_longer):
                raise
            return ahead
        if ahead is None:
            return rest
        return self._answering(rest, ahead, rest, (Overloaded, Unavailable, *TOO_LONG), request.admit if is_own else None)

    async def _own_first(self, request: GenerationRequest, principal: PrincipalFacts, *, has_foreign: bool) -> tuple[Prepared, bool]:
        """And whether our engines are asked."""
        if not has_foreign:
            return await self.own.prepare(request, principal), True
        foreign: Prepared | InvalidRequest
        try:
            foreign = await self.foreign.prepare(request, principal)
        except InvalidRequest as error:
            foreign = error
        try:
            own = await self.own.prepare(replace(request, has_fallback=request.has_fallback or isinstance(foreign, Prepared)), principal)
        except (Unavailable, *TOO_LONG) as error:  # Unavailable: no replica has connected yet, or its text cannot be read
            if not isinstance(error, Unavailable):
                if not self._takes_longer:
                    raise
                self._log.info(FALLS_BACK, error)
            if isinstance(foreign, Prepared):
                if request.unsent is not None:
                    request.unsent.uncount()
                return foreign, False
            raise error if request.has_fallback else foreign from None
        if isinstance(foreign, InvalidRequest):
            return own, True
        reasons = (Overloaded, Unavailable, *(TOO_LONG if self._takes_longer else ()))
        return self._answering(own, own, foreign, reasons, None if request.unsent is None else request.unsent.uncount), True

    def _answering(
        self,
        own: Prepared,
        first: Prepared,
        other: Prepared,
        reasons: tuple[type[HeadraceError], ...],
        on_turn: Callable[[], None] | None,
    ) -> Prepared:
        then = self._then(other, reasons, on_turn)
        return replace(own, stream=lambda: FallbackStream(first.stream(), then, num_sequences=own.num_sequences))

    def _then(self, other: Prepared, reasons: tuple[type[HeadraceError], ...], on_turn: Callable[[], None] | None) -> Following:
        left = [other]

        async def following(error: HeadraceError) -> EventStream:
            if not left or not isinstance(error, reasons):
                raise error
            if on_turn is not None:
                on_turn()
            self._log.info(FALLS_BACK, error)
            return left.pop().stream()

        return following

    @property
    def _takes_longer(self) -> bool:
        return (self.foreign.max_model_len or 0) > (self.own.max_model_len or 0)

    async def tokenize(self, prompt: Conversation | PlainPrompts, *, needs_texts: bool, tenant: str) -> Tokenization:
        return await self.own.tokenize(prompt, needs_texts=needs_texts, tenant=tenant)

    async def detokenize(self, token_ids: Sequence[int], *, tenant: str) -> str:
        return await self.own.detokenize(token_ids, tenant=tenant)


Following = Callable[[HeadraceError], Coroutine[Any, Any, EventStream]]
"""Opens the stream that follows one which failed without output. Raises the error of the answer where none follows."""


class FallbackStream(EventStream):
    """The streams of one answer, each of which begins where the one before failed without output.

    An answer that a content filter has emptied is such a failure, too. It is the answer after all where nothing may follow.
    """

    def __init__(self, first: EventStream, following: Following, *, num_sequences: int) -> None:
        self._streams = [first]
        self._following: Following | None = following
        self._num_sequences = num_sequences
        self._opening: asyncio.Task[EventStream] | None = None
        self._failure: HeadraceError | None = None
        self._refusal: list[OutputEvent] = []
        self._has_failed = False
        self._is_cancelled = False

    @property
    def _current(self) -> EventStream:
        return self._streams[-1]

    @property
    def unread_bytes(self) -> int:
        return self._current.unread_bytes

    @property
    def num_resumes(self) -> int:
        return self._current.num_resumes

    async def events(self) -> list[OutputEvent]:
        """A cancelled call leaves a stream that opens to the next call."""
        while (following := self._following) is not None:
            if self._opening is None:
                try:
                    events = await self._current.events()
                    if not self._is_refusal(events):
                        self._following = None
                        return events
                    self._refusal, self._failure = events, ContentRefused()
                except HeadraceError as raised:
                    if self._is_cancelled or self._current.usage().completion_tokens:
                        raise
                    self._refusal, self._failure = [], raised
                self._opening = asyncio.create_task(following(self._failure))
            await asyncio.wait((self._opening,))
            if self._is_cancelled:
                return []
            opening, self._opening = self._opening, None
            failed, failure, self._failure = self._current, self._failure, None
            assert failure is not None
            try:
                self._streams.append(opening.result())
            except HeadraceError as error:
                self._following = None
                if self._refusal and error is failure:
                    return self._refusal
                self._has_failed = True
                raise
            forget_frames(failure)
            await failed.close()
        return await self._current.events()

    def _is_refusal(self, events: Sequence[OutputEvent]) -> bool:
        return len(events) == self._num_sequences and all(event.is_filtered and not event.num_bytes for event in events)

    def listen(self, listener: EventListener | None) -> None:
        """A listener is given only after the first events."""
        self._current.listen(listener)

    def usage(self) -> TokenUsage:
        """Nothing where no stream gave an answer, whatever the server of an emptied one has counted."""
        return NO_USAGE if self._has_failed or self._opening is not None else self._current.usage()

    def facts(self, index: int) -> SequenceFacts:
        return self._current.facts(index)

    def handling(self) -> AnswerHandling:
        return AnswerHandling.joined([stream.handling() for stream in self._streams])

    def saved_state(self) -> bytes | None:
        return self._current.saved_state()

    def replay(self, index: int, offset: int) -> OutputEvent:
        return self._current.replay(index, offset)

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._opening is not None:
            self._opening.cancel()
        self._current.cancel()

    async def close(self) -> None:
        self.cancel()
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)
        self._following = None
        for stream in self._streams:
            await stream.close()
