"""Writes a request in a form that one foreign server takes, and says what its failure means for the request.

`ForeignServer` keeps a form for later requests once an answer came in it, if the server does not know the field's name (`field_errors`): a
value that it refuses is one client's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import aiohttp

from headrace.core.errors import HeadraceError, InvalidRequest, Overloaded, Unavailable
from headrace.core.ids import RequestId
from headrace.core.sampling import MAX_SEED
from headrace.gateway.http.errors import ContentRefused, foreign_overflow
from headrace.gateway.upstream.foreign.errors import CLIENT_FAULTS, MAX_ERROR_BYTES, BrokenStream, ErrorKind, SentError
from headrace.gateway.upstream.foreign.events import decoder_for, unpacked
from headrace.gateway.upstream.foreign.field_errors import LEFT_OUT_INSIDE, LIMITS, Refusal
from headrace.gateway.upstream.generation_request import PASSED_IN_BODY, PASSED_IN_CHAT, names_inside, without

WITHOUT_MEANING = frozenset(("stream_options", *PASSED_IN_BODY, *PASSED_IN_CHAT))

_MARKED = ("messages", "tools")

SALT = "cache_salt"

ADDED = frozenset(("model", "stream", SALT))

MAX_ADAPTATIONS = 3


@dataclass(slots=True, kw_only=True)
class ForeignRequest:
    """is_one_by_one: a server refused `n` in this request, or left choices out"""

    request_id: RequestId
    path: str
    fields: dict[str, Any]
    salt: bytes
    num_prompts: int
    num_sequences: int
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    is_one_by_one: bool = False

    @property
    def _n(self) -> int:
        return self.num_sequences // self.num_prompts

    def parts(self) -> list[Sequence[int]]:
        """Beside several prompts `n` would leave open whose answer a server that ignores `n` has given."""
        size = self._n if self._n > 1 else self.num_sequences
        return [range(first, first + size) for first in range(0, self.num_sequences, size)]

    def fields_of(self, indices: Sequence[int]) -> dict[str, Any]:
        if len(indices) == self.num_sequences:
            return self.fields
        fields, first = dict(self.fields), indices[0] % self._n
        if self.num_prompts > 1:
            prompts = [fields["prompt"][number] for number in dict.fromkeys(index // self._n for index in indices)]
            fields["prompt"] = prompts[0] if len(prompts) == 1 else prompts
        if "n" in fields:
            fields["n"] = len(indices)
        if first and (seed := fields.get("seed")) is not None:  # the same seed would draw the same answer
            fields["seed"] = seed + first if seed <= MAX_SEED - first else seed - first
        return fields

    def num_prompts_of(self, indices: Sequence[int]) -> int:
        return len({index // self._n for index in indices})

    def share(self, indices: Sequence[int], refused: Collection[str], *, takes_one_prompt: bool) -> Sequence[int]:
        return indices[:1] if self.is_one_by_one or (takes_one_prompt if self._n == 1 else "n" in refused) else indices


def written(fields: Mapping[str, Any], refused: Collection[str]) -> dict[str, Any]:
    made = {name: value for name, value in fields.items() if name not in refused or name not in WITHOUT_MEANING}
    if made.get("n") == 1 or "n" in refused:
        made.pop("n", None)
    for name, other in (LIMITS, LIMITS[::-1]):
        if name in refused and name in made:
            made[other] = made.pop(name)
            break
    for place in _MARKED:
        if (marks := {name for name in LEFT_OUT_INSIDE if f"{place}.{name}" in refused}) and place in made:
            made[place] = without(made[place], marks)
    return made


def refuse(refused: set[str], name: str) -> None:
    if name in LIMITS:
        refused.difference_update(LIMITS)
    refused.add(name)


def is_adaptable(refusal: Refusal, tried: Collection[Refusal]) -> bool:
    """A server that ignores the other name of a limit would give a longer answer."""
    names = {each.field for each in tried}
    if len(tried) == MAX_ADAPTATIONS:
        return False
    if refusal.field in LIMITS:
        return refusal.is_name and names.isdisjoint(LIMITS)
    is_mark = refusal.field.startswith(tuple(f"{place}." for place in _MARKED))
    may_go = is_mark or refusal.field in WITHOUT_MEANING or refusal.field == "n"
    return may_go and refusal.field not in names


def names_in(fields: Mapping[str, Any]) -> set[str]:
    """Marks inside messages and functions by their place: `messages.cache_control`."""
    marks = {f"{place}.{name}" for place in _MARKED for name in LEFT_OUT_INSIDE & names_inside(fields.get(place))}
    return set(fields) - ADDED | marks


NOT_NOW = "The server behind this model does not answer now; the request can be sent again."
BROKE = "The server behind this model broke off its answer; the request can be sent again."
BUSY = "The server behind this model has too much to do."

ERROR_BODY_S = 5.0


class AttemptResult(StrEnum):
    """Values are the label `result` of headrace_upstream_attempts_total."""

    OK = "ok"
    INVALID = "invalid"
    """400, 413, 422."""
    OVERFLOW = "overflow"
    """The prompt is too long for this server's context."""
    RATE_LIMITED = "rate_limited"
    """The account's rate limit, or a server with too much to do."""
    CONNECT = "connect"
    """Or the connection was closed before the status."""
    SERVER_ERROR = "server_error"
    REFUSED = "refused"
    """About the server's configuration or ours: its key, its model, a redirect."""
    FORBIDDEN = "forbidden"
    """Another server may take the request: a content filter, an account's limit, a feature that is lacking. Or it may be the client's
    fault: a 403, words about a key or a model that may quote the client.
    """
    LOST = "lost"
    """Silence beyond a timeout, or an answer that broke off or was none."""
    ABANDONED = "abandoned"


ANSWERS = (AttemptResult.OK, AttemptResult.INVALID, AttemptResult.OVERFLOW, AttemptResult.FORBIDDEN, AttemptResult.RATE_LIMITED)
"""Results of a server that works, or may: a client's prompts alone cannot open its circuit."""


class AttemptFailed(HeadraceError):
    """The client gets `error` if no other attempt follows."""

    def __init__(self, result: AttemptResult, error: HeadraceError, *, has_begun: bool = False, refusal: Refusal | None = None) -> None:
        self.result, self.error, self.has_begun, self.refusal = result, error, has_begun, refusal
        super().__init__(str(error))


def known_failure(sent: SentError, *, retry_after_s: float, refusal: Refusal | None = None) -> AttemptFailed | None:
    match sent.kind:
        case ErrorKind.OVERFLOW:
            return AttemptFailed(AttemptResult.OVERFLOW, foreign_overflow())
        case ErrorKind.ACCOUNT_LIMIT:
            return AttemptFailed(AttemptResult.FORBIDDEN, foreign_overflow())
        case ErrorKind.RATE_LIMIT:
            return AttemptFailed(AttemptResult.RATE_LIMITED, Overloaded(BUSY, retry_after_s=retry_after_s))
        case ErrorKind.FILTERED:
            return AttemptFailed(AttemptResult.FORBIDDEN, ContentRefused())
        case ErrorKind.KEY | ErrorKind.MODEL:
            result = AttemptResult.REFUSED if sent.is_certain else AttemptResult.FORBIDDEN
            return AttemptFailed(result, Unavailable(NOT_NOW, retry_after_s=retry_after_s))
        case ErrorKind.INVALID:
            result = AttemptResult.INVALID if sent.status in CLIENT_FAULTS else AttemptResult.FORBIDDEN
            return AttemptFailed(result, _invalid(sent.status, refusal and refusal.field), refusal=refusal)
    return None


def _invalid(status: int | None, field: str | None) -> InvalidRequest:
    """field: None also for one that the client did not write"""
    limit = f"what the server behind this model accepts (it said {status or 'so in its answer'})"
    if field is None or field == SALT:
        return InvalidRequest("body", limit, None, "Leave out rare fields.")
    return InvalidRequest(LIMITS[0] if field in LIMITS else field, limit, None, "Leave it out, or change it.")


def result_of(status: int) -> AttemptResult:
    """For a status that is neither the client's fault nor a rate limit."""
    if status >= 500 or status in (408, 425):
        return AttemptResult.SERVER_ERROR
    return AttemptResult.FORBIDDEN if status in (403, 451) else AttemptResult.REFUSED


async def error_body(response: aiohttp.ClientResponse) -> bytes:
    body, num_read = bytearray(), 0
    try:
        decoder = decoder_for(response, MAX_ERROR_BYTES)
        async with asyncio.timeout(ERROR_BODY_S):
            while piece := await response.content.read(MAX_ERROR_BYTES - num_read):
                num_read += len(piece)
                for part in (piece,) if decoder is None else unpacked(decoder, piece):
                    body += part
    except (aiohttp.ClientError, OSError, TimeoutError, BrokenStream):
        pass  # the status is known, and what came may say why
    return bytes(body)
