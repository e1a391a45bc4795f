"""Streams the answer to one prompt from a replica."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from headrace.core.plan import columns_of
from headrace.core.tasks import end_tasks
from headrace.core.update import FinishReason, SequenceUpdate
from headrace.gateway.upstream.own.attempts import CallAttempts, PromptCall
from headrace.gateway.upstream.own.output_parsing import (
    EarlierCallOutput,
    EarlierSequence,
    EarlierUpdates,
    OutputReader,
    RecomputedLogprobs,
    joined_states,
    prompt_digest,
    state_of,
)
from headrace.gateway.upstream.own.replicas import ReplicaPool
from headrace.gateway.upstream.seam import (
    CacheMiss,
    EventListener,
    EventStream,
    OutputEvent,
    ReplicaLost,
    SequenceFacts,
    TokenUsage,
    added,
    merged,
)
from headrace.observe.finished_request import AnswerHandling
from headrace.text.assemble import OutputAssembler, OutputDelta
from headrace.text.tokenizer import Tokenizer
from headrace.wire.stream import PlainRow

ANOTHER_TOKEN = "This answer cannot be continued from where it stopped; it can be sent again."


class TokenStream(EventStream):
    def __init__(self, pool: ReplicaPool, tokenizer: Tokenizer, call: PromptCall, *, first_index: int = 0) -> None:
        self._first_index = first_index
        self.call = call
        n = call.request.params.n
        self.attempts = CallAttempts(pool, call)
        kept_ids = call.parsing.marker_ids if call.parsing is not None else frozenset()
        self._assemblers = [OutputAssembler(tokenizer, call.request.params, kept_ids=kept_ids) for _ in range(n)]
        self._readers = [_reader(call, tokenizer, index) for index in range(n)]
        self._listener: EventListener | None = None
        self._ends: list[tuple[FinishReason | None, int | None]] = [(None, None)] * n
        self._num_earlier_tokens = call.earlier.num_counted_tokens if call.earlier is not None else 0
        self._earlier = EarlierUpdates(call.earlier, call.request.request_id) if call.earlier is not None else None
        self._recomputed: dict[int, RecomputedLogprobs] = {}

    @property
    def unread_bytes(self) -> int:
        return self.attempts.unread_bytes

    @property
    def num_resumes(self) -> int:
        return self.attempts.num_resumes

    async def events(self) -> list[OutputEvent]:
        if self._earlier is not None and (events := self._end_replay(self._earlier)):
            return events
        while updates := await self.attempts.batch():
            if events := self._read(updates):
                return events
        return []

    def listen(self, listener: EventListener | None) -> None:
        self._listener = listener
        self.attempts.handle_plain_rows(self._handle_plain_rows if listener is not None else None)

    def usage(self) -> TokenUsage:
        completion = sum([assembler.num_tokens for assembler in self._assemblers])
        reasoning = sum([reader.num_reasoning_tokens for reader in self._readers if reader is not None])
        earlier = completion if self._earlier is not None else min(completion, self._num_earlier_tokens)
        num_prompt = len(self.call.request.prompt_ids)
        earlier_prompt = num_prompt if self.call.earlier is not None else 0
        return TokenUsage(num_prompt, completion, self._assemblers[0].num_cached_tokens or 0, reasoning, earlier, earlier_prompt)

    def facts(self, index: int) -> SequenceFacts:
        own = index - self._first_index
        read = self._assemblers[own]
        miss = None
        if read.num_cached_tokens is not None and read.miss_reason is not None:
            miss = CacheMiss(read.num_cached_tokens, read.miss_reason)
        return SequenceFacts(self.attempts.replicas[own], read.queue_time_s, read.stages, miss)

    def handling(self) -> AnswerHandling:
        return self.attempts.submissions.handling()

    def saved_state(self) -> bytes | None:
        if not any(self.attempts.output_ids):
            return None
        sequences = [EarlierSequence(ids.tobytes(), *end) for ids, end in zip(self.attempts.output_ids, self._ends, strict=True)]
        assert self.call.request.params.seed is not None
        call = EarlierCallOutput(
            self.call.request.params.seed,
            prompt_digest(self.call.request.prompt_ids),
            dict(self.attempts.numerics),
            self._assemblers[0].num_cached_tokens,
            tuple(sequences),
            max(self._num_earlier_tokens, self.usage().completion_tokens),
            self.call.request.adapter_digest,
        )
        return state_of(call)

    def replay(self, index: int, offset: int) -> OutputEvent:
        assert self._earlier is not None, "only a continued stream, before its first new event"
        event = self._read_one(self._earlier.take(index - self._first_index, offset))
        return OutputEvent(index) if event is None else event

    def _end_replay(self, earlier: EarlierUpdates) -> list[OutputEvent]:
        assert self.call.earlier is not None
        events = self._read([earlier.take(index) for index in range(self.call.request.params.n)])
        self._num_earlier_tokens = max(self._num_earlier_tokens, sum(assembler.num_tokens for assembler in self._assemblers))
        self._earlier = None
        if self.call.request.params.logprobs is not None:
            self._read_pending_again()
        self.attempts.continue_earlier(self.call.earlier.numerics)
        return events

    def _read_pending_again(self) -> None:
        """The client does not have the log-probabilities of tokens with held back text yet."""
        for index, assembler in enumerate(self._assemblers):
            if count := 0 if assembler.finish is not None else assembler.num_pending:
                ids = self.attempts.output_ids[index]
                self._recomputed[index] = RecomputedLogprobs(tuple(ids[-count:]), [])
                del ids[-count:]

    def cancel(self) -> None:
        self.attempts.cancel()

    async def close(self) -> None:
        await self.attempts.close()

    def _read(self, updates: Iterable[SequenceUpdate]) -> list[OutputEvent]:
        return merged(event for update in updates if (event := self._read_one(update)) is not None)

    def _read_one(self, update: SequenceUpdate) -> OutputEvent | None:
        assembler = self._assemblers[update.index]
        if assembler.finish is None:
            self.attempts.keep(update.index, update.token_ids)
            if update.finish is not None and update.finish.is_answer:
                self._ends[update.index] = update.finish, update.stop_token_id
        if self._recomputed:
            update = self._with_logprobs(update)
        delta = assembler.feed(update)
        offset = len(self.attempts.output_ids[update.index])
        if assembler.finish is not None:
            self.attempts.end(update.index, assembler.finish)
            offset += 1
        if (end := delta.engine_finish) is not None:
            self.attempts.finish(update.index, end.keep_tokens, end.reason)
        if delta.is_empty:
            return None
        return self._parsed(update.index, event_of(self._first_index + update.index, delta, offset), delta.token_ids)

    def _with_logprobs(self, update: SequenceUpdate) -> SequenceUpdate:
        """Raises ReplicaLost if a token differs."""
        recomputed = self._recomputed.get(update.index)
        if recomputed is None:
            return update
        rest = recomputed.take(update)
        if rest is None:
            raise ReplicaLost(ANOTHER_TOKEN, why_not_resume="a token whose text the client has in part came out differently")
        if recomputed.is_complete:
            self._assemblers[update.index].supply_logprobs(recomputed.columns)
            del self._recomputed[update.index]
        return rest

    def _handle_plain_rows(self, rows: Sequence[PlainRow]) -> bool:
        """Like `_read` of these rows, but the listener gets the events at once. False: not taken."""
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
            return self._read_one(
                SequenceUpdate(request_id=self.call.request.request_id, epoch=self.attempts.epoch, index=index, token_ids=token_ids)
            )
        offset = self.attempts.keep(index, token_ids)
        return self._parsed(index, OutputEvent(self._first_index + index, text, len(token_ids), offset), token_ids)

    def _parsed(self, index: int, event: OutputEvent, token_ids: Sequence[int]) -> OutputEvent:
        reader = self._readers[index]
        return event if reader is None or reader.is_passed else reader.read(event, token_ids)


def _reader(call: PromptCall, tokenizer: Tokenizer, index: int) -> OutputReader | None:
    if call.parsing is None:
        return None
    skipped = tokenizer.special_ids - call.parsing.marker_ids if call.request.params.skip_special_tokens else frozenset()
    return OutputReader(call.parsing, tokenizer, skipped, f"{call.request.params.seed}/{call.answer_id or call.request.request_id}/{index}")


def event_of(index: int, delta: OutputDelta, offset: int) -> OutputEvent:
    logprobs = () if delta.logprobs is None else (delta.logprobs,)
    prompt_logprobs = (columns_of(delta.prompt_logprobs),) if delta.prompt_logprobs else ()
    ended = delta.finish, delta.stop_reason, delta.error
    return OutputEvent(index, delta.text, len(delta.token_ids), offset, logprobs, prompt_logprobs, *ended)


class MergedStream(EventStream):
    """An error of one stream is raised, and `close` then cancels the others.

    A listener is ignored, since several streams would interleave their events.
    """

    def __init__(self, streams: list[EventStream], n: int) -> None:
        self._streams = streams
        self._n = n
        self._waiting: dict[asyncio.Task[list[OutputEvent]], int] = {}
        self._to_ask = list(range(len(streams)))

    @property
    def unread_bytes(self) -> int:
        return sum(stream.unread_bytes for stream in self._streams)

    @property
    def num_resumes(self) -> int:
        return sum(stream.num_resumes for stream in self._streams)

    async def events(self) -> list[OutputEvent]:
        ready: list[OutputEvent] = []
        while not ready and (self._to_ask or self._waiting):
            self._waiting |= {asyncio.create_task(self._streams[number].events()): number for number in self._to_ask}
            self._to_ask.clear()
            done, _ = await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = self._waiting.pop(task)
                if events := task.result():
                    ready += events
                    self._to_ask.append(number)
        return ready

    def usage(self) -> TokenUsage:
        return added(*[stream.usage() for stream in self._streams])

    def facts(self, index: int) -> SequenceFacts:
        return self._streams[index // self._n].facts(index)

    def handling(self) -> AnswerHandling:
        return AnswerHandling.joined([stream.handling() for stream in self._streams])

    def saved_state(self) -> bytes | None:
        return joined_states([stream.saved_state() for stream in self._streams])

    def replay(self, index: int, offset: int) -> OutputEvent:
        return self._streams[index // self._n].replay(index, offset)

    def cancel(self) -> None:
        for stream in self._streams:
            stream.cancel()

    async def close(self) -> None:
        self.cancel()
        tasks = list(self._waiting)
        self._waiting.clear()
        self._to_ask.clear()
        await end_tasks(tasks)
        for stream in self._streams:
            await stream.close()
