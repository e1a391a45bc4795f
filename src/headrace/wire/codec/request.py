"""Converts the three commands that a gateway sends (submit, cancel, finish) to their messages and back."""

from __future__ import annotations

import math

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar, ReasoningSpan
from headrace.core.request import NO_TIER, EngineRequest, TierTerms
from headrace.core.sampling import SamplingParams
from headrace.core.update import FinishReason
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec.fields import FINISH_KIND, FINISH_REASON, GRAMMAR_KIND, GRAMMAR_KIND_NAME, PRIORITY, PRIORITY_CLASS, SameFields
from headrace.wire.service import PROTOCOL_VERSION, Handle, MalformedFrame

_SPAN = SameFields(ReasoningSpan, pb.ReasoningSpan)


def encode_grammar(grammar: Grammar) -> pb.Grammar:
    """Raises ValueError for a lone surrogate; `encode_submit` makes an InvalidRequest of it."""
    span = grammar.reasoning
    reasoning = None if span is None else _SPAN.encode(span)
    return pb.Grammar(kind=GRAMMAR_KIND[grammar.kind], source=grammar.source, reasoning=reasoning)


def decode_grammar(message: pb.Grammar) -> Grammar:
    """Raises InvalidRequest for an unknown kind."""
    if message.kind not in GRAMMAR_KIND_NAME:
        known = ", ".join(GRAMMAR_KIND)
        raise InvalidRequest("grammar", f"a kind that protocol version {PROTOCOL_VERSION} knows: {known}", message.kind)
    reasoning = _SPAN.decode(message.reasoning) if message.HasField("reasoning") else None
    return Grammar(GRAMMAR_KIND_NAME[message.kind], message.source, reasoning)


MAX_REQUEST_ID_CHARS = 128
MAX_REMAINING_MS = 100 * 365 * 24 * 3600 * 1000
"""A deadline further away than a century travels as one: the field has 64 bits."""
MAX_NAMED_FIELDS = 16
_NOT_HONOURED = ("kv_ticket", "modality_digests")
_PARAMS = SameFields(SamplingParams, pb.Params, but=("logit_bias", "logit_bias_ids", "logit_bias_values", "structured_outputs"))
_OTHERWISE = ("handle", "task", "params", "priority", "grammar", "tier", "weight", "deadline_at", "deadline_remaining_ms")
_SUBMIT = SameFields(EngineRequest, pb.Submit, but=(*_OTHERWISE, *_NOT_HONOURED))
_TIER = SameFields(TierTerms, pb.TierTerms)
_TASKS: dict[int, str] = {pb.TASK_UNSPECIFIED: "none", pb.TASK_EMBED: "embed", pb.TASK_SCORE: "score"}


def encode_submit(request: EngineRequest, handle: Handle) -> pb.Command:
    """The deadline is set by `set_remaining` when the command is written. Raises InvalidRequest."""
    if request.deadline_at is not None and not math.isfinite(request.deadline_at):
        raise InvalidRequest("deadline_at", "a finite number of seconds", request.deadline_at)
    if request.params.structured_outputs is not None:
        raise InvalidRequest("structured_outputs", "none on the wire: it travels as the request's grammar")
    try:
        submit = _SUBMIT.encode(
            request,
            handle=handle,
            task=pb.TASK_GENERATE,
            params=_encode_params(request.params),
            priority=PRIORITY[request.priority],
            grammar=None if request.grammar is None else encode_grammar(request.grammar),
            tier=None if request.tier == NO_TIER else _TIER.encode(request.tier),
            weight=1.0,
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(
            "request", "text that is valid Unicode and integers of at most 32 bits", remedy=type(error).__name__
        ) from error
    return pb.Command(submit=submit)


def set_remaining(message: pb.Submit, deadline_at: float | None, now: float) -> None:
    """Rounded up to a millisecond, so that a deadline in the future is never sent as a past one."""
    if deadline_at is not None:
        remaining = min(max((deadline_at - now) * 1000, 0.0), MAX_REMAINING_MS)
        message.deadline_remaining_ms = max(math.ceil(round(remaining, 3)), 1 if remaining > 0 else 0)


def decode_submit(message: pb.Submit, now: float) -> EngineRequest:
    """Raises InvalidRequest for a field that this version does not honour, MalformedFrame when the message breaks the format."""
    if not message.handle:
        raise MalformedFrame("submit: handle must be positive")
    if not 0 < len(message.request_id) <= MAX_REQUEST_ID_CHARS:
        raise MalformedFrame(f"submit: request_id must have 1..{MAX_REQUEST_ID_CHARS} characters")
    if not message.HasField("params"):
        raise MalformedFrame("submit: params are missing")
    if message.priority not in PRIORITY_CLASS:
        raise MalformedFrame(f"submit: unknown priority {message.priority}")
    _refuse_others(message)
    return _SUBMIT.decode(
        message,
        params=_decode_params(message.params),
        priority=PRIORITY_CLASS[message.priority],
        grammar=decode_grammar(message.grammar) if message.HasField("grammar") else None,
        deadline_at=now + message.deadline_remaining_ms / 1000 if message.HasField("deadline_remaining_ms") else None,
        tier=_TIER.decode(message.tier) if message.HasField("tier") else NO_TIER,
    )


def _refuse_others(message: pb.Submit) -> None:
    release = f"protocol version {PROTOCOL_VERSION}"
    if message.task != pb.TASK_GENERATE:
        raise InvalidRequest("task", f"generate, the only task of {release}", _TASKS.get(message.task, message.task))
    for name in _NOT_HONOURED:
        if getattr(message, name):
            raise InvalidRequest(name, f"nothing: {release} does not honour it", remedy="Send this request to a newer engine.")
    parts: list[Message] = [message, message.params, message.grammar, message.grammar.reasoning, message.tier]
    if unknown := [number for part in parts for number in _unknown_fields(part)]:
        raise InvalidRequest("submit", f"the fields of {release}", unknown, "Run the same release on both ends.")


def check_known_fields(where: str, message: Message) -> None:
    """Raises MalformedFrame."""
    if unknown := _unknown_fields(message):
        raise MalformedFrame(f"{where}: fields {unknown} are not of protocol version {PROTOCOL_VERSION}")


def _unknown_fields(message: Message) -> list[int]:
    """At most MAX_NAMED_FIELDS: the error must fit a gRPC status."""
    fields = UnknownFieldSet(message)
    return sorted({fields[i].field_number for i in range(min(len(fields), MAX_NAMED_FIELDS))})


def encode_cancel(handle: Handle) -> pb.Command:
    return pb.Command(cancel=pb.Cancel(handle=handle))


def decode_cancel(message: pb.Cancel) -> Handle:
    check_known_fields("cancel", message)
    return Handle(message.handle)


def encode_finish(handle: Handle, index: int, keep_tokens: int, reason: FinishReason) -> pb.Command:
    return pb.Command(finish=pb.Finish(handle=handle, index=index, keep_tokens=keep_tokens, reason=FINISH_KIND[reason]))


def decode_finish(message: pb.Finish) -> tuple[Handle, int, int, FinishReason]:
    """(handle, sequence index, tokens that the client keeps, finish reason). Raises MalformedFrame."""
    check_known_fields("finish", message)
    if message.reason not in FINISH_REASON:
        raise MalformedFrame(f"finish: unknown reason {message.reason}")
    return Handle(message.handle), message.index, message.keep_tokens, FINISH_REASON[message.reason]


def _encode_params(params: SamplingParams) -> pb.Params:
    bias = params.logit_bias
    return _PARAMS.encode(params, logit_bias_ids=list(bias.keys()), logit_bias_values=list(bias.values()))


def _decode_params(message: pb.Params) -> SamplingParams:
    if len(message.logit_bias_ids) != len(message.logit_bias_values):
        raise MalformedFrame("params: logit_bias columns differ in length")
    bias = dict(zip(message.logit_bias_ids, message.logit_bias_values, strict=True))
    return _PARAMS.decode(message, logit_bias=bias)
