"""Keeps the state of one sequence of a foreign server's answer, and joins what its pieces add. `answer` has all sequences."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.finish import FinishReason
from headrace.gateway.upstream.foreign.chunk import SentCall, SentChoice, SentDelta
from headrace.gateway.upstream.foreign.joined_text import SaidText, SplitText
from headrace.gateway.upstream.foreign.tool_calls import CallPieces
from headrace.gateway.upstream.foreign.words import ForeignFinish
from headrace.gateway.upstream.seam import OutputEvent

_NOTHING_NEW = SentDelta()


class SequenceOutput:
    """The state of one sequence.

    has_tokens         the client was given output
    num_logprob_chars  characters of the tokens that had log-probabilities
    said_text, said_reasoning, has_calls  output in deltas so far; a server may also send a whole message, which repeats it
    is_whole           all output came as one message or text, as in an answer without streaming
    ending             the end that the server named last; None: it has not named one
    is_sure            the named end needs no other sign of the end
    is_revoked         output followed a named end
    is_over            the client was given the end
    num_passed_bytes   of the fields that clients send back
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
        """Text, reasoning and call pieces that a choice adds: its delta, and the part of its message that no delta has given."""
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
            text + _unsaid(self.said_text, message.content or message.refusal or ""),
            reasoning + _unsaid(self.said_reasoning, message.any_reasoning),
            calls if self.has_calls else message.calls,
        )

    def end(self, end: ForeignFinish) -> OutputEvent:
        """The last event. Raises BrokenStream for a call without a name."""
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


def _unsaid(said: SaidText, whole: str) -> str:
    """The rest of a whole message after the text of deltas; empty if the message does not begin with that text."""
    rest = said.rest_of(whole) or ""
    if said.num_chars:
        said.add(rest)
    return rest
