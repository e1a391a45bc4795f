"""Holds what the handlers of requests work with. `gateway.compose` makes it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from headrace.core.clock import Clock
from headrace.gateway.access.memory_charges import RequestMemory
from headrace.gateway.access.open_requests import OpenRequests
from headrace.gateway.access.principal import Principal
from headrace.gateway.generation.config import RequestConfig
from headrace.gateway.generation.explanations import Explanations
from headrace.gateway.generation.parsed_request import ParsedRequest
from headrace.gateway.generation.run import Pipeline
from headrace.gateway.generation.stages import Stages
from headrace.gateway.generation.stages.session import named_session
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.site import SiteMetrics
from headrace.gateway.text_workers.pool import TextPool
from headrace.gateway.upstream.served_models import ChosenModel, ModelTable
from headrace.observe.tenant_metrics import ShownTenants
from headrace.policy.routing.routes import Sender


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What handlers work with. Those that generate take `pipeline`, `memory`, `text_pool`, `open_requests` and `salt_key`, the secret that
    turns tenants into cache salts.
    """

    config: RequestConfig
    models: ModelTable
    open_requests: OpenRequests
    text_pool: TextPool
    memory: RequestMemory
    stages: Stages
    pipeline: Pipeline
    explanations: Explanations
    site_metrics: SiteMetrics
    salt_key: bytes
    unix_time: Clock

    def choose_model(self, exchange: Exchange, principal: Principal, parsed: ParsedRequest, num_bytes: int) -> ChosenModel:
        """num_bytes: of the body. Raises ModelNotFound, InvalidRequest, or Unavailable while the name may be that of an adapter."""

        def sender() -> Sender:
            return Sender(principal.tenant_key, named_session(exchange, parsed) or "", exchange.request_id)

        return self.models.usable_by(principal).choose(parsed.model, sender, partial(parsed.size_hint, num_bytes))

    def shown_tenants(self, reader: Principal) -> ShownTenants:
        return self.config.open_metrics.shown_to(reader, has_several=self.site_metrics.share.has_several)
