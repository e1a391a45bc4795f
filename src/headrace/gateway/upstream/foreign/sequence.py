"""Keeps the state of one sequence of a foreign server's answer, and reads the words that name its end.

For a word on none of the lists a stem decides; a word that may mean a failure counts as one and breaks the answer, since its text may be
cut off.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from headrace.core.update import FinishReason
from headrace.gateway.upstream.foreign.chunk import SentCall, SentChoice, SentDelta
from headrace.gateway.upstream.foreign.errors import BrokenStream
from headrace.gateway.upstream.foreign.tool_calls import CallPieces
from headrace.gateway.upstream.foreign.values import SaidText, SplitText
from headrace.gateway.upstream.seam import OutputEvent

MAX_WORD_CHARS = 64


def _plain(word: str) -> str:
    return "".join(filter(str.isalnum, word)).lower().removeprefix("finishreason")


def _stems(words: str) -> re.Pattern[str]:
    return re.compile("|".join(words.split()))


def _words(*lines: str) -> frozenset[str]:
    return frozenset([_plain(word) for line in lines for word in line.split()])


RUNNING = _words("null none unspecified not_finished in_progress running generating pending processing streaming") | {""}
"""Some servers send them before the end."""

STOPPED = _words(
    "stop stopped eos eos_token end_of_sequence end_of_turn end_of_text end_turn eot eom end ended",
    "stop_sequence stop_sequences stop_string stop_str stop_word stop_words stop_token stop_tokens stop_criteria_met",
    "stop_string_found eos_found normal natural complete completed done finish finished final success succeeded ok no_error",
)
CALLED = _words("tool_calls tool_call tool_use tool_uses function_call function_calls")
"""Calls are complete with these, also where a stop string or a stop token ended the output."""

LENGTH = _words(
    "length max_length length_limit output_limit truncated token_limit token_limit_reached",
    "max_token max_tokens max_tokens_reached max_new_tokens max_output_tokens max_completion_tokens",
    "model_length max_model_length context_length max_context_length context_length_exceeded",
    "context_window_exceeded model_context_window_exceeded",
)
FILTERED = _words(
    "content_filter content_filtered content_filter_stop filter filtered blocked blocklist moderation sensitive refusal",
    "safety image_safety recitation prohibited_content spii guardrail guardrails guardrail_intervened error_toxic",
)
FAILED = _words(
    "error errors internal_error server_error network_error connection_error error_limit fail failed failure exception incomplete",
    "abort aborted cancel canceled cancelled user_cancel user_canceled user_cancelled interrupted disconnect disconnected",
    "timeout timed_out time_limit deadline deadline_exceeded overloaded insufficient_system_resource insufficient_system_resources",
    "malformed_function_call malformed_tool_call oom expired",
)
FAILED_STEMS = _stems(
    "error fail abort cancel malform timeout timed disconnect unavailable overload reject terminat unfinish unload interrupt incomplete"
    " exception invalid badrequest unexpected kill preempt crash outofmemory denied quota ratelimit throttl userstop"
)
FILTERED_STEMS = _stems("contentfilter safety block prohibit recitation refus moderat guardrail toxic violat")
LENGTH_STEMS = _stems("length maxtoken maxoutput maxnew maxpredicted maxcompletion maxtime limit truncat exceed")


class ForeignFinish(NamedTuple):
    finish: FinishReason
    stop_reason: int | str | None = None
    is_known: bool = True
    is_called: bool = False
    is_filtered: bool = False


def ending(word: str, stop_reason: int | str | None) -> ForeignFinish | None:
    """Raises BrokenStream for a word of failure."""
    plain = _plain(word)
    if plain in RUNNING:
        return None
    if plain in STOPPED:
        return ForeignFinish(FinishReason.STOP, stop_reason)
    if plain in CALLED:
        return ForeignFinish(FinishReason.STOP, stop_reason, is_called=True)
    is_listed = plain in LENGTH or plain in FILTERED
    if plain in FAILED or (not is_listed and FAILED_STEMS.search(plain)):
        raise BrokenStream("a sequence ended for a reason that is no end of an answer")
    if plain in FILTERED or (not is_listed and FILTERED_STEMS.search(plain)):
        return ForeignFinish(FinishReason.STOP, is_filtered=True)
    if is_listed or LENGTH_STEMS.search(plain):
        return ForeignFinish(FinishReason.LENGTH)
    return ForeignFinish(FinishReason.STOP, word.strip()[:MAX_WORD_CHARS], is_known=False)


_NOTHING_NEW = SentDelta()


class SequenceOutput:
    """said_text, said_reasoning, has_calls  output in deltas so far; a server may also send a whole message, which repeats it
    is_sure            the named end needs no other sign of the end
    """

    __slots__ = (
        *("index", "text", "reasoning", "calls", "has_tokens", "said_text", "said_reasoning", "has_calls"),
        *("num_logprob_chars", "num_passed_bytes", "ending", "is_whole", "is_sure", "is_revoked", "is_over"),
    )

    def __init__(self, index: int, call_key: str) -> None:
        self.index = index
        self.text, self.reasoning, self.calls = SplitText(), SplitText(), CallPieces(call_key)
        self.said_text, self.said_reasoning = SaidText(), SaidText()
        self.num_logprob_chars = self.num_passed_bytes = 0
        self.has_tokens = self.has_calls = False
        self.ending: ForeignFinish | None = None
        self.is_whole = self.is_sure = self.is_revoked = self.is_over = False

    @property
    def has_begun(self) -> bool:
        return self.has_tokens or self.ending is not None

    def added(self, choice: SentChoice) -> tuple[str, str, Sequence[SentCall]]:
        delta, message = choice.delta, choice.message
        self.is_whole = delta is None and not self.has_tokens
        delta = delta or _NOTHING_NEW
        text, reasoning, calls = delta.content or delta.refusal or choice.text or "", delta.any_reasoning, delta.calls
        self.said_text.add(text)
        self.said_reasoning.add(reasoning)
        self.has_calls = self.has_calls or bool(calls)
        if message is None:
            return text, reasoning, calls
        return (
            text + _rest_of_message(self.said_text, message.content or message.refusal or ""),
            reasoning + _rest_of_message(self.said_reasoning, message.any_reasoning),
            calls if self.has_calls else message.calls,
        )

    def end(self, end: ForeignFinish) -> OutputEvent:
        """Raises BrokenStream for a call without a name."""
        is_cut = (end.stop_reason is not None or end.is_filtered) and not end.is_called and self.calls.is_open
        return OutputEvent(
            index=self.index,
            text=self.text.rest(),
            finish=end.finish,
            stop_reason=end.stop_reason,
            reasoning=self.reasoning.rest(),
            tool_calls=self.calls.finish(is_whole=end.finish is FinishReason.STOP and not is_cut),
            is_call_cut=is_cut,
            is_filtered=end.is_filtered,
        )


def _rest_of_message(said: SaidText, whole: str) -> str:
    rest = said.rest_of(whole) or ""
    if said.num_chars:
        said.add(rest)
    return rest
