"""Defines the ASGI application, in which every HTTP request enters and leaves the gateway.

`Gateway.__call__` gives a request its id and checks its Host and Origin. `surfaces.routes` finds the endpoint of the decoded path in its
table. `dispatch` checks the key unless the path is public. Every request ends in one answer, one count in the metrics,
and one log line unless its path is quiet. Few coroutines stand between a handler and the socket, because all of them are entered again each
time that a request waits and goes on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import traceback
from contextlib import nullcontext
from typing import TYPE_CHECKING

from headrace.core.clock import Clock
from headrace.core.errors import DeadlineExceeded, HeadraceError, InvalidRequest
from headrace.core.ids import RequestId
from headrace.gateway.access.auth import Authenticator
from headrace.gateway.access.open_requests import BeginTurns, Draining, KeyRevoked, UseCount
from headrace.gateway.access.principal import ANONYMOUS, OpenMetrics, Principal
from headrace.gateway.access.stored_keys import StoredKeys
from headrace.gateway.config import GatewayConfig
from headrace.gateway.generation.account import RequestAccount
from headrace.gateway.generation.service import Service
from headrace.gateway.generation.stages.model_choice import with_outcome
from headrace.gateway.http.asgi import Receive, Scope, Send
from headrace.gateway.http.errors import (
    BAD_HTTP,
    INTERNAL,
    ClientLeft,
    ErrorReply,
    HeadRefused,
    RateLimitExceeded,
    ReaderRefused,
    RouteNotFound,
    SlowReader,
    UnsupportedEncoding,
    error_reply,
    forget_frames,
    row_of,
)
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.http.origins import HostCheck, Origins, TrustedProxies, answer_preflight, is_preflight
from headrace.gateway.ledger.record import UsageRecord, is_recorded, usage_record
from headrace.gateway.limits.limiter import Limiter
from headrace.gateway.stores.guard import StoreWait
from headrace.gateway.surfaces.routes import AnsweredPath, find_path, logged_path, plain_path
from headrace.gateway.upstream.seam import ReplicaLost
from headrace.observe.finished_request import MAX_DETAIL_CHARS, Caller, End, FinishedRequest, Outcome, RequestArrival
from headrace.observe.metrics import Metrics
from headrace.observe.request_log import RequestLog
from headrace.observe.tenant_metrics import RequestUse
from headrace.observe.timeline import StageMarks
from headrace.observe.trace_context import trace_context
from headrace.policy.admission import AdmissionOutcome

if TYPE_CHECKING:
    from headrace.observe.traces import TraceExporter

log = logging.getLogger("headrace.gateway")

_FIELD = re.compile(r"[A-Za-z_]{1,40}(?:\[[0-9]{1,6}\]|\.[A-Za-z_]{1,40}){0,8}")
UNPRINTED = "(a field of another form)"

UNFINISHED = End(Outcome.FAILED)
"""The end of a request that nothing below has ended."""


class ActiveConfig:
    """One configuration with the objects made from it: the service, and the checks before it. A request keeps the one it began with.

    requests_without_model  counts the requests that have not asked for a model yet: each may still take any model of this configuration
    """

    def __init__(self, config: GatewayConfig, service: Service, authenticator: Authenticator) -> None:
        self.config, self.service, self.authenticator = config, service, authenticator
        self.host_check = HostCheck(config.host, config.allowed_hosts)
        self.origins = Origins(config.allowed_origins)
        self.proxies = TrustedProxies(config.trusted_proxies)
        self.public = frozenset({"/metrics"} if config.open_metrics != OpenMetrics.NONE else ())
        self.requests_without_model = UseCount()


class Gateway:
    """The ASGI application. `gateway.compose` makes it, and opens and closes everything that it uses.

    active       configuration of new requests
    request_log  may be replaced at any time; a request is written to the log that is present at its end
    traces       None: no collector is configured
    clock        monotonic seconds
    """

    def __init__(
        self,
        config: GatewayConfig,
        service: Service,
        request_log: RequestLog,
        *,
        stored_keys: StoredKeys | None,
        limiter: Limiter,
        metrics: Metrics,
        traces: TraceExporter | None,
        clock: Clock,
    ) -> None:
        self.request_log, self.metrics, self.traces, self.clock = request_log, metrics, traces, clock
        self.stored_keys, self.limiter = stored_keys, limiter
        self._turns = BeginTurns(clock)
        self.follow(config, service)

    def follow(self, config: GatewayConfig, service: Service) -> None:
        """New requests have this configuration."""
        self.active = ActiveConfig(config, service, Authenticator(config.api_keys, config.tiers, self.stored_keys, self.clock))

    @property
    def config(self) -> GatewayConfig:
        """The present configuration."""
        return self.active.config

    @property
    def service(self) -> Service:
        """The service of new requests."""
        return self.active.service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websockets; `gateway.compose` opens and closes, not ASGI's lifespan
        active = self.active
        service = active.service
        scope["path"] = plain_path(scope["path"])
        exchange = Exchange(scope, receive, send, request_id=RequestId(os.urandom(12).hex()), marks=StageMarks(self.clock))
        account = RequestAccount()
        path, scope["path_params"] = find_path(scope["path"])
        if path is not None:
            exchange.framing = path.framing
            if path.generates:
                account.trace = trace_context(exchange.headers, has_spans=self.traces is not None)
        arrival = _arrival(exchange, account, active)
        reached: AnsweredPath | None = None
        end = UNFINISHED
        with StoreWait(self.clock) as store_wait:
            try:
                service.open_requests.use(exchange.request_id, account.principal.tenant, active.requests_without_model)
                host = active.host_check(exchange, is_probe=path is not None and path.is_probe)
                active.origins.check(exchange, host)
                if is_preflight(exchange):
                    await answer_preflight(exchange)
                else:
                    reached = path
                    await self.dispatch(path, exchange, account, active)
                end = End(Outcome.COMPLETED, exchange.status, self.clock() - exchange.arrived_at)
            except HeadraceError as error:
                reply, end = _ended_by(error)
                await self._fail(exchange, error, reply, end)
            except asyncio.CancelledError:
                end = End(Outcome.FAILED, detail="cut off at the end of a shutdown")
                raise
            except Exception as error:  # the outermost border: a bug must not end the other requests of the connection
                log.error("request %s failed: %s", exchange.request_id, fault(error))
                reply, end = _ended_by(error)
                end = end._replace(detail=type(error).__name__)
                await self._fail(exchange, error, reply, end)
            finally:
                service.open_requests.leave_used(exchange.request_id)
                if end.latency_s is None:
                    end = end._replace(status=exchange.status or end.status, latency_s=self.clock() - exchange.arrived_at)
                caller = _caller(account.principal)
                finished = FinishedRequest(arrival, end, caller, account.asked, account.answered, entered=exchange.marks.entered)
                self._record(finished, account.logged_prompt, reached, service, store_wait)

    async def dispatch(self, path: AnsweredPath | None, exchange: Exchange, account: RequestAccount, active: ActiveConfig) -> None:
        """Check the key, then call the handler. An unknown path needs a key too, so that strangers cannot learn which paths exist."""
        if path is None or not (path.is_public or path.path in active.public):
            account.principal = await active.authenticator.principal(exchange.headers, exchange.framing)
        if path is None:
            raise RouteNotFound(exchange.scope["path"])
        endpoint, service = path.endpoint(exchange.scope["method"]), active.service
        principal = account.principal
        if principal.reads_all and not endpoint.for_readers:
            raise ReaderRefused
        if not (endpoint.generates or endpoint.has_limits):
            await endpoint.handler(service, exchange, account)
            return
        await self._turns.take(principal.tenant)
        keys = self.stored_keys if endpoint.generates else None
        with keys.uses.use(principal.key_id, exchange.end) if keys is not None else nullcontext():
            reservation = self.limiter.admit(exchange.request_id, principal, service.config.limits)
            exchange.late_headers = reservation.headers
            async with reservation as account.reservation:
                await endpoint.handler(service, exchange, account)

    def refused(self, request_id: str, status: int, reason: str) -> None:
        """Log and count an answer by the HTTP protocol class itself: the bytes were no HTTP, or the head was too large or too late."""
        self.metrics.http_responses.labels(str(status)).inc()
        arrival = RequestArrival(request_id, method="", path="", time=self.service.unix_time())
        self.request_log.write(FinishedRequest(arrival, End(Outcome.REFUSED, status, error=BAD_HTTP, reason=reason)))

    async def _fail(self, exchange: Exchange, error: Exception, reply: ErrorReply, end: End) -> None:
        forget_frames(error)
        if end.outcome is Outcome.REFUSED:
            exchange.more_headers = with_outcome(exchange.more_headers, AdmissionOutcome.REFUSED)
        if not (isinstance(error, ClientLeft | SlowReader) or isinstance(exchange.end_reason, ClientLeft | SlowReader)):
            await exchange.fail(reply)

    def _record(
        self, request: FinishedRequest, prompt: str | None, path: AnsweredPath | None, service: Service, store_wait: StoreWait
    ) -> None:
        """Count and log a request that has ended. prompt: to be logged; service: of the configuration that the request began with"""
        metrics = self.metrics
        metrics.http_responses.labels(str(request.end.status)).inc()
        if path is not None and path.generates:
            metrics.store_wait.observe(store_wait.waited_s)
            metrics.finished(request.model or "", request.answered.replica or "", request.counted_outcome)
            usage = usage_record(request, prompt=prompt) if is_recorded(request) else None
            if request.caller.tenant is not None:  # else strangers could fill what is kept of tenants
                service.explanations.keep(request, usage)
                if self.traces is not None:
                    self.traces.write(request)
                metrics.tenants.count(request.caller.tier, request.caller.tenant, use_of(request, usage), model=request.model or "")
        if not (path is not None and path.is_quiet and request.end.outcome is Outcome.COMPLETED):
            self.request_log.write(request)


def _arrival(exchange: Exchange, account: RequestAccount, active: ActiveConfig) -> RequestArrival:
    scope, peer = exchange.scope, exchange.scope.get("client")
    return RequestArrival(
        exchange.request_id,
        method=scope["method"][:16],
        path=logged_path(scope["path"]),
        time=active.service.unix_time(),
        client=active.proxies.client_of(peer[0], exchange.headers) if peer else None,
        client_request_id=sane_request_id(exchange.header(b"x-request-id")),
        trace=account.trace,
        at=exchange.arrived_at,
    )


def _caller(principal: Principal) -> Caller:
    if principal is ANONYMOUS:  # the key was not checked
        return Caller()
    return Caller(principal.tenant, principal.user or None, principal.key_id or None, principal.tier_name)


def _ended_by(error: Exception) -> tuple[ErrorReply, End]:
    """The answer to a request that ended with an error, and how the request ended."""
    reply = error_reply(error)
    detail = None
    if isinstance(error, ReplicaLost):
        detail = f"cannot be resumed: {error.why_not_resume}"[:MAX_DETAIL_CHARS] if error.why_not_resume else "not resumed"
    return reply, End(
        outcome_of(error, reply.status),
        reply.status,
        error=reply.error.code,
        limit=error.limit if isinstance(error, RateLimitExceeded) else None,
        param=param_of(error),
        reason=reason_of(error),
        detail=detail,
    )


def outcome_of(error: Exception, status: int) -> Outcome:
    """The outcome of a request that ended with this error and HTTP status."""
    if isinstance(error, ClientLeft | SlowReader | KeyRevoked):
        return Outcome.CANCELLED
    if isinstance(error, DeadlineExceeded):
        return Outcome.DEADLINE
    return Outcome.REFUSED if status < 500 or isinstance(error, Draining) else Outcome.FAILED


def use_of(request: FinishedRequest, usage: UsageRecord | None) -> RequestUse:
    """The numbers that a request adds to its tenant's metrics. usage: None for a request that used nothing"""
    end = request.end
    use = RequestUse(refused=(end.error or "") if end.outcome is Outcome.REFUSED else "", limit=end.limit or "")
    if usage is None:
        return use
    return use._replace(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        cost_nanos=usage.cost_nanos,
    )


def param_of(error: Exception) -> str | None:
    """The name of the field that an error is about. A name in no field's form is replaced: a JSON key may hold any text of the client."""
    if not isinstance(error, InvalidRequest):
        return None
    return error.field if _FIELD.fullmatch(error.field) else UNPRINTED


def reason_of(error: Exception) -> str | None:
    """The rule that the request broke, or the error's fixed message, without any value of the client's. None for a bug of the server."""
    if isinstance(error, InvalidRequest):
        return error.limit
    if isinstance(error, HeadRefused | UnsupportedEncoding):
        return error.rule
    return str(error) if row_of(error) is not INTERNAL else None


def fault(error: BaseException) -> str:
    """The traceback of a bug: types and places, without the exceptions' texts, which may quote a prompt."""
    parts = ["".join(traceback.format_tb(error.__traceback__)) + type(error).__name__]
    if error.__cause__ is not None:
        parts.append(f"caused by {fault(error.__cause__)}")
    return "\n".join(parts)


def sane_request_id(value: bytes | None) -> str | None:
    """The client's own request id, for the log alone. None unless it has 1 to 128 characters, all ASCII letters, digits or -_.:/."""
    if value is None or not 0 < len(value) <= 128:
        return None
    text = value.decode("latin-1")
    return text if all(char.isascii() and (char.isalnum() or char in "-_.:/") for char in text) else None
