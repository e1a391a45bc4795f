"""What an upstream answers with: events of a stream and the tokens it has used."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from headrace.core.finish import FinishReason
from headrace.core.plan import LogprobColumns
from headrace.gateway.upstream.generation_request import string_bytes
from headrace.text.logprobs import DecodedLogprobs

TOOL_CALL_BYTES = 256
"""Memory of one piece of a tool call, without its strings."""

CALL_ID_CHARS = 24
"""Characters of a call's id after "call_", where its format demands no length."""


def made_call_id(call_key: str, number: int, num_chars: int | None = None) -> str:
    """The id of a sequence's call. call_key: what distinguishes its calls from all others;  num_chars: length that the format demands"""
    digest = blake2b(f"{call_key}/{number}".encode()).hexdigest()
    return digest[:num_chars] if num_chars else f"call_{digest[:CALL_ID_CHARS]}"


class ToolCall(NamedTuple):
    """A piece of a tool call, in OpenAI's terms: `call_id` and `name` come with a call's first piece, `arguments` piece by piece."""

    number: int
    call_id: str | None
    name: str | None
    arguments: str

    @property
    def num_bytes(self) -> int:
        return TOOL_CALL_BYTES + sum([string_bytes(text) for text in (self.call_id or "", self.name or "", self.arguments)])

    @classmethod
    def joined(cls, pieces: Sequence[ToolCall]) -> ToolCall:
        """All pieces of one call as one."""
        call_id = next((piece.call_id for piece in pieces if piece.call_id), None)
        name = next((piece.name for piece in pieces if piece.name), None)
        return cls(pieces[0].number, call_id, name, "".join([piece.arguments for piece in pieces]))


class OutputEvent(NamedTuple):
    """What is new in one sequence. A tuple, because one is made per sequence and frame; fields are given by name.

    index            of the sequence within the request: sequence i of prompt p is p * n + i
    num_tokens       output tokens that the event carries
    place            of our engines: output ids of the sequence that were read when the event was made, plus one once it has ended
    logprobs         of its tokens in order, in one or more parts, none of them empty; none where not asked for
    prompt_logprobs  pages of prompt positions 1.. in order, over one or more events; `PreparedPrompt.decoded_logprobs` adds the texts
    finish           set exactly once, on the sequence's last event
    stop_reason      beside FinishReason.STOP: the stop string or stop token id; None for the model's own end token
    error            beside FinishReason.ERROR: for the operator
    is_call_cut      beside FinishReason.STOP: the client's stop string or stop token ended the output inside a call's arguments
    is_filtered      beside FinishReason.STOP: the moderation of a foreign server's provider ended the output
    reasoning, tool_calls  what was separated from the text, here (`upstream.output_stage`) or by a foreign server
    """

    index: int  # type: ignore[assignment]  # hides a tuple's search, which means nothing here
    text: str = ""
    num_tokens: int = 0
    place: int = 0
    logprobs: Sequence[DecodedLogprobs] = ()
    prompt_logprobs: Sequence[LogprobColumns] = ()
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    is_call_cut: bool = False
    is_filtered: bool = False

    @property
    def text_bytes(self) -> int:
        """Approximate memory of its strings: text, reasoning, tool calls, stop reason, error."""
        text = self.text
        num_bytes = len(text) if text.isascii() else string_bytes(text)  # nearly every event: once per token
        if self.reasoning or self.tool_calls:
            num_bytes += string_bytes(self.reasoning) + sum([call.num_bytes for call in self.tool_calls])
        if self.error is not None:
            num_bytes += string_bytes(self.error)
        if self.stop_reason is not None and isinstance(self.stop_reason, str):
            num_bytes += string_bytes(self.stop_reason)
        return num_bytes

    @property
    def num_bytes(self) -> int:
        """`text_bytes` and its log-probabilities. The prompt's are charged separately, before anything runs."""
        num_bytes = self.text_bytes
        if self.logprobs:
            num_bytes += sum([part.num_bytes for part in self.logprobs])
        return num_bytes

    @property
    def num_logprob_tokens(self) -> int:
        """Output tokens that have log-probabilities."""
        return sum([len(part) for part in self.logprobs])

    @classmethod
    def joined(cls, events: Sequence[OutputEvent]) -> OutputEvent:
        """Consecutive events of one sequence as one. Log-probabilities are passed on by reference: cost is linear in the events."""
        last = events[-1]
        if len(events) == 1:
            return last
        return cls(
            last.index,
            "".join([event.text for event in events]),
            sum([event.num_tokens for event in events]),
            last.place,
            tuple([part for event in events for part in event.logprobs]),
            tuple([page for event in events for page in event.prompt_logprobs]),
            last.finish,
            last.stop_reason,
            last.error,
            "".join([event.reasoning for event in events]),
            tuple([call for event in events for call in event.tool_calls]),
            last.is_call_cut,
            last.is_filtered,
        )


class TokenUsage(NamedTuple):
    """Tokens that a request has used so far. A prompt counts once, however many sequences continue it.

    reasoning_tokens  those of `completion_tokens` whose text is reasoning that was separated from the answer
    earlier_tokens    those of `completion_tokens` that an earlier request has produced and counted, whose stream this one continues
    earlier_prompt_tokens  those of `prompt_tokens` that it has counted
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
    earlier_tokens: int = 0
    earlier_prompt_tokens: int = 0

    @property
    def charged(self) -> TokenUsage:
        """What this request is charged for: the usage without what an earlier request has counted."""
        prompt_tokens = self.prompt_tokens - self.earlier_prompt_tokens
        return TokenUsage(prompt_tokens, self.completion_tokens - self.earlier_tokens, min(self.cached_tokens, prompt_tokens))


NO_USAGE = TokenUsage(0, 0, 0)


def added(one: TokenUsage, other: TokenUsage) -> TokenUsage:
    """What two requests used together."""
    return TokenUsage(*(sum(pair) for pair in zip(one, other, strict=True)))
