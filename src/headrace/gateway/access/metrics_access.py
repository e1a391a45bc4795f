"""Filters the series of /metrics by their reader."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.gateway.access.principal import Principal
from headrace.observe.tenant_metrics import EVERY_TENANT, NO_TENANT, ShownTenants


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsAccess:
    """
    is_open           the page is read without a key
    has_open_tenants  with the series of tenants and tiers too
    tenants           whose keys read the whole page
    """

    is_open: bool
    has_open_tenants: bool
    tenants: tuple[str, ...]

    def shown_to(self, reader: Principal, *, has_several: bool) -> ShownTenants:
        """Without keys, or where all keys are of one tenant, every reader sees all. Otherwise a key sees its tenant's series.

        has_several: keys may be of several tenants
        """
        if self.is_open:
            return EVERY_TENANT if self.has_open_tenants else NO_TENANT
        if not reader.key_id or not has_several or reader.tenant in self.tenants:
            return EVERY_TENANT
        return ShownTenants(own=reader.tenant)
