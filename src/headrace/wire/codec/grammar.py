"""Grammar <-> its message. The rules of the value are `Grammar.checked`'s; here only the format is checked."""

from __future__ import annotations

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar, ReasoningSpan
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec.enums import GRAMMAR_KIND, GRAMMAR_KIND_NAME
from headrace.wire.service import PROTOCOL_VERSION


def encode_grammar(grammar: Grammar) -> pb.Grammar:
    """Raises what protobuf raises for text that is not valid Unicode; `encode_submit` turns it into InvalidRequest."""
    span = grammar.reasoning
    reasoning = None if span is None else pb.ReasoningSpan(start=span.start, end=span.end, is_open=span.is_open)
    return pb.Grammar(kind=GRAMMAR_KIND[grammar.kind], source=grammar.source, reasoning=reasoning)


def decode_grammar(message: pb.Grammar) -> Grammar:
    """Raises InvalidRequest for a kind that this version does not know."""
    if message.kind not in GRAMMAR_KIND_NAME:
        known = ", ".join(GRAMMAR_KIND)
        raise InvalidRequest("grammar", f"a kind that protocol version {PROTOCOL_VERSION} knows: {known}", message.kind)
    span = message.reasoning
    reasoning = ReasoningSpan(start=span.start, end=span.end, is_open=span.is_open) if message.HasField("reasoning") else None
    return Grammar(GRAMMAR_KIND_NAME[message.kind], message.source, reasoning)
