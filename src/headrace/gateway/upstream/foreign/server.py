"""Makes attempts of requests at one foreign server, and keeps what is known of the server's state.

An attempt ends in exactly one `AttemptResult`, which moves the server's circuit breaker and is counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import aiohttp
import msgspec

from headrace.core.clock import Clock
from headrace.core.errors import Unavailable
from headrace.core.hashing import TENANT_SALT_BYTES
from headrace.core.ids import RequestId
from headrace.gateway.http.config import MAX_FOREIGN_CONNECTIONS
from headrace.gateway.upstream.foreign.attempt import (
    ANSWERS,
    BROKE,
    NOT_NOW,
    SALT,
    AttemptFailed,
    AttemptResult,
    ForeignRequest,
    error_body,
    is_adaptable,
    known_failure,
    names_in,
    refuse,
    result_of,
    written,
)
from headrace.gateway.upstream.foreign.chunk import SideField
from headrace.gateway.upstream.foreign.errors import CLIENT_FAULTS, BrokenStream, ErrorKind, SentError, sent_error
from headrace.gateway.upstream.foreign.events import EventReader, EventSink, SilenceLimit
from headrace.gateway.upstream.foreign.facts import ListedModel, ReportedLoad, exhausted_s, retry_after_s
from headrace.gateway.upstream.foreign.field_errors import Refusal, refused_field
from headrace.gateway.upstream.foreign.session import NOT_CONNECTED, ForeignSession
from headrace.gateway.upstream.model_config import ForeignConfig
from headrace.policy.routing.failures import CircuitBreaker, CircuitState, TenantFailures

log = logging.getLogger("headrace.gateway")

LOAD_VALID_S = 5.0

RATE_LIMIT_S = 1.0


class ForeignServer:
    """sends_usage: an answer had token counts; None: it gave no answer yet"""

    def __init__(self, model: str, name: str, config: ForeignConfig, session: ForeignSession, *, clock: Clock, unix_time: Clock) -> None:
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
        return max(0.0, self._held_until - now)

    def wait_s(self, now: float) -> float:
        return max(self.held_s(now), self.breaker.wait_s(now))

    @property
    def is_out(self) -> bool:
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
        """A rate limit is no such reason."""
        if self.breaker.state is not CircuitState.CLOSED:
            return "failed several requests in a row"
        return "" if self.is_reachable else "cannot be reached"

    def reported(self, now: float) -> ReportedLoad | None:
        return self._load if now - self._load_at <= LOAD_VALID_S else None

    def outstanding(self, now: float) -> int:
        load = self.reported(now)
        return self.num_open if load is None else load.num_running + load.num_waiting + self.num_sent - self._sent_at_load

    def note_load(self, load: ReportedLoad, *, num_sent: int) -> None:
        """num_sent: requests sent when the report was asked for"""
        self._load, self._load_at, self._sent_at_load = load, self._clock(), num_sent

    def log_fact(self, what: str) -> None:
        log.info("model %s: its server %s %s", self._model, self.name, what)

    def log_fault(self, what: str) -> None:
        log.warning("model %s: its server %s %s", self._model, self.name, what)

    # ------------------------------------------------------------------------------------------------------------------ one attempt

    async def attempt(self, request: ForeignRequest, asked: Sequence[int], reader: EventReader, sink: EventSink, *, counts: bool) -> None:
        """Raises AttemptFailed. counts: whether a failure counts for the circuit breaker, once per request and server"""
        ticket = self.breaker.send(self._clock())
        result = AttemptResult.ABANDONED
        self.num_open += 1
        self.num_sent += 1

        begin = partial(self.breaker.begin, ticket)
        fields, refused, tried = request.fields_of(asked), set(self.refused), list[Refusal]()
        try:
            async with asyncio.timeout(None) as deadline, await self._accepted(request, fields, refused, tried, deadline) as response:
                await reader.read(response, sink, silence=SilenceLimit(deadline, self.config.silence_s), on_begun=begin)
            result = AttemptResult.OK
            self._learn(request, written(fields, refused), len(asked), tried[-1:], reader)
        except AttemptFailed as failure:
            result = failure.result
            raise
        except (BrokenStream, aiohttp.ClientError, OSError, TimeoutError) as error:
            sent = error.sent if isinstance(error, BrokenStream) else None
            known = None if sent is None else self._known(sent, None, request.request_id)
            result = AttemptResult.LOST if known is None else known.result
            if known is not None and not reader.has_begun:
                raise known from None
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
        return result is not AttemptResult.CONNECT and self._tenant_failures.is_tenants(tenant, self._clock())

    async def _accepted(
        self, request: ForeignRequest, fields: dict[str, Any], refused: set[str], tried: list[Refusal], deadline: asyncio.Timeout
    ) -> aiohttp.ClientResponse:
        """tried     receives the refusals for which the request was sent again
        deadline  set once for all forms
        """
        first_token_at = asyncio.get_running_loop().time() + self.config.silence_s
        while True:
            sent = written(fields, refused)
            deadline.reschedule(first_token_at)
            response = await self._respond(request, sent)
            if 200 <= response.status < 300:  # some frameworks answer a POST with 201
                return response
            deadline.reschedule(None)
            async with response:
                failure = await self._failure(response, request.request_id, sent)
            refusal = failure.refusal
            if refusal is None or not is_adaptable(refusal, tried):
                raise failure
            tried.append(refusal)
            refuse(refused, refusal.field)
            request.is_one_by_one = request.is_one_by_one or refusal.field == "n"

    def _learn(self, request: ForeignRequest, sent: dict[str, Any], num_asked: int, last: Sequence[Refusal], reader: EventReader) -> None:
        """sent: fields of the request, for num_asked sequences. last: the refusal after which the server took the request."""
        names, answer = [refusal.field for refusal in last if refusal.is_name], reader.answer
        if answer.left and reader.is_cut:
            request.is_one_by_one = True  # it may have been slow
        elif answer.left and "n" in sent:
            names.append("n")
        elif answer.left and request.num_prompts == request.num_sequences and not self.takes_one_prompt:
            self.log_fact("answers one prompt of several")
            self.takes_one_prompt = True
        limit = sent.get("max_completion_tokens")
        if limit is not None and "max_tokens" not in {*self.refused, *names} and answer.usage.completion_tokens > limit * num_asked:
            names.append("max_completion_tokens")  # it knows the other name alone
        for name in names:
            if name not in self.refused:
                self.log_fact(f"does not take the field {name} as it was sent")
                refuse(self.refused, name)

    async def _respond(self, request: ForeignRequest, fields: dict[str, Any]) -> aiohttp.ClientResponse:
        salt = {SALT: request.salt[-TENANT_SALT_BYTES:].hex()} if self.config.cache_salt else {}
        body = msgspec.json.encode(fields | {"model": self.far_name} | salt)
        try:
            response = await self.session.post(request.path, body, request.request_id, request.trace_headers)
        except (*NOT_CONNECTED, aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            self.is_reachable = not isinstance(error, NOT_CONNECTED)
            self.log_fault(f"could not be asked: {type(error).__name__} (request {request.request_id})")
            raise AttemptFailed(AttemptResult.CONNECT, Unavailable(NOT_NOW)) from None
        self.is_reachable = True
        self._hold(response)
        return response

    def _hold(self, response: aiohttp.ClientResponse) -> None:
        wait_s = exhausted_s(response.headers)
        if response.status in (429, 503, 529):
            wait_s = max(wait_s, retry_after_s(response.headers, self._unix_time()) or 0.0)
        if wait_s:
            self._hold_for(wait_s, by_outage=response.status == 503)

    def _hold_for(self, wait_s: float, *, by_outage: bool) -> None:
        self._is_held_by_outage = by_outage
        self._held_until = max(self._held_until, self._clock() + wait_s)

    async def _failure(self, response: aiohttp.ClientResponse, request_id: RequestId, sent: dict[str, Any]) -> AttemptFailed:
        status, body = response.status, await error_body(response)
        error = sent_error(body, status)
        refusal = self._refusal(body, status, sent) if error.kind in (None, ErrorKind.INVALID) else None
        failure = self._known(error, retry_after_s(response.headers, self._unix_time()), request_id, refusal=refusal)
        if failure is not None:
            return failure
        self.log_fault(f"answered with status {status} (request {request_id})")
        return AttemptFailed(result_of(status), Unavailable(NOT_NOW, retry_after_s=self._retry_after_s()), refusal=refusal)

    def _refusal(self, body: bytes, status: int, sent: dict[str, Any]) -> Refusal | None:
        is_about_n = "n" in sent and status in (500, 501)  # of llama.cpp for example
        if not is_about_n and status not in CLIENT_FAULTS:
            return None
        is_salt_ours = self.config.cache_salt and b"cachesalt" not in msgspec.json.encode(sent).lower().replace(b"_", b"")
        refusal = refused_field(body, {"n"} if is_about_n else names_in(sent) | ({SALT} if is_salt_ours else set()))
        if refusal is not None and refusal.field == SALT:
            self.log_fault("refuses the field cache_salt: with cache_salt: false it is left out, and tenants share the server's cache")
        return refusal

    def _known(
        self, sent: SentError, asked_s: float | None, request_id: RequestId, *, refusal: Refusal | None = None
    ) -> AttemptFailed | None:
        """A rate limit holds other requests where the server surely meant one. asked_s: by the header Retry-After"""
        wait_s = None
        if sent.kind is ErrorKind.RATE_LIMIT:
            wait_s = sent.wait_s if asked_s is None else asked_s
            if sent.is_certain or asked_s is not None:
                self._hold_for(RATE_LIMIT_S if wait_s is None else wait_s, by_outage=False)
        elif sent.kind in (ErrorKind.KEY, ErrorKind.MODEL):
            what = "refuses its key or account" if sent.kind is ErrorKind.KEY else f"does not have the model {self.far_name!r}"
            self.log_fault(f"{what} (status {sent.status}, request {request_id})")
        return known_failure(sent, retry_after_s=max(self._retry_after_s(), wait_s or 0.0), refusal=refusal)

    def _retry_after_s(self) -> float:
        return self.held_s(self._clock()) or 1.0
