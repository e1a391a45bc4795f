"""Encodes the error with which an engine refuses a request as the protobuf message Rejected, and decodes the message in the gateway.

The gateway gets an error of the same class, with the same fields and message. An error that is a bug arrives as SequenceFailed.
"""

from __future__ import annotations

from headrace.core.errors import (
    HeadraceError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RequestTooLarge,
    SequenceFailed,
    ShownValue,
    Unavailable,
)
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec.text import printable
from headrace.wire.handles import Handle, MalformedFrame

NO_VALUE = "null"
"""Text of `InvalidRequest.value` when the client gave no value."""


def encode_rejected(handle: Handle, error: Exception) -> pb.Rejected:
    """The message of a refused request.

    An error that is not a HeadraceError is a bug. Its text is replaced by a general one, since the text may say more than a client should
    read.
    """
    message = pb.Rejected(handle=handle, kind=_kind(error), message=printable(str(error)))
    if isinstance(error, InvalidRequest):
        message.field, message.limit = printable(error.field), printable(error.limit)
        message.value, message.remedy = printable(error.value), printable(error.remedy)
    if isinstance(error, ModelNotFound):
        message.served.extend(error.served)
    if isinstance(error, Overloaded | Unavailable):
        message.retry_after_s = error.retry_after_s
    if not isinstance(error, HeadraceError):
        message.message = "the engine could not take this request"
    return message


def decode_rejected(message: pb.Rejected) -> tuple[Handle, Exception]:
    """(handle of the refused request, the error to raise for it). Raises MalformedFrame for an unknown kind."""
    return Handle(message.handle), _error(message)


def _kind(error: Exception) -> pb.RejectKind:
    match error:
        case ModelNotFound():
            return pb.REJECT_MODEL_NOT_FOUND
        case RequestTooLarge():
            return pb.REJECT_TOO_LARGE
        case InvalidRequest():
            return pb.REJECT_INVALID
        case Overloaded():
            return pb.REJECT_OVERLOADED
        case Unavailable():
            return pb.REJECT_UNAVAILABLE
        case _:
            return pb.REJECT_FAILED


def _error(message: pb.Rejected) -> Exception:
    value = None if message.value == NO_VALUE else ShownValue(message.value)
    match message.kind:
        case pb.REJECT_INVALID:
            return InvalidRequest(message.field, message.limit, value, message.remedy)
        case pb.REJECT_TOO_LARGE:
            return RequestTooLarge(message.field, message.limit, value, message.remedy)
        case pb.REJECT_MODEL_NOT_FOUND:
            return ModelNotFound(ShownValue(message.value), list(message.served))
        case pb.REJECT_OVERLOADED:
            return Overloaded(message.message, retry_after_s=message.retry_after_s)
        case pb.REJECT_UNAVAILABLE:
            return Unavailable(message.message, retry_after_s=message.retry_after_s)
        case pb.REJECT_FAILED:
            return SequenceFailed(message.message)
    raise MalformedFrame(f"rejected: unknown kind {message.kind}")
