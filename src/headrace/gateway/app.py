"""Defines the ASGI application, in which every HTTP request enters and leaves the gateway.

`Gateway.__call__` gives a request its id and checks its Host and Origin. `surfaces.paths` finds the endpoint of the decoded path in the
table `surfaces.routes`. `dispatch` checks the key unless the path is public. Every request ends in one answer, one count in the metrics,
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

from headrace.core.errors import DeadlineExceeded, HeadraceError, InvalidRequest
from headrace.core.ids import RequestId
from headrace.gateway.access.auth import Authenticator
from headrace.gateway.access.metrics_access import OpenMetrics
from headrace.gateway.access.open_requests import Draining, KeyRevoked, UseCount
from headrace.gateway.config import GatewayConfig
from headrace.gateway.generation.service import Service
from headrace.gateway.generation.stages.model_choice import refused_headers
from headrace.gateway.http.asgi import Receive, Scope, Send
from headrace.gateway.http.errors import (
    BAD_HTTP,
    INTERNAL,
    ClientLeft,
    HeadRefused,
    RateLimitExceeded,
    RouteNotFound,
    SlowReader,
    UnsupportedEncoding,
    error_reply,
    row_of,
)
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.http.origins import HostCheck, Origins, TrustedProxies, answer_preflight, is_preflight
from headrace.gateway.http.turns import BeginTurns
from headrace.gateway.ledger.record import UsageRecord, is_recorded, usage_record
from headrace.gateway.stores.guard import StoreWait
from headrace.gateway.surfaces.paths import AnsweredPath, find_path, logged_path, plain_path
from headrace.gateway.upstream.seam import ReplicaLost
from headrace.observe.request_log import MAX_DETAIL_CHARS, Outcome, RequestLog, RequestLogRecord
from headrace.observe.tenant_metrics import RequestUse
from headrace.policy.limits.price import FREE

log = logging.getLogger("headrace.gateway")

_FIELD = re.compile(r"[A-Za-z_]{1,40}(?:\[[0-9]{1,6}\]|\.[A-Za-z_]{1,40}){0,8}")
UNPRINTED = "(a field of another form)"


class ActiveConfig:
    """One configuration with the objects made from it: the service, and the checks before it. A request keeps the one it began with.

    choosing  counts the requests that have not asked for a model yet: each may still take any model of this configuration
    """

    def __init__(self, config: GatewayConfig, service: Service) -> None:
        self.config = config
        self.service = service
        self.authenticator = Authenticator(config.api_keys, config.tiers, service.stored_keys, service.clock)
        self.host_check = HostCheck(config.host, config.allowed_hosts)
        self.origins = Origins(config.allowed_origins)
        self.proxies = TrustedProxies(config.trusted_proxies)
        self.public = frozenset({"/metrics"} if config.open_metrics != OpenMetrics.NONE else ())
        self.choosing = UseCount()


class Gateway:
    """The ASGI application. `gateway.compose` makes it, and opens and closes everything that it uses.

    active       configuration of new requests
    request_log  may be replaced at any time; a request is written to the log that is present at its end
    """

    def __init__(self, config: GatewayConfig, service: Service, request_log: RequestLog) -> None:
        self.active = ActiveConfig(config, service)
        self.request_log = request_log
        self._turns = BeginTurns(service.clock)

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
        scope["path"] = plain_path(scope["path"])
        exchange = self._open(active, scope, receive, send)
        path, scope["path_params"] = find_path(scope["path"])
        if path is not None:
            exchange.framing = path.framing
        with StoreWait(active.service.clock) as store_wait:
            try:
                exchange.use(active.choosing)
                host = active.host_check(exchange, is_probe=path is not None and path.is_probe)
                active.origins.check(exchange, host)
                if is_preflight(exchange):
                    await answer_preflight(exchange)
                else:
                    await self.dispatch(path, exchange, active)
                exchange.record.outcome = Outcome.COMPLETED
            except HeadraceError as error:
                await self._fail(exchange, error)
            except asyncio.CancelledError:
                exchange.record.detail = "cut off at the end of a shutdown"
                raise
            except Exception as error:  # the outermost border: a bug must not end the other requests of the connection
                log.error("request %s failed: %s", exchange.request_id, fault(error))
                exchange.record.detail = type(error).__name__
                await self._fail(exchange, error)
            finally:
                self._close(exchange, active.service, store_wait)

    async def dispatch(self, path: AnsweredPath | None, exchange: Exchange, active: ActiveConfig) -> None:
        """Check the key, then call the handler. An unknown path needs a key too, so that strangers cannot learn which paths exist."""
        if path is not None:
            exchange.generates, exchange.is_quiet = path.generates, path.is_quiet
        if path is None or not (path.is_public or path.path in active.public):
            exchange.principal = await active.authenticator.principal(exchange.headers, exchange.framing)
            exchange.record.tenant = exchange.principal.tenant
            exchange.record.user, exchange.record.key_id = exchange.principal.user or None, exchange.principal.key_id or None
        if path is None:
            raise RouteNotFound(exchange.scope["path"])
        endpoint, service = path.endpoint(exchange.scope["method"]), active.service
        if not (endpoint.generates or endpoint.has_limits):
            await endpoint.handler(service, exchange)
            return
        await self._turns.take(exchange.principal.tenant)
        keys = service.stored_keys if endpoint.generates else None
        with keys.uses.use(exchange.principal.key_id, exchange.end) if keys is not None else nullcontext():
            async with service.limiter.admit(exchange, service.config.limits):
                await endpoint.handler(service, exchange)

    def refused(self, request_id: str, status: int, reason: str) -> None:
        """Log and count an answer by the HTTP protocol class itself: the bytes were no HTTP, or the head was too large or too late."""
        self.service.metrics.http_responses.labels(str(status)).inc()
        record = RequestLogRecord(request_id=request_id, method="", path="", time=self.service.unix_time(), status=status, reason=reason)
        record.error, record.outcome = BAD_HTTP, Outcome.REFUSED
        self.request_log.write(record)

    def _open(self, active: ActiveConfig, scope: Scope, receive: Receive, send: Send) -> Exchange:
        request_id = RequestId(os.urandom(12).hex())
        record = RequestLogRecord(
            request_id=request_id, method=scope["method"][:16], path=logged_path(scope["path"]), time=active.service.unix_time()
        )
        exchange = Exchange(scope, receive, send, request_id=request_id, record=record, arrived_at=active.service.clock())
        if peer := scope.get("client"):
            record.client = active.proxies.client_of(peer[0], exchange.headers)
        record.client_request_id = sane_request_id(exchange.header(b"x-request-id"))
        return exchange

    async def _fail(self, exchange: Exchange, error: Exception) -> None:
        reply = error_reply(error)
        forget_frames(error)
        record = exchange.record
        record.error, record.outcome = reply.error.code, outcome_of(error, reply.status)
        record.param, record.reason = param_of(error), reason_of(error)
        if record.outcome is Outcome.REFUSED:
            exchange.more_headers = refused_headers(exchange.more_headers)
        record.limit = error.limit if isinstance(error, RateLimitExceeded) else None
        if isinstance(error, ReplicaLost):
            record.detail = f"cannot be resumed: {error.why_not_resume}"[:MAX_DETAIL_CHARS] if error.why_not_resume else "not resumed"
        if not (isinstance(error, ClientLeft | SlowReader) or isinstance(exchange.end_reason, ClientLeft | SlowReader)):
            await exchange.fail(reply)
        record.status = record.status or reply.status

    def _close(self, exchange: Exchange, service: Service, store_wait: StoreWait) -> None:
        """Count and log a request that has ended. service: of the configuration that the request began with"""
        exchange.release()
        record, metrics = exchange.record, service.metrics
        record.latency_s = service.clock() - exchange.arrived_at
        metrics.http_responses.labels(str(record.status)).inc()
        if exchange.generates:
            metrics.store_wait.observe(store_wait.waited_s)
            metrics.finished(record.model or "", record.replica or "", counted_as(record))
            price = service.config.prices.get(record.model or "", FREE)
            usage = usage_record(record, exchange.principal, price, prompt=exchange.logged_prompt) if is_recorded(record) else None
            if service.ledger is not None and usage is not None:
                service.ledger.write(usage)
            if record.tenant is not None:
                metrics.tenants.count(exchange.principal.tier_name, record.tenant, use_of(record, usage))
        if not (exchange.is_quiet and record.outcome is Outcome.COMPLETED):
            self.request_log.write(record)


def outcome_of(error: Exception, status: int) -> Outcome:
    """The outcome of a request that ended with this error and HTTP status."""
    if isinstance(error, ClientLeft | SlowReader | KeyRevoked):
        return Outcome.CANCELLED
    if isinstance(error, DeadlineExceeded):
        return Outcome.DEADLINE
    return Outcome.REFUSED if status < 500 or isinstance(error, Draining) else Outcome.FAILED


def use_of(record: RequestLogRecord, usage: UsageRecord | None) -> RequestUse:
    """The numbers that a request adds to its tenant's metrics. usage: None for a request that used nothing"""
    refused = (record.error or "") if record.outcome is Outcome.REFUSED else ""
    return (
        RequestUse(refused=refused, limit=record.limit or "")
        if usage is None
        else RequestUse(
            refused=refused,
            limit=record.limit or "",
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            cost_nanos=usage.cost_nanos,
        )
    )


def counted_as(record: RequestLogRecord) -> str:
    """The outcome that metrics count. A completed answer counts as length if a sequence ended at its token limit, else as stop."""
    if record.outcome is not Outcome.COMPLETED:
        return record.outcome
    return "length" if "length" in (record.finish_reasons or ()) else "stop"


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


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error and of its causes.

    Tracebacks keep frames alive in reference cycles. Without them a refused request's memory, perhaps megabytes, is freed at once instead
    of at the next garbage collection.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            left += [one.__cause__, one.__context__]


def sane_request_id(value: bytes | None) -> str | None:
    """The client's own request id, for the log alone. None unless it has 1 to 128 characters, all ASCII letters, digits or -_.:/."""
    if value is None or not 0 < len(value) <= 128:
        return None
    text = value.decode("latin-1")
    return text if all(char.isascii() and (char.isalnum() or char in "-_.:/") for char in text) else None
