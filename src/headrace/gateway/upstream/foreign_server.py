"""Makes attempts of requests at one foreign server, and keeps what is known of the server's state.

An attempt ends in exactly one `AttemptResult`, which moves the server's circuit breaker and is counted. A failed attempt carries an error
of ours; what the server sent is never shown as it is. `foreign_stream` decides which server is tried, and what follows.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from typing import Any

import aiohttp
import msgspec

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError, InvalidRequest, Overloaded, Unavailable
from headrace.core.ids import RequestId
from headrace.gateway.http.descriptors import MAX_FOREIGN_CONNECTIONS
from headrace.gateway.http.errors import ContentRefused, foreign_overflow
from headrace.gateway.upstream.foreign_answer import ForeignAnswer
from headrace.gateway.upstream.foreign_chunk import SideField
from headrace.gateway.upstream.foreign_errors import CLIENT_FAULTS, MAX_ERROR_BYTES, BrokenStream, ErrorKind, SentError, sent_error
from headrace.gateway.upstream.foreign_events import EventReader, EventSink, SilenceLimit, decoder_for, unpacked
from headrace.gateway.upstream.foreign_facts import ListedModel, ReportedLoad
from headrace.gateway.upstream.foreign_rate_limits import exhausted_s, retry_after_s
from headrace.gateway.upstream.foreign_request import (
    LIMITS,
    SALT,
    ForeignRequest,
    is_adaptable,
    names_in,
    refuse,
    refused_field,
    written,
)
from headrace.gateway.upstream.foreign_session import NOT_CONNECTED, ForeignSession
from headrace.gateway.upstream.model_config import ForeignConfig
from headrace.policy.routing.circuit_breaker import CircuitBreaker, CircuitState
from headrace.policy.routing.tenant_failures import TenantFailures

log = logging.getLogger("headrace.gateway")

NOT_NOW = "The server behind this model does not answer now; the request can be sent again."
BROKE = "The server behind this model broke off its answer; the request can be sent again."
BUSY = "The server behind this model has too much to do."

ERROR_BODY_S = 5.0
"""Seconds a server may take for an error's body after its status."""

LOAD_VALID_S = 5.0
"""Seconds after which a server's reported load is no longer used."""

RATE_LIMIT_S = 1.0
"""Seconds without new requests after a 429 that does not say how long."""


class AttemptResult(StrEnum):
    """How one attempt ended. The values are the label `result` of headrace_upstream_attempts_total."""

    OK = "ok"
    INVALID = "invalid"
    """The server refused the request for what it asks: 400, 413, 422."""
    OVERFLOW = "overflow"
    """As INVALID: the prompt is too long for this server's context."""
    RATE_LIMITED = "rate_limited"
    """The account's rate limit, or a server with too much to do."""
    CONNECT = "connect"
    """No connection, or it was closed before the status: nothing was answered."""
    SERVER_ERROR = "server_error"
    REFUSED = "refused"
    """About the server's configuration or ours, which another attempt does not change: its key, its model, a redirect."""
    FORBIDDEN = "forbidden"
    """The server does not take this request, and another one may: its content filter, its account's limit, a feature that it lacks. Or it
    may be the client's fault: a 403, words about a key or a model that may quote the client."""
    LOST = "lost"
    """Silence beyond a timeout, or an answer that broke off or was none."""
    ABANDONED = "abandoned"
    """The client left, or its deadline passed."""


ANSWERS = (AttemptResult.OK, AttemptResult.INVALID, AttemptResult.OVERFLOW, AttemptResult.FORBIDDEN, AttemptResult.RATE_LIMITED)
"""Results of a server that works, or may: a client's prompts alone cannot open its circuit."""


class AttemptFailed(HeadraceError):
    """One attempt of a request at a foreign server failed. The client gets `error` if no other attempt follows.

    has_begun  the client was given tokens of the attempt's answer
    field      the field that the server refused; None: it named none
    """

    def __init__(self, result: AttemptResult, error: HeadraceError, *, has_begun: bool = False, field: str | None = None) -> None:
        self.result, self.error, self.has_begun, self.field = result, error, has_begun, field
        super().__init__(str(error))


class ForeignServer:
    """One foreign server of a model.

    num_open        this gateway's running requests at the server
    num_sent        requests sent since this process began
    is_reachable    False: the last attempt to connect failed
    is_key_refused  the last request for the list of models was refused for its key
    listed          the model in the server's list of models; None: the list was not read yet
    results         attempts by result
    left_out        counts of malformed fields in answers that were ignored
    sends_usage     an answer had token counts; None: it gave no answer yet
    takes_one_prompt  it answers one prompt of several
    refused         names of fields that the server does not take, see `foreign_request`
    """

    def __init__(self, model: str, name: str, config: ForeignConfig, session: ForeignSession, *, clock: Clock, unix_time: Clock) -> None:
        """model: the model's name at this gateway; config.model: its name at the server"""
        self.name = name
        self.config = config
        self.session = session
        self.far_name = config.model or model
        self.breaker = CircuitBreaker()
        self.num_open = 0
        self.num_sent = 0
        self.is_reachable = True
        self.is_key_refused = False
        self.listed: ListedModel | None = None
        self.results: Counter[AttemptResult] = Counter()
        self.left_out: Counter[SideField] = Counter()
        self.sends_usage: bool | None = None
        self.takes_one_prompt = False
        self.refused: set[str] = set()
        self._model = model
        self._clock = clock
        self._unix_time = unix_time
        self._held_until = 0.0
        self._is_held_by_outage = False
        self._tenant_failures = TenantFailures()
        self._load: ReportedLoad | None = None
        self._load_at = 0.0
        self._sent_at_load = 0

    # ------------------------------------------------------------------------------------------------------------------ its state

    def held_s(self, now: float) -> float:
        """Seconds for which the provider's rate limit allows no new request."""
        return max(0.0, self._held_until - now)

    def wait_s(self, now: float) -> float:
        """Seconds until the circuit breaker and the rate limit allow a request."""
        return max(self.held_s(now), self.breaker.wait_s(now))

    @property
    def is_out(self) -> bool:
        """Whether the server failed several requests in a row, or asked for a pause with a 503. A request that it cannot take is then a 503
        and not a 429."""
        return self.breaker.state is not CircuitState.CLOSED or (self._is_held_by_outage and self.held_s(self._clock()) > 0)

    @property
    def has_room(self) -> bool:
        return self.num_open < MAX_FOREIGN_CONNECTIONS

    def can_take(self, now: float) -> bool:
        return self.has_room and self.wait_s(now) == 0.0

    @property
    def max_model_len(self) -> int | None:
        return None if self.listed is None else self.listed.max_model_len

    def reason(self) -> str:
        """The reason why the server is not ready, in words that clients may see; empty: ready. A rate limit is no such reason."""
        if self.breaker.state is not CircuitState.CLOSED:
            return "failed several requests in a row"
        return "" if self.is_reachable else "cannot be reached"

    def reported(self, now: float) -> ReportedLoad | None:
        """The server's last report of its load; None: it gives none, or the last one is too old."""
        return self._load if now - self._load_at <= LOAD_VALID_S else None

    def outstanding(self, now: float) -> int:
        """Estimated requests at the server: its last report plus those sent since; without a report, this gateway's open requests."""
        load = self.reported(now)
        return self.num_open if load is None else load.num_running + load.num_waiting + self.num_sent - self._sent_at_load

    def note_load(self, load: ReportedLoad, *, num_sent: int) -> None:
        """Keep a report of the load. num_sent: value of `num_sent` when the report was asked for"""
        self._load, self._load_at, self._sent_at_load = load, self._clock(), num_sent

    def log_fact(self, what: str) -> None:
        log.info("model %s: its server %s %s", self._model, self.name, what)

    def log_fault(self, what: str) -> None:
        """Log a fault for the operator, without any text from the server."""
        log.warning("model %s: its server %s %s", self._model, self.name, what)

    # ------------------------------------------------------------------------------------------------------------------ one attempt

    async def attempt(self, request: ForeignRequest, asked: Sequence[int], reader: EventReader, sink: EventSink, *, counts: bool) -> None:
        """Give `sink` the answer's events as they come. Raises AttemptFailed.

        asked   sequences that are asked for
        counts  whether a failure counts for the circuit breaker. It counts once per request and server, so that one request that always
                fails does not open the circuit
        """
        ticket = self.breaker.send(self._clock())
        result = AttemptResult.ABANDONED
        self.num_open += 1
        self.num_sent += 1

        begin = partial(self.breaker.begin, ticket)
        fields, found = request.fields_of(asked), dict[str, None]()
        try:
            async with asyncio.timeout(None) as deadline, await self._accepted(request, fields, found, deadline) as response:
                await reader.read(response, sink, silence=SilenceLimit(deadline, self.config.silence_s), on_begun=begin)
            result = AttemptResult.OK
            self._learn(written(fields, self.refused | found.keys()), len(asked), found, reader.answer)
        except AttemptFailed as failure:
            result = failure.result
            raise
        except (BrokenStream, aiohttp.ClientError, OSError, TimeoutError) as error:
            sent = error.sent if isinstance(error, BrokenStream) else None
            refusal = None if sent is None else self._refusal(sent, None, request.request_id)
            result = AttemptResult.LOST if refusal is None else refusal.result
            if refusal is not None and not reader.has_begun:
                raise refusal from None
            reason = error if isinstance(error, BrokenStream) else type(error).__name__
            self.log_fault(f"broke off an answer: {reason} (request {request.request_id})")
            raise AttemptFailed(result, Unavailable(BROKE if reader.has_begun else NOT_NOW), has_begun=reader.has_begun) from None
        finally:
            self.num_open -= 1
            self.results[result] += 1
            self.left_out.update(reader.answer.left_out)
            if result in ANSWERS:
                self._tenant_failures.answered(request.salt, self._clock())
                self.breaker.succeed(ticket)
            elif result is AttemptResult.ABANDONED or not counts or self._is_tenants(result, request.salt):
                self.breaker.abandon(ticket, self._clock())
            else:
                self.breaker.fail(ticket, self._clock())

    def _is_tenants(self, result: AttemptResult, tenant: bytes) -> bool:
        """Whether a failure is one of the tenant's requests. A connection that cannot be made never is."""
        return result is not AttemptResult.CONNECT and self._tenant_failures.is_tenants(tenant, self._clock())

    async def _accepted(
        self, request: ForeignRequest, fields: dict[str, Any], found: dict[str, None], deadline: asyncio.Timeout
    ) -> aiohttp.ClientResponse:
        """The response to the request, in a form that the server takes. Raises AttemptFailed.

        found     receives the names of fields that the server refused and that were then left out or written otherwise
        deadline  set anew whenever the request is sent, and not in force while the body of an error is read, which has a time of its own
        """
        refused = set(self.refused)
        while True:
            sent = written(fields, refused)
            deadline.reschedule(asyncio.get_running_loop().time() + self.config.first_token_s)
            response = await self._respond(request, sent)
            if 200 <= response.status < 300:  # some frameworks answer a POST with 201
                return response
            deadline.reschedule(None)
            async with response:
                failure = await self._failure(response, request.request_id, sent)
            name = failure.field
            if name is None or not is_adaptable(name, found):
                raise failure
            found[name] = None
            refuse(refused, name)

    def _learn(self, sent: dict[str, Any], num_asked: int, found: dict[str, None], answer: ForeignAnswer) -> None:
        """Keep the form in which a request for some sequences was answered. found: names that were refused before"""
        if answer.left and isinstance(sent.get("prompt"), list) and "n" not in sent:
            if not self.takes_one_prompt:
                self.log_fact("answers one prompt of several")
            self.takes_one_prompt = True
        elif answer.left:
            found["n"] = None
        limit = sent.get("max_completion_tokens")
        if limit is not None and answer.usage.completion_tokens > limit * num_asked:
            found["max_completion_tokens"] = None  # it knows the other name alone
        for name in found:
            if name not in self.refused:
                self.log_fact(f"does not take the field {name} as it was sent")
                refuse(self.refused, name)

    async def _respond(self, request: ForeignRequest, fields: dict[str, Any]) -> aiohttp.ClientResponse:
        """The response, once its headers have arrived. Raises AttemptFailed if none comes."""
        salt = {SALT: request.salt.hex()} if self.config.cache_salt else {}
        body = msgspec.json.encode(fields | {"model": self.far_name} | salt)
        try:
            response = await self.session.post(request.path, body, request.request_id)
        except (*NOT_CONNECTED, aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            self.is_reachable = not isinstance(error, NOT_CONNECTED)
            self.log_fault(f"could not be asked: {type(error).__name__} (request {request.request_id})")
            raise AttemptFailed(AttemptResult.CONNECT, Unavailable(NOT_NOW)) from None
        self.is_reachable = True
        self._hold(response)
        return response

    def _hold(self, response: aiohttp.ClientResponse) -> None:
        """Send nothing new for as long as the answer's headers ask."""
        wait_s = exhausted_s(response.headers)
        if response.status in (429, 503, 529):
            wait_s = max(wait_s, retry_after_s(response.headers, self._unix_time()) or 0.0)
        if wait_s:
            self._hold_for(wait_s, by_outage=response.status == 503)

    def _hold_for(self, wait_s: float, *, by_outage: bool) -> None:
        self._is_held_by_outage = by_outage
        self._held_until = max(self._held_until, self._clock() + wait_s)

    async def _failure(self, response: aiohttp.ClientResponse, request_id: RequestId, sent: dict[str, Any]) -> AttemptFailed:
        """The failure of an answer that is an error. sent: fields of the request"""
        status, body = response.status, await _error_body(response)
        error = sent_error(body, status)
        field = self._refused_field(body, status, sent) if error.kind in (None, ErrorKind.INVALID) else None
        refusal = self._refusal(error, retry_after_s(response.headers, self._unix_time()), request_id, field=field)
        if refusal is not None:
            return refusal
        self.log_fault(f"answered with status {status} (request {request_id})")
        return AttemptFailed(_result_of(status), Unavailable(NOT_NOW, retry_after_s=self._retry_after_s()), field=field)

    def _refused_field(self, body: bytes, status: int, sent: dict[str, Any]) -> str | None:
        """The field of the request that an error names."""
        is_about_n = "n" in sent and status in (500, 501)  # of llama.cpp for example
        if not is_about_n and status not in CLIENT_FAULTS:
            return None
        field = refused_field(body, {"n"} if is_about_n else names_in(sent) | ({SALT} if self.config.cache_salt else set()))
        if field == SALT:
            self.log_fault("refuses the field cache_salt: with cache_salt: false it is left out, and tenants share the server's cache")
        return field

    def _refusal(self, sent: SentError, asked_s: float | None, request_id: RequestId, *, field: str | None = None) -> AttemptFailed | None:
        """The failure for an error of a known kind, in whatever form the server sent it; None: another failure.

        asked_s  seconds by the header Retry-After; None: it has none
        field    field that the server named
        """
        match sent.kind:
            case ErrorKind.OVERFLOW:
                return AttemptFailed(AttemptResult.OVERFLOW, foreign_overflow())
            case ErrorKind.ACCOUNT_LIMIT:
                return AttemptFailed(AttemptResult.FORBIDDEN, foreign_overflow())
            case ErrorKind.RATE_LIMIT:
                return self._rate_limit(sent, asked_s)
            case ErrorKind.FILTERED:
                return AttemptFailed(AttemptResult.FORBIDDEN, ContentRefused())
            case ErrorKind.KEY | ErrorKind.MODEL:
                what = "refuses its key or account" if sent.kind is ErrorKind.KEY else f"does not have the model {self.far_name!r}"
                self.log_fault(f"{what} (status {sent.status}, request {request_id})")
                result = AttemptResult.REFUSED if sent.is_certain else AttemptResult.FORBIDDEN
                return AttemptFailed(result, Unavailable(NOT_NOW, retry_after_s=self._retry_after_s()))
            case ErrorKind.INVALID:
                result = AttemptResult.INVALID if sent.status in CLIENT_FAULTS else AttemptResult.FORBIDDEN
                return AttemptFailed(result, _invalid(sent.status, field), field=field)
        return None

    def _rate_limit(self, sent: SentError, asked_s: float | None) -> AttemptFailed:
        """The failure for a rate limit, which holds back other requests where the server surely meant one."""
        wait_s = sent.wait_s if asked_s is None else asked_s
        if sent.is_certain or asked_s is not None:
            self._hold_for(RATE_LIMIT_S if wait_s is None else wait_s, by_outage=False)
        return AttemptFailed(AttemptResult.RATE_LIMITED, Overloaded(BUSY, retry_after_s=max(self._retry_after_s(), wait_s or 0.0)))

    def _retry_after_s(self) -> float:
        return self.held_s(self._clock()) or 1.0


def _invalid(status: int | None, field: str | None) -> InvalidRequest:
    """The error of a request that the server does not take. field: that it named; None: none, or one that the client did not write"""
    limit = f"what the server behind this model accepts (it said {status or 'so in its answer'})"
    if field is None or field == SALT:
        return InvalidRequest("body", limit, None, "Leave out rare fields.")
    return InvalidRequest(LIMITS[0] if field in LIMITS else field, limit, None, "Leave it out, or change it.")


def _result_of(status: int) -> AttemptResult:
    """The result for a status that is neither the client's fault nor a rate limit."""
    if status >= 500 or status in (408, 425):
        return AttemptResult.SERVER_ERROR
    return AttemptResult.FORBIDDEN if status in (403, 451) else AttemptResult.REFUSED


async def _error_body(response: aiohttp.ClientResponse) -> bytes:
    """The decoded body of an error, as much as arrives within its bounds of bytes and time."""
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
