"""Encodes and decodes the frames between the gateway and a text worker, one each way per job, and has the protocols of both sides. Nothing
in a frame can name code.

4 bytes  length of the head, little endian
4 bytes  length of the tail
head     JSON: a `WorkerJob` or a `WorkerReply`, decoded against these types only
tail     bytes beside it: a request's body, or token ids as 32-bit integers of this machine
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from headrace.core.errors import CheckpointError, HeadraceError, InvalidRequest, RequestTooLarge, ShownValue
from headrace.gateway.http.errors import ContextLengthExceeded, UnsupportedMediaType
from headrace.gateway.text_workers.limits import START_CPU_S
from headrace.text.template_switch import TemplateSwitch

SIZES = struct.Struct("<II")
TYPECODE = "i"
MAX_ID = 2**31 - 1


class HostConfig(msgspec.Struct):
    """start_cpu_s: most CPU seconds for compiling one model's templates and rendering a greeting"""

    models: dict[str, str]
    start_cpu_s: float = START_CPU_S


class WorkerJob(msgspec.Struct, tag_field="job"):
    pass


class ParseBody(WorkerJob, tag="parse"):
    """The tail is a request's body, which is parsed as `text_host.PARSERS` says for the path."""

    path: str


class EncodeChat(WorkerJob, tag="chat"):
    """max_model_len: most tokens, else the conversation is refused; None: any length"""

    model: str
    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    kwargs: dict[str, Any]
    max_model_len: int | None
    tools: list[dict[str, Any]] = []
    switches: list[TemplateSwitch] = []


class EncodeTexts(WorkerJob, tag="texts"):
    model: str
    texts: list[str]
    add_special_tokens: bool
    max_model_len: int | None


class DecodeIds(WorkerJob, tag="decode"):
    """The tail is token ids from `field` of a request."""

    model: str
    field: str
    skip_special_tokens: bool


class Tokenize(WorkerJob, tag="tokenize"):
    prompt: EncodeChat | EncodeTexts
    needs_texts: bool


class WorkerReply(msgspec.Struct, tag_field="answer"):
    """is_last: the worker ends after it, because it has grown too much"""

    is_last: bool = False


class Ids(WorkerReply, tag="ids", kw_only=True):
    """The tail is the ids of all texts. counts: number of ids of each; unread: conversation fields that the template does not read"""

    counts: list[int]
    unread: list[str] = []


class Text(WorkerReply, tag="text", kw_only=True):
    text: str


class Tokens(WorkerReply, tag="tokens", kw_only=True):
    """The tail is two pieces of JSON: a list of ids, num_id_bytes long, then a list of strings or null."""

    count: int
    num_id_bytes: int


class Json(WorkerReply, tag="json"):
    pass


class JobRefused(WorkerReply, tag="refused", kw_only=True):
    """An error of `REFUSALS`, to be raised in the gateway for the client."""

    kind: str
    message: str = ""
    field: str = ""
    limit: str = ""
    value: str | None = None
    remedy: str = ""


class NoMemory(WorkerReply, tag="no memory"):
    pass


class Failed(WorkerReply, tag="failed", kw_only=True):
    """A fault of ours or of the model's files: `detail` says where, without a client's text."""

    detail: str


AnyJob = ParseBody | EncodeChat | EncodeTexts | DecodeIds | Tokenize
AnyAnswer = Ids | Text | Tokens | Json | JobRefused | NoMemory | Failed
REFUSALS: dict[str, type[InvalidRequest]] = {kind.__name__: kind for kind in (InvalidRequest, RequestTooLarge, ContextLengthExceeded)}
read_job: Callable[[bytes], AnyJob] = msgspec.json.Decoder(AnyJob).decode
read_answer: Callable[[bytes | memoryview], AnyAnswer] = msgspec.json.Decoder(AnyAnswer).decode


def frame(head: WorkerJob | WorkerReply, tail: bytes | memoryview = b"") -> bytes:
    data = msgspec.json.encode(head)
    return b"".join((SIZES.pack(len(data), len(tail)), data, tail))


def ids_to_bytes(field: str, token_ids: Sequence[int]) -> bytes:
    """Raises InvalidRequest about `field` for an id that no vocabulary has."""
    try:
        return array(TYPECODE, token_ids).tobytes()
    except OverflowError:
        low, high = min(token_ids), max(token_ids)
        raise InvalidRequest(field, f"token ids with 0 <= id <= {MAX_ID}", low if low < 0 else high) from None


def ids_from_bytes(data: bytes | memoryview) -> array[int]:
    ids = array(TYPECODE)
    ids.frombytes(data)
    return ids


def refusal_of(error: InvalidRequest | UnsupportedMediaType) -> JobRefused:
    if isinstance(error, UnsupportedMediaType):
        return JobRefused(kind=UnsupportedMediaType.__name__, message=str(error))
    kind = next(name for name, kind in reversed(REFUSALS.items()) if isinstance(error, kind))
    value = None if error.given is None else error.value
    return JobRefused(kind=kind, field=error.field, limit=error.limit, value=value, remedy=error.remedy)


def error_of(answer: JobRefused) -> HeadraceError:
    if answer.kind == UnsupportedMediaType.__name__:
        return UnsupportedMediaType(answer.message)
    value = None if answer.value is None else ShownValue(answer.value)
    return REFUSALS[answer.kind](answer.field, answer.limit, value, answer.remedy)


HOST_LOST = -1
"""Signal of a worker that ended with its host."""


class Worker(Protocol):
    """Does one job at a time."""

    def send(self, data: bytes) -> None: ...

    def kill(self) -> None:
        """`Owner.ended` is called afterwards."""
        ...


class Owner(Protocol):
    def answered(self, worker: Worker, answer: AnyAnswer, tail: memoryview) -> None: ...

    def ended(self, worker: Worker, number: int) -> None:
        """number: of the signal that ended the worker; 0: none; or HOST_LOST"""
        ...


class Workers(Protocol):
    @property
    def reason(self) -> str:
        """In words that clients may see; empty: a worker can be started."""
        ...

    @property
    def failures(self) -> Mapping[str, CheckpointError]:
        """Model -> why its text cannot be used."""
        ...

    async def start(self) -> None:
        """Return when each model's text is loaded or in `failures`. Raises CheckpointError if no worker can be started."""
        ...

    async def add(self, owner: Owner) -> Worker:
        """Raises OSError if none can be started now."""
        ...

    async def close(self) -> None: ...
