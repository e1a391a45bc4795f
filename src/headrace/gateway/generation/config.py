"""Holds the parts of the gateway's configuration that answering a request reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.core.option import option
from headrace.gateway.access.principal import OpenMetrics
from headrace.gateway.http.config import Limits, Timeouts
from headrace.policy.config import AdmissionRules
from headrace.policy.limits.price import FREE, Price


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    ttl_s: float = option(
        3600.0,
        "Seconds since its last turn that a session is kept; 0: none is kept, and a request with one is refused.",
        low=0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    enabled: bool = option(False, "Answer equal deterministic requests from the response cache; a tenant's option `cache` counts more.")
    ttl_s: float = option(3600.0, "Seconds that an answer is kept.", above=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestConfig:
    """prices: model name -> price; open_metrics: which series a reader of the page sees; log_prompt_blocks: of the request log"""

    limits: Limits
    timeouts: Timeouts
    admission: AdmissionRules
    prices: Mapping[str, Price]
    cache: CacheConfig
    open_metrics: OpenMetrics
    log_prompt_blocks: bool

    def price_of(self, model: str) -> Price:
        """model: `ServedModel.base_name`"""
        return self.prices.get(model, FREE)
