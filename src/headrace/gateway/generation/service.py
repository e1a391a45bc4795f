"""Holds the objects that answering requests needs. `gateway.compose` makes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from headrace.core.clock import Clock
from headrace.gateway.access.memory_charges import RequestMemory
from headrace.gateway.access.open_requests import OpenRequests
from headrace.gateway.access.principal import Principal
from headrace.gateway.access.stored_keys import StoredKeys
from headrace.gateway.cache.answer_cache import AnswerCache
from headrace.gateway.cache.replays import Replays
from headrace.gateway.generation.config import RequestConfig
from headrace.gateway.generation.explanations import Explanations
from headrace.gateway.generation.kept_streams import KeptStreams
from headrace.gateway.generation.parsed_request import ParsedRequest
from headrace.gateway.generation.run import Pipeline
from headrace.gateway.generation.size_hint import size_hint
from headrace.gateway.generation.stages.session import named_session
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.ledger.ledger import Ledger
from headrace.gateway.limits.limiter import Limiter
from headrace.gateway.sessions.sessions import Sessions
from headrace.gateway.site.memory import TenantShare
from headrace.gateway.site.worker import SiteMetrics
from headrace.gateway.text_workers.pool import TextPool
from headrace.gateway.upstream.served_models import ChosenModel, ModelTable
from headrace.observe.metrics import Metrics
from headrace.observe.tenant_metrics import ShownTenants
from headrace.policy.routing.routes import Sender

if TYPE_CHECKING:
    from headrace.observe.traces import TraceExporter


@dataclass(frozen=True, slots=True)
class Service:
    """The objects that answering a request may use.

    traces       None: no collector is configured
    ledger       None: usage is not kept; `explanations` writes to it
    salt_key     secret that turns tenants into cache salts
    clock        monotonic seconds
    """

    config: RequestConfig
    models: ModelTable
    stored_keys: StoredKeys | None
    open_requests: OpenRequests
    text_pool: TextPool
    pipeline: Pipeline
    memory: RequestMemory
    tenant_share: TenantShare
    kept_streams: KeptStreams
    sessions: Sessions
    limiter: Limiter
    answer_cache: AnswerCache
    replays: Replays
    metrics: Metrics
    site_metrics: SiteMetrics
    ledger: Ledger | None
    traces: TraceExporter | None
    explanations: Explanations
    salt_key: bytes
    clock: Clock
    unix_time: Clock

    def choose_model(self, exchange: Exchange, principal: Principal, parsed: ParsedRequest, num_bytes: int) -> ChosenModel:
        """num_bytes: of the body. Raises ModelNotFound, InvalidRequest, or Unavailable while the name may be that of an adapter."""

        def sender() -> Sender:
            return Sender(principal.tenant_key, named_session(exchange, parsed) or "", exchange.request_id)

        hint = partial(size_hint, parsed.prompt, num_bytes, parsed.priority)
        return self.models.usable_by(principal).choose(parsed.model, sender, hint)

    def shown_tenants(self, reader: Principal) -> ShownTenants:
        return self.config.open_metrics.shown_to(reader, has_several=self.tenant_share.has_several)
