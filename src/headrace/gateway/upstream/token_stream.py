"""One prompt at a replica: token ids out over the wire, text back.

A `Call` is everything needed to run a prompt, and to run it again: prompt ids, seed, parameters. Its `TokenStream` turns token ids back
into text, and text into reasoning and tool calls where these are looked for (`output_stage`). It finishes a sequence in the engine when a
stop string ended it, and re-routes the call once if a replica is full. It keeps what a resume needs: the call, the epoch, every output id
that the engine has sent, and the numerics of the replica that sent them. Nothing is resumed yet: a stream whose replica is lost ends in a
retryable error, which says whether another replica could have continued it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.core.errors import HeadraceError, Overloaded, RequestTooLarge, Unavailable
from headrace.core.grammar import Grammar
from headrace.core.ids import RequestId
from headrace.core.plan import columns_of
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.core.update import Rejected, SequenceUpdate, StageSeconds
from headrace.gateway.upstream.output_stage import OutputParsing, OutputStage
from headrace.gateway.upstream.replicas import Replica, ReplicaInstance, ReplicaPool, UpdateStream
from headrace.gateway.upstream.seam import EventListener, OutputEvent, PrincipalFacts, ReplicaLost, TokenUsage
from headrace.text.assemble import OutputAssembler, OutputDelta
from headrace.text.tokenizer import Tokenizer
from headrace.wire.stream import PlainRow

LOST = "The engine that worked on this request was lost; it can be sent again."
MAX_TRIES = 2
"""A replica's rejection is re-routed once, then final: under overload more tries only add load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One prompt. Parameters are checked and have their seed; `salt` and tenant come from the key, never from the client alone.

    max_output_tokens  per sequence, by the parameters or by what the context leaves
    parsing            how the outputs are parsed; None: they are text
    deadline_at        when the answer ends, on this process's clock
    """

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_output_tokens: int
    principal: PrincipalFacts = field(default_factory=PrincipalFacts)
    parsing: OutputParsing | None = None
    grammar: Grammar | None = None
    deadline_at: float | None = None

    def engine_request(self, epoch: int) -> EngineRequest:
        return EngineRequest(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            params=self.params,
            epoch=epoch,
            tenant=self.principal.tenant,
            weight=self.principal.weight,
            priority=self.principal.priority,
            salt=self.principal.salt,
            grammar=self.grammar,
            deadline_at=self.deadline_at,
        )


@dataclass(frozen=True, slots=True)
class _Sent:
    """The replica that runs a call, and the updates it sends."""

    replica: Replica
    updates: UpdateStream


class TokenStream:
    """One call at one replica (or, after a rejection, at the next). An `EventStream`.

    output_ids  by sequence: every id the engine has sent, including those whose text is held back. Another engine can continue after them
    """

    def __init__(self, pool: ReplicaPool, tokenizer: Tokenizer, call: Call, *, first_index: int = 0) -> None:
        """first_index: of the call's sequences within the request"""
        self._pool = pool
        self._first_index = first_index
        self.call = call
        self.epoch = 0
        self.output_ids = [array("i") for _ in range(call.params.n)]
        kept_ids = call.parsing.marker_ids if call.parsing is not None else frozenset()
        self._assemblers = [OutputAssembler(tokenizer, call.params, kept_ids=kept_ids) for _ in range(call.params.n)]
        self._stages = [_stage(call, tokenizer, index) for index in range(call.params.n)]
        self._tried: set[ReplicaInstance] = set()
        self._sent: _Sent | None = None
        self._listener: EventListener | None = None
        self._is_over = False

    @property
    def unread_bytes(self) -> int:
        return self._sent.updates.unread_bytes if self._sent else 0

    async def events(self) -> list[OutputEvent]:
        while not self._is_over:
            sent = self._sent or self._submit()
            try:
                updates = await sent.updates.batch()
            except Unavailable as error:  # its text names sockets; the operator finds it in the log through the cause
                self._is_over = True
                numerics = self.numerics if any(self.output_ids) else None
                raise ReplicaLost(LOST, why_not_resume=self._pool.why_not_resume(numerics)) from error
            if not updates:
                self._is_over = True
                return []
            if isinstance(updates[0], Rejected):
                self._reroute(updates[0].error)
                continue
            events = self._read([update for update in updates if isinstance(update, SequenceUpdate)])
            if events:
                return events
        return []

    def listen(self, listener: EventListener | None) -> None:
        self._listener = listener
        if self._sent is not None:
            self._sent.updates.plain_row_handler = self._handle_plain_rows if listener is not None else None

    def usage(self) -> TokenUsage:
        completion = sum(assembler.num_tokens for assembler in self._assemblers)
        reasoning = sum(stage.num_reasoning_tokens for stage in self._stages if stage is not None)
        return TokenUsage(len(self.call.prompt_ids), completion, self._assemblers[0].num_cached_tokens or 0, reasoning)

    def replica(self, index: int) -> str | None:
        return self._sent.replica.name if self._sent else None

    def queue_time_s(self, index: int) -> float | None:
        return self._assemblers[index - self._first_index].queue_time_s

    def stages(self, index: int) -> StageSeconds | None:
        return self._assemblers[index - self._first_index].stages

    def cancel(self) -> None:
        if not self._is_over:
            self._is_over = True
            if self._sent is not None:
                self._sent.replica.connection.cancel(self.call.request_id)

    async def close(self) -> None:
        self.cancel()

    @property
    def numerics(self) -> Mapping[str, str]:
        """Numerics of the replica that sent `output_ids`, also after it is lost. A replica may continue them only if its own are equal."""
        return self._sent.updates.numerics if self._sent else {}

    def _submit(self) -> _Sent:
        """Submit to the replica that routing picks; one that was lost in between counts as tried. Raises Unavailable."""
        while True:
            replica = self._pool.pick(
                prompt_tokens=len(self.call.prompt_ids), max_output_tokens=self.call.params.max_tokens or 1, tried=self._tried
            )
            self._tried.add(replica.instance)
            try:
                updates = replica.connection.submit(self.call.engine_request(self.epoch))
            except Unavailable:
                continue
            self._sent = _Sent(replica, updates)
            self.listen(self._listener)
            return self._sent

    def _reroute(self, error: Exception) -> None:
        """Send a rejected request to another replica, once: when the first was full or draining, or the request too large for it.

        Raises the rejection where no other replica is left, or for any other reason. (Draining: the request and the notice crossed. Too
        large: replicas differ in memory.)
        """
        if isinstance(error, Overloaded | Unavailable | RequestTooLarge) and len(self._tried) < MAX_TRIES:
            self.epoch += 1
            try:
                self._submit()
                return
            except Unavailable:
                pass
        self._is_over = True
        raise error if isinstance(error, HeadraceError) else Unavailable(LOST)

    def _read(self, updates: Iterable[SequenceUpdate]) -> list[OutputEvent]:
        """Feed the assemblers. Several updates of one sequence become one event."""
        return merged(event for update in updates if (event := self._fed(update)) is not None)

    def _fed(self, update: SequenceUpdate) -> OutputEvent | None:
        """The event of one update, if it has one. Where a stop string ended the sequence here, the engine is asked to finish it."""
        assembler = self._assemblers[update.index]
        if assembler.finish is None:
            self._keep(update.index, update.token_ids)
        delta = assembler.feed(update)
        if (end := delta.engine_finish) is not None and self._sent is not None:
            self._sent.replica.connection.finish(self.call.request_id, update.index, end.keep_tokens, end.reason)
        if delta.is_empty:
            return None
        return self._parsed(update.index, event_of(self._first_index + update.index, delta), delta.token_ids)

    def _handle_plain_rows(self, rows: Sequence[PlainRow]) -> bool:
        """A `wire.stream.PlainRowHandler`: like `_read` of these rows, but the listener gets the events at once. False: not taken."""
        listener = self._listener
        if listener is None or not listener.has_room:
            return False
        events = [event for row in rows if (event := self._fed_tokens(*row)) is not None]
        if events:
            listener.take(events if len(events) == 1 else merged(events))
        return True

    def _fed_tokens(self, index: int, token_ids: tuple[int, ...]) -> OutputEvent | None:
        text = self._assemblers[index].feed_whole(token_ids)
        if text is None:
            return self._fed(SequenceUpdate(request_id=self.call.request_id, epoch=self.epoch, index=index, token_ids=token_ids))
        self._keep(index, token_ids)
        return self._parsed(index, OutputEvent(self._first_index + index, text, len(token_ids)), token_ids)

    def _parsed(self, index: int, event: OutputEvent, token_ids: Sequence[int]) -> OutputEvent:
        stage = self._stages[index]
        return event if stage is None or stage.is_passed else stage.read(event, token_ids)

    def _keep(self, index: int, token_ids: tuple[int, ...]) -> None:
        kept = self.output_ids[index]
        room = self.call.max_output_tokens - len(kept)
        kept.extend(token_ids if len(token_ids) <= room else token_ids[:room])


def _stage(call: Call, tokenizer: Tokenizer, index: int) -> OutputStage | None:
    if call.parsing is None:
        return None
    skipped = tokenizer.special_ids - call.parsing.marker_ids if call.params.skip_special_tokens else frozenset()
    return OutputStage(call.parsing, tokenizer, skipped, f"{call.params.seed}/{call.request_id}/{index}")


def merged(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """At most one event per sequence."""
    by_sequence: dict[int, list[OutputEvent]] = {}
    for event in events:
        by_sequence.setdefault(event.index, []).append(event)
    return [OutputEvent.joined(of_one) for of_one in by_sequence.values()]


def event_of(index: int, delta: OutputDelta) -> OutputEvent:
    logprobs = () if delta.logprobs is None else (delta.logprobs,)
    prompt_logprobs = (columns_of(delta.prompt_logprobs),) if delta.prompt_logprobs else ()
    return OutputEvent(index, delta.text, len(delta.token_ids), logprobs, prompt_logprobs, delta.finish, delta.stop_reason, delta.error)
