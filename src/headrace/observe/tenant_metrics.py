"""Shows the use of tiers, of models and of the largest tenants on the metrics page.

At most MAX_TENANTS tenants have series of their own; the rest is `other`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.core.money import NANOS
from headrace.observe.vllm_metrics import LORA_INFO

MAX_TENANTS = 20

OTHER = "other"

MAX_WATCHED = 10 * MAX_TENANTS
"""Beyond this number the smallest tenant is forgotten."""

FADE_REQUESTS = 10_000
"""Recent counts are halved then, so that a quiet tenant makes way."""

LEAD = 2
"""A tenant takes over the smallest one's series at this many times its recent requests."""

TIER_PREFIX, TENANT_PREFIX, MODEL_PREFIX = "headrace_tier_", "headrace_tenant_", "headrace_model_"

BUDGET_PREFIX = "headrace_budget"

FOR_EVERY_KEY = frozenset({"headrace_replica_ready", "headrace_gateway_worker_up"})
"""Others count all tenants together: one of two could subtract its own numbers to see the other's."""


class RequestUse(NamedTuple):
    """refused: code of its error"""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost_nanos: int = 0
    refused: str = ""
    limit: str = ""


@dataclass(slots=True)
class UseCounts:
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost_nanos: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    limited: dict[str, int] = field(default_factory=dict)

    def add(self, use: RequestUse) -> None:
        self.requests += 1
        self.prompt_tokens += use.prompt_tokens
        self.cached_tokens += use.cached_tokens
        self.completion_tokens += use.completion_tokens
        self.cost_nanos += use.cost_nanos
        if use.refused:
            self.refused[use.refused] = self.refused.get(use.refused, 0) + 1
        if use.limit:
            self.limited[use.limit] = self.limited.get(use.limit, 0) + 1


class LargestTenants:
    def __init__(self) -> None:
        self.labelled: set[str] = set()
        self._recent: dict[str, int] = {}
        self._num_until_fade = FADE_REQUESTS

    def note(self, tenant: str) -> str | None:
        """Counts a request. Returns the tenant whose series this one takes over."""
        self._fade()
        if tenant not in self._recent and len(self._recent) >= MAX_WATCHED:
            self._forget_smallest()
        self._recent[tenant] = self._recent.get(tenant, 0) + 1
        if tenant in self.labelled:
            return None
        if len(self.labelled) < MAX_TENANTS:
            self.labelled.add(tenant)
            return None
        smallest = min(self.labelled, key=self._count)
        if self._recent[tenant] <= LEAD * self._count(smallest):
            return None
        self.labelled.remove(smallest)
        self.labelled.add(tenant)
        return smallest

    def _count(self, tenant: str) -> int:
        return self._recent.get(tenant, 0)

    def _fade(self) -> None:
        self._num_until_fade -= 1
        if self._num_until_fade == 0:
            self._num_until_fade = FADE_REQUESTS
            self._recent = {tenant: count // 2 for tenant, count in self._recent.items() if count > 1 or tenant in self.labelled}

    def _forget_smallest(self) -> None:
        unlabelled = [tenant for tenant in self._recent if tenant not in self.labelled]
        del self._recent[min(unlabelled, key=self._count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTenants:
    """own       ""; of all tenants' series, none
    has_site  also the site's series; otherwise only those of FOR_EVERY_KEY
    """

    is_all: bool = False
    own: str = ""
    has_site: bool = False

    def shown(self, families: Iterable[Metric]) -> list[Metric]:
        """Tiers and adapters are hidden too: one may have a single tenant."""
        return list(families) if self.is_all else [kept for family in families if (kept := self._kept(family)) is not None]

    def _kept(self, family: Metric) -> Metric | None:
        if family.name.startswith((TIER_PREFIX, BUDGET_PREFIX, LORA_INFO)):
            return None
        if not family.name.startswith(TENANT_PREFIX):
            return family if self.has_site or family.name in FOR_EVERY_KEY else None
        kept = Metric(family.name, family.documentation, family.type, family.unit)
        kept.samples = [sample for sample in family.samples if sample.labels["tenant"] == self.own != OTHER]
        return kept if kept.samples else None


EVERY_TENANT = ShownTenants(is_all=True)
NO_TENANT = ShownTenants(has_site=True)


class TenantMetrics(Collector):
    def __init__(self) -> None:
        self._models: dict[str, UseCounts] = {}
        self._tiers: dict[str, UseCounts] = {}
        self._tenants: dict[str, UseCounts] = {}
        self._largest = LargestTenants()

    def count(self, tier: str, tenant: str, use: RequestUse, *, model: str = "") -> None:
        """tier, model: configured names; model: empty for a request that did not get so far"""
        _of(self._tiers, tier).add(use)
        if model:
            _of(self._models, model).add(use)
        if (ended := self._largest.note(tenant)) is not None:
            self._tenants.pop(ended, None)
        label = tenant if tenant in self._largest.labelled else OTHER
        _of(self._tenants, label).add(use)

    def forget_model(self, model: str) -> None:
        self._models.pop(model, None)

    def collect(self) -> Iterator[Metric]:
        yield from _families(TIER_PREFIX, "tier", self._tiers)
        yield from _families(TENANT_PREFIX, "tenant", self._tenants)
        yield from _families(MODEL_PREFIX, "model", self._models)


def _of(counts: dict[str, UseCounts], label: str) -> UseCounts:
    known = counts.get(label)
    if known is None:
        known = counts[label] = UseCounts()
    return known


def _families(prefix: str, of: str, counts: Mapping[str, UseCounts]) -> Iterator[Metric]:
    requests = CounterMetricFamily(f"{prefix}requests", f"Generating requests by {of}, refused ones included.", labels=(of,))
    text = f"Tokens by {of}: input (cached ones included), cached (of the input), output."
    tokens = CounterMetricFamily(f"{prefix}tokens", text, labels=(of, "kind"))
    cost = CounterMetricFamily(f"{prefix}cost", f"Cost by {of} in the currency of `prices`.", labels=(of,))
    refused = CounterMetricFamily(f"{prefix}refused", f"Refused requests by {of} and error code.", labels=(of, "code"))
    limited = CounterMetricFamily(f"{prefix}limited", f"Requests by {of} and the limit that refused them.", labels=(of, "limit"))
    for name, each in counts.items():
        requests.add_metric((name,), each.requests)
        for kind, number in (("input", each.prompt_tokens), ("cached", each.cached_tokens), ("output", each.completion_tokens)):
            tokens.add_metric((name, kind), number)
        cost.add_metric((name,), each.cost_nanos / NANOS)
        for code, number in sorted(each.refused.items()):
            refused.add_metric((name, code), number)
        for limit, number in sorted(each.limited.items()):
            limited.add_metric((name, limit), number)
    yield from (requests, tokens, cost, refused, limited)
