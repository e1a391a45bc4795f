"""Assembles a sequence's text, log-probabilities and finish reason from the engine's updates, for the gateway and `LLM`.

Where text is held back, because it may begin a stop string or ends within a character, its tokens are held back as well.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from headrace.core.plan import TokenLogprobs, columns_of
from headrace.core.sampling import SamplingParams
from headrace.core.update import FinishReason, MissReason, SequenceUpdate, StageSeconds
from headrace.text.detokenize import Delta, Detokenizer
from headrace.text.logprobs import DecodedLogprobs
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EngineFinish:
    keep_tokens: int
    reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDelta:
    """stop_reason      beside FinishReason.STOP: the stop string or stop token id; None for the model's own end token
    engine_finish    set when a stop string ended the sequence and the engine still runs it
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: DecodedLogprobs | None = None
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    engine_finish: EngineFinish | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.token_ids or self.prompt_logprobs or self.finish)


class _Pending(NamedTuple):
    token_id: int
    begin: int
    end: int


class OutputAssembler:
    """The values are None until the engine has reported them, or has ended the sequence.

    num_tokens  output tokens that count: for usage, and for a resume after a failure
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, kept_ids: Set[int] = frozenset()) -> None:
        """kept_ids: special tokens that have a text even if those are skipped"""
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            kept_ids=kept_ids,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        self._pending: deque[_Pending] = deque()
        self._logprobs: DecodedLogprobs | None = None
        self.num_tokens = 0
        self.num_cached_tokens: int | None = None
        self.miss_reason: MissReason | None = None
        self.queue_time_s: float | None = None
        self.stages: StageSeconds | None = None
        self.finish: FinishReason | None = None

    def feed_whole(self, token_ids: Sequence[int]) -> str | None:
        """The fast path of `feed`; None: nothing was read, use `feed`."""
        if self._pending or self.finish is not None or not self._params.detokenize:
            return None
        text = self._detokenizer.push_whole(token_ids)
        if text is not None:
            self.num_tokens += len(token_ids)
        return text

    def feed(self, update: SequenceUpdate) -> OutputDelta:
        """Updates after the end (tokens the engine ran past a stop string) give an empty delta."""
        if self.finish is not None:
            return _NOTHING
        if update.num_cached_tokens is not None:
            self.num_cached_tokens, self.miss_reason = update.num_cached_tokens, update.miss_reason
        if update.queue_time_s is not None:
            self.queue_time_s = update.queue_time_s
        if update.stages is not None:
            self.stages = update.stages
        parts: list[str] = []
        stop = self._read(update, parts)
        if stop is None and update.finish is not None and self._params.detokenize:
            last = self._detokenizer.flush()
            parts.append(last.text)
            stop = last if last.stop_match is not None else None
        if stop is not None:
            return self._stopped("".join(parts), stop, update)
        return self._delta("".join(parts), update)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def supply_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        offsets = array("q", [pending.begin for pending in self._pending])
        self._logprobs = DecodedLogprobs(self._tokenizer, columns_of(logprobs), offsets, bytearray(b"\1" * len(offsets)))

    def _read(self, update: SequenceUpdate, parts: list[str]) -> Delta | None:
        detokenizer, params = self._detokenizer, self._params
        end_token = -1
        if update.stop_token_id is not None and not params.include_stop_str_in_output:
            end_token = len(update.token_ids) - 1
        offsets: list[int] = []
        delta = _NO_TEXT
        for number, token_id in enumerate(update.token_ids):
            offsets.append(detokenizer.num_chars)
            delta = detokenizer.push((token_id,)) if number != end_token and params.detokenize else _NO_TEXT
            self.num_tokens += 1
            self._pending.append(_Pending(token_id, offsets[-1], detokenizer.num_chars + detokenizer.has_partial))
            parts.append(delta.text)
            if delta.stop_match is not None:
                break
        if update.logprobs:
            self._add_logprobs(update, offsets, end_token)
        return delta if delta.stop_match is not None else None

    def _add_logprobs(self, update: SequenceUpdate, offsets: Sequence[int], end_token: int) -> None:
        num_read = len(offsets)
        columns = columns_of(update.logprobs)
        columns = columns if num_read == len(columns) else columns[:num_read]
        visible = bytearray([number != end_token for number in range(num_read)])
        added = DecodedLogprobs(self._tokenizer, columns, array("q", offsets), visible)  # the update's own columns, which nothing adds to
        self._logprobs = added if self._logprobs is None else self._logprobs.joined(added)

    def _stopped(self, text: str, stop: Delta, update: SequenceUpdate) -> OutputDelta:
        self.finish = FinishReason.STOP
        token_ids, logprobs = self._release(everything=True)
        if logprobs is not None:
            self._hide_cut(logprobs)
        return OutputDelta(
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=update.prompt_logprobs,
            finish=FinishReason.STOP,
            stop_reason=stop.stop_match,
            engine_finish=EngineFinish(self.num_tokens, FinishReason.STOP) if update.finish is None else None,
        )

    def _hide_cut(self, logprobs: DecodedLogprobs) -> None:
        """Hides tokens wholly within the stop string that was cut off."""
        num_shown = self._detokenizer.num_released
        for place, (token_id, offset) in enumerate(zip(logprobs.columns.token_ids, logprobs.text_offsets, strict=True)):
            if offset >= num_shown and self._tokenizer.token_bytes(token_id):
                logprobs.visible[place] = False

    def _delta(self, text: str, update: SequenceUpdate) -> OutputDelta:
        self.finish = update.finish
        token_ids, logprobs = self._release(everything=update.finish is not None or not self._params.detokenize)
        asked = update.stop_token_id if update.stop_token_id in self._params.stop_token_ids else None
        return OutputDelta(
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=update.prompt_logprobs,
            finish=update.finish,
            stop_reason=asked if update.finish is FinishReason.STOP else None,
            error=update.error,
        )

    def _release(self, *, everything: bool) -> tuple[tuple[int, ...], DecodedLogprobs | None]:
        pending, released = self._pending, self._detokenizer.num_released
        ready: list[int] = []
        while pending and (everything or pending[0].end <= released):
            ready.append(pending.popleft().token_id)
        return tuple(ready), self._release_logprobs(len(ready))

    def _release_logprobs(self, count: int) -> DecodedLogprobs | None:
        logprobs = self._logprobs
        if logprobs is None or not count:
            return None
        self._logprobs = logprobs.part(count, len(logprobs)) if count < len(logprobs) else None
        return logprobs if self._logprobs is None else logprobs.part(0, count)


_NOTHING = OutputDelta()
_NO_TEXT = Delta()


def decoded_prompt_logprobs(tokenizer: Tokenizer, prompt_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> DecodedLogprobs:
    """Log-probabilities of positions from 1 on: the first token has none."""
    offsets, decoded = Detokenizer(tokenizer, skip_special_tokens=False), DecodedLogprobs(tokenizer)
    for token_id, at in zip(prompt_ids, logprobs, strict=False):
        offsets.push((token_id,))
        decoded.columns.append(at)
        decoded.text_offsets.append(offsets.num_chars)
        decoded.visible.append(True)
    return decoded
