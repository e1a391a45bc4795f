"""Chooses the series of /metrics that a reader sees, by the reader's key."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from headrace.gateway.access.principal import Principal
from headrace.observe.tenant_metrics import EVERY_TENANT, NO_TENANT, ShownTenants


class OpenMetrics(StrEnum):
    """The part of the metrics page that a reader without a key sees on a server with keys."""

    NONE = "none"
    """no page: a key is wanted"""
    TOTALS = "totals"
    """sums over all tenants, without series of tenants and tiers"""
    ALL = "all"
    """the whole page"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsAccess:
    """
    open     the part of the page that every reader sees
    tenants  tenants whose keys show the whole page
    """

    open: OpenMetrics
    tenants: tuple[str, ...]

    def shown_to(self, reader: Principal, *, has_several: bool) -> ShownTenants:
        """The tenants whose series a reader sees: its own tenant, or every tenant on a server without keys or with keys of one tenant.

        has_several: whether keys may be of several tenants
        """
        if self.open is not OpenMetrics.NONE:
            return EVERY_TENANT if self.open is OpenMetrics.ALL else NO_TENANT
        if not reader.key_id or not has_several or reader.tenant in self.tenants:
            return EVERY_TENANT
        return ShownTenants(own=reader.tenant)
