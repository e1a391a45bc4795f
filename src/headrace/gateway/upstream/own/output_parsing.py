"""Turns a sequence's text into content, reasoning and tool calls, as its model's output formats say.

`EarlierSequence` is what is kept of an answer to go on with it: docs/failover.md, "A client that comes back".
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from hashlib import blake2b

import msgspec
from msgspec import Struct

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar, GrammarKind
from headrace.core.ids import RequestId
from headrace.core.plan import TokenLogprobs
from headrace.core.tools import CallMode, FunctionTool, ToolChoice
from headrace.core.update import FinishReason, SequenceUpdate
from headrace.gateway.upstream.generation_request import Conversation, PlainPrompts
from headrace.gateway.upstream.seam import OutputEvent, ToolCall, made_call_id
from headrace.text.messages import begun_answer
from headrace.text.output.forced import forced_grammar
from headrace.text.output.format_types import ReasoningFormat, ToolFormat
from headrace.text.output.formats import ModelFormats
from headrace.text.output.parser import OutputParser
from headrace.text.output.reading import CallPiece, ParsedDelta
from headrace.text.output.reasoning import ReasoningCount
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputParsing:
    """How the outputs of one prompt are parsed. marker_ids: their text is kept even if special tokens are skipped"""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    functions: Sequence[FunctionTool] = ()
    is_reasoning_open: bool = False
    marker_ids: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls, formats: ModelFormats, tokenizer: Tokenizer, prompt: Conversation | PlainPrompts, prompt_ids: Sequence[int]
    ) -> OutputParsing | None:
        if not isinstance(prompt, Conversation):
            return None
        tools = formats.tools if prompt.shown_tools else None
        reasoning = formats.reasoning if prompt.separates_reasoning else None
        if tools is None and reasoning is None:
            return None
        begun = begun_answer(prompt.messages, continue_final_message=prompt.continue_final_message)
        return cls(
            tools=tools,
            reasoning=reasoning,
            functions=prompt.shown_tools,
            is_reasoning_open=reasoning is not None and formats.is_reasoning_open(tokenizer, prompt_ids, begun),
            marker_ids=formats.marker_ids(tools, reasoning),
        )


class OutputReader:
    """is_passed             all further events are plain content, so that `read` need not be called
    num_reasoning_tokens  tokens whose text begins inside the reasoning, without its markers
    """

    def __init__(self, parsing: OutputParsing, tokenizer: Tokenizer, skipped: Set[int], call_key: str) -> None:
        """skipped: ids of tokens without text; call_key: text unique to the sequence"""
        self._parser = OutputParser(
            parsing.tools, parsing.reasoning, functions=parsing.functions, is_reasoning_open=parsing.is_reasoning_open
        )
        self._id_chars = parsing.tools.call_id_chars if parsing.tools is not None else None
        self._call_key = call_key
        splitter = self._parser.reasoning
        self._count = ReasoningCount(splitter, tokenizer, skipped) if splitter is not None else None
        self.is_passed = False

    @property
    def num_reasoning_tokens(self) -> int:
        return self._count.num_tokens if self._count is not None else 0

    def read(self, event: OutputEvent, token_ids: Sequence[int]) -> OutputEvent:
        if self._count is not None:
            self._count.add(token_ids)
        delta = self._parser.push(event.text)
        if event.finish is not None:
            last = self._parser.finish()
            delta = ParsedDelta(delta.text + last.text, delta.reasoning + last.reasoning, [*delta.tool_calls, *last.tool_calls])
        if self._count is not None:
            self._count.update()
        self.is_passed = self._parser.is_passed
        calls = [self._tool_call(piece) for piece in delta.tool_calls]
        is_cut = event.stop_reason is not None and self._parser.is_call_open
        return event._replace(text=delta.text, reasoning=delta.reasoning, tool_calls=calls, is_call_cut=is_cut)

    def _tool_call(self, piece: CallPiece) -> ToolCall:
        call_id = None if piece.name is None else made_call_id(self._call_key, piece.number, self._id_chars)
        return ToolCall(piece.number, call_id, piece.name, piece.arguments)


def bound_grammar(formats: ModelFormats, prompt: Conversation | PlainPrompts, wanted: Grammar | None) -> Grammar | None:
    """Raises InvalidRequest for functions whose calls cannot be parsed or forced, and for a grammar that cannot be combined with calls."""
    if not isinstance(prompt, Conversation) or not prompt.shown_tools:
        return wanted
    if formats.tools is None:
        remedy = "Name it with --tool-call-parser where the server is started."
        raise InvalidRequest("tools", "a model whose way to write calls is known to the server", None, remedy)
    document = None if wanted is None else _document(wanted, prompt.tool_choice)
    made = forced_grammar(formats.tools, prompt.shown_tools, prompt.tool_choice, document=document, token_ids=formats.token_ids)
    return None if made is None else made.checked(field="tools")


def after_reasoning(
    formats: ModelFormats,
    tokenizer: Tokenizer,
    grammar: Grammar | None,
    prompt: Conversation | PlainPrompts,
    prompt_ids: Sequence[int],
) -> Grammar | None:
    if grammar is None or not isinstance(prompt, Conversation):
        return grammar
    begun = begun_answer(prompt.messages, continue_final_message=prompt.continue_final_message)
    return replace(grammar, reasoning=formats.reasoning_span(tokenizer, prompt_ids, begun))


def _document(wanted: Grammar, choice: ToolChoice) -> Mapping[str, object]:
    if choice.mode is CallMode.REQUIRED:
        rule = 'tool_choice "auto" or "none" beside it, because the output is calls alone'
        raise InvalidRequest("grammar", rule, None, "Leave one of the two out.")
    if wanted.kind is not GrammarKind.JSON_SCHEMA:
        rule = 'a JSON schema where the model may call functions, or tool_choice "none" beside it'
        raise InvalidRequest("grammar", rule, str(wanted.kind), "Send functions and grammar in two requests.")
    schema: object = json.loads(wanted.source)
    return schema if isinstance(schema, dict) else {} if schema else {"not": {}}


ID_TYPE = "i"


class EarlierSequence(Struct, array_like=True, frozen=True):
    output_ids: bytes
    finish: str | None = None
    stop_token_id: int | None = None


class EarlierCallOutput(Struct, array_like=True, frozen=True):
    """prompt_digest       digest of the prompt's ids: a template may write today's date, so that the same request has another prompt
    num_counted_tokens  output tokens that the requests so far were charged for; 0: written by a version without this field
    adapter_digest      empty without an adapter
    """

    seed: int
    prompt_digest: bytes
    numerics: dict[str, str]
    num_cached_tokens: int | None
    sequences: tuple[EarlierSequence, ...]
    num_counted_tokens: int = 0
    adapter_digest: str = ""

    def up_to(self, offsets: Sequence[int]) -> EarlierCallOutput:
        """Cut at `OutputEvent.offset`s."""
        return msgspec.structs.replace(self, sequences=tuple(map(_cut, self.sequences, offsets)))


def _cut(sequence: EarlierSequence, offset: int) -> EarlierSequence:
    kept_bytes = offset * array(ID_TYPE).itemsize
    return sequence if kept_bytes > len(sequence.output_ids) else EarlierSequence(sequence.output_ids[:kept_bytes])


calls_of = msgspec.msgpack.Decoder(tuple[EarlierCallOutput, ...]).decode
"""Raises msgspec.DecodeError."""


def state_of(*calls: EarlierCallOutput) -> bytes:
    return msgspec.msgpack.encode(calls)


def joined_states(states: Sequence[bytes | None]) -> bytes | None:
    if None in states:
        return None
    return state_of(*[call for state in states if state is not None for call in calls_of(state)])


def prompt_digest(prompt_ids: Sequence[int]) -> bytes:
    return blake2b(array(ID_TYPE, prompt_ids).tobytes(), digest_size=16).digest()


class EarlierUpdates:
    """The first update of sequence 0 has the number of cached prompt tokens."""

    def __init__(self, call: EarlierCallOutput, request_id: RequestId) -> None:
        self._request_id = request_id
        self._call = call
        self._ids = [array(ID_TYPE, sequence.output_ids) for sequence in call.sequences]
        self._offsets = [0] * len(call.sequences)

    def take(self, index: int, offset: int | None = None) -> SequenceUpdate:
        sequence, ids, begin = self._call.sequences[index], self._ids[index], self._offsets[index]
        end = len(ids) if offset is None else min(offset, len(ids))
        finish = sequence.finish if (offset is None or offset > len(ids)) and begin <= len(ids) else None
        self._offsets[index] = end if finish is None else end + 1
        return SequenceUpdate(
            request_id=self._request_id,
            epoch=0,
            index=index,
            token_ids=tuple(ids[begin:end]),
            finish=None if finish is None else FinishReason(finish),
            stop_token_id=None if finish is None else sequence.stop_token_id,
            num_cached_tokens=self._call.num_cached_tokens if index == 0 and begin == 0 else None,
        )


@dataclass(slots=True)
class RecomputedLogprobs:
    """Ids are kept without log-probabilities, so some are computed again. ids: in order, those whose text was held back when the client
    stopped
    """

    ids: Sequence[int]
    columns: list[TokenLogprobs]

    @property
    def is_complete(self) -> bool:
        return len(self.columns) == len(self.ids)

    def take(self, update: SequenceUpdate) -> SequenceUpdate | None:
        count = min(len(self.ids) - len(self.columns), len(update.token_ids))
        begin = len(self.columns)
        is_equal = tuple(self.ids[begin : begin + count]) == update.token_ids[:count]
        self.columns.extend(update.logprobs[:count])
        if not is_equal or (update.finish is not None and not self.is_complete):
            return None
        return update._replace(token_ids=update.token_ids[count:], logprobs=update.logprobs[count:])
