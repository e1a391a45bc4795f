"""Encodes a Grammar as its protobuf message, and decodes the message. Only the format is checked; `Grammar.checked` checks the value."""

from __future__ import annotations

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar, ReasoningSpan
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec.enums import GRAMMAR_KIND, GRAMMAR_KIND_NAME
from headrace.wire.codec.same_fields import SameFields
from headrace.wire.service import PROTOCOL_VERSION

_SPAN = SameFields(ReasoningSpan, pb.ReasoningSpan)


def encode_grammar(grammar: Grammar) -> pb.Grammar:
    """The message of a grammar.

    Raises ValueError for a source with a lone surrogate, which protobuf cannot encode; `encode_submit` makes an InvalidRequest of it.
    """
    span = grammar.reasoning
    reasoning = None if span is None else _SPAN.encode(span)
    return pb.Grammar(kind=GRAMMAR_KIND[grammar.kind], source=grammar.source, reasoning=reasoning)


def decode_grammar(message: pb.Grammar) -> Grammar:
    """Raises InvalidRequest for a kind that this version does not know."""
    if message.kind not in GRAMMAR_KIND_NAME:
        known = ", ".join(GRAMMAR_KIND)
        raise InvalidRequest("grammar", f"a kind that protocol version {PROTOCOL_VERSION} knows: {known}", message.kind)
    reasoning = _SPAN.decode(message.reasoning) if message.HasField("reasoning") else None
    return Grammar(GRAMMAR_KIND_NAME[message.kind], message.source, reasoning)
