"""Reports how much of their limits tenants, users, keys and the deployment have used."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from headrace.core.clock import Clock
from headrace.core.errors import ConfigError
from headrace.core.money import NANOS
from headrace.gateway.access.admin_requests import Handlers
from headrace.gateway.access.administration import Administration
from headrace.gateway.access.auth import stored_principal, with_record
from headrace.gateway.access.key_store import StoredKey
from headrace.gateway.access.principal import Principal
from headrace.gateway.limits.rules import LimitRule, LimitState, Scope, limits_now, rules_of
from headrace.gateway.limits.store import LimitStore
from headrace.policy.limits.counters import Unit
from headrace.policy.limits.tier import DeploymentBudget, Tier

MAX_KEYS = 1000


class LimitReport:
    """All methods raise InvalidRequest for an unknown name, ConfigError and StoreFailed."""

    def __init__(
        self, admin: Administration, store: LimitStore, tiers: Mapping[str, Tier], budget: DeploymentBudget, unix_time: Clock
    ) -> None:
        self._admin, self._store, self._tiers, self._budget, self._unix_time = admin, store, tiers, budget, unix_time

    async def of(self, kind: str, name: str) -> list[dict[str, object]]:
        """kind: keys or tenants"""
        return await (self.of_key(name) if kind == "keys" else self.of_tenant(name))

    async def of_key(self, key_id: str) -> list[dict[str, object]]:
        key = await self._admin.key(key_id)
        if not key.is_active(self._unix_time()):
            return []
        return await self._shown([self._principal(StoredKey(key, await self._admin.tenant(key.tenant)))])

    async def of_tenant(self, name: str) -> list[dict[str, object]]:
        tenant = await self._admin.tenant(name)
        now = self._unix_time()
        active = [key for key in await self._admin.keys(name) if key.is_active(now)]
        callers = [self._principal(StoredKey(key, tenant)) for key in active[:MAX_KEYS]]
        own = replace(self._tier(tenant.tier, name), user_requests_per_minute=None)
        return await self._shown([with_record(Principal(tenant=name, tier=own), tenant), *callers])

    async def of_deployment(self) -> list[dict[str, object]]:
        return await self._shown([Principal(tenant="", tier=Tier())])

    def _principal(self, stored: StoredKey) -> Principal:
        return stored_principal(stored, self._tier(stored.tier_name, stored.key.tenant))

    def _tier(self, name: str, tenant: str) -> Tier:
        if name not in self._tiers:
            raise ConfigError(f"tiers.{name}", f"is not there, and the tenant {tenant} has it", "Give --config FILE of the server.")
        return self._tiers[name]

    async def _shown(self, callers: Sequence[Principal]) -> list[dict[str, object]]:
        """Each counter is shown under the first caller that has it."""
        rows: dict[str, tuple[str, LimitRule]] = {}
        for caller in callers:
            for rule in rules_of(caller, self._budget):
                rows.setdefault(rule.counter, (_owner(caller, rule), rule))
        states = await limits_now(self._store, [rule for _, rule in rows.values()])
        return [_row(of, state) for (of, _), state in zip(rows.values(), states, strict=True)]


def _owner(caller: Principal, rule: LimitRule) -> str:
    names = {Scope.KEY: caller.key_id, Scope.USER: caller.user or "-"}
    return f"{rule.scope} {names[rule.scope]}" if rule.scope in names else str(rule.scope)


def _row(of: str, state: LimitState) -> dict[str, object]:
    """Reserved amounts count as used."""
    return {
        "of": of,
        "limit": state.rule.label,
        "number": _in_units(state.rule, state.rule.number),
        "used": _in_units(state.rule, state.used),
        "left": _in_units(state.rule, state.remaining),
        "reset_s": state.reset_ms / 1000,
    }


def _in_units(rule: LimitRule, value: int) -> float | int:
    return value / NANOS if rule.unit is Unit.NANOS else value


ReadLimits = Callable[[Administration, Callable[[LimitReport], Awaitable[list[dict[str, object]]]]], Awaitable[list[dict[str, object]]]]


def limit_requests(read: ReadLimits) -> Handlers:
    """read: opens a report, and returns the rows that its second argument makes of it"""
    return {
        ("GET", "limits"): lambda call: read(call.admin, LimitReport.of_deployment),
        ("GET", "tenants", "NAME", "limits"): lambda call: read(call.admin, lambda report: report.of_tenant(call.name)),
        ("GET", "keys", "NAME", "limits"): lambda call: read(call.admin, lambda report: report.of_key(call.name)),
    }
