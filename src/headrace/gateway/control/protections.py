"""Refuses a reload that would take away what protects a running server. Pure.

A file that is empty for a moment, cut off, or without some of its lines is often a valid one that allows more. So what protects may be
changed by a reload, and does not vanish by one: keys as a whole, the tenant and tier of a key that stays, TLS, a limit, a budget, a price,
a sink of usage records, names of hosts. Bounds with a default always bound something and are not listed here. Giving up the keys takes
`gateway.access: open` in the file, the rest a restart. What takes a restart anyway (stores, sessions, site key) is refused elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from headrace.core.counted import counted
from headrace.core.errors import ConfigError
from headrace.core.hosts import is_loopback
from headrace.gateway.access.principal import OPEN_ACCESS, ApiKey
from headrace.gateway.cache.config import CacheConfig
from headrace.gateway.http.config import HttpTls, Limits, Timeouts
from headrace.gateway.ledger.config import UsageConfig
from headrace.gateway.upstream.model_config import ModelConfig
from headrace.policy.limits.price import Price
from headrace.policy.limits.tier import Tier, all_tiers

OF_TIER = (
    "requests_per_minute",
    "input_tokens_per_minute",
    "output_tokens_per_minute",
    "user_requests_per_minute",
    "max_concurrent_requests",
    "max_context_tokens",
    "kv_share",
    "daily_tokens",
    "monthly_tokens",
    "daily_budget",
    "monthly_budget",
    "models",
)
"""Limits of a tier, which has none of them by default."""

OF_KEY = ("user", "tier")
"""What a key that stays goes on to say of its caller. Another value is fine."""

OF_PRICE = ("input", "output")

SECTIONS = {
    "gateway.limits": ("daily_budget", "monthly_budget"),
    "gateway.timeouts": ("request_s",),
    "gateway": ("tls",),
    "usage": ("kafka", "clickhouse"),
    "usage.kafka": ("properties_file",),
    "usage.clickhouse": ("password_file", "ca_file"),
}
"""Path of a section -> its keys that protect where they are set."""


class Protecting(Protocol):
    """What protects in the gateway's configuration."""

    @property
    def api_keys(self) -> Sequence[ApiKey]: ...
    @property
    def access(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def allowed_hosts(self) -> Sequence[str]: ...
    @property
    def tls(self) -> HttpTls | None: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def timeouts(self) -> Timeouts: ...
    @property
    def cache(self) -> CacheConfig: ...
    @property
    def usage(self) -> UsageConfig: ...
    @property
    def tiers(self) -> Mapping[str, Tier]: ...
    @property
    def prices(self) -> Mapping[str, Price]: ...
    @property
    def models(self) -> Sequence[ModelConfig]: ...


MAX_SHOWN = 5
RESTORE = "Write what it was: only a restart gives it up."


def check_keeps_protections(before: Protecting, after: Protecting, *, has_stored_keys: bool) -> None:
    """Raise ConfigError that names what a reload from `before` to `after` would lose. Paths are those of the operator's file.

    has_stored_keys: whether the store has keys, so that requests need one in any case
    """
    if gives_up_keys(before, after) and not has_stored_keys:
        reason = f"would be gone, so that no request needs a key any more ({counted(len(before.api_keys), 'key')} now)"
        raise ConfigError("gateway.api_keys", reason, f"Write the keys again, or `access: {OPEN_ACCESS}` below `gateway` if that is meant.")
    if lost := [*_lost_sections(before, after), *_lost_of_keys(before, after), *_lost_limits(before, after), *_lost_tls(before, after)]:
        more = [*lost[1:MAX_SHOWN], *([f"{len(lost) - MAX_SHOWN} more"] if len(lost) > MAX_SHOWN else [])]
        raise ConfigError(lost[0], "protects the running server and would be gone" + f", and {', '.join(more)}" * bool(more), RESTORE)


def gives_up_keys(before: Protecting, after: Protecting) -> bool:
    """Whether the configuration would lose its last key without the word for it."""
    return bool(before.api_keys) and not after.api_keys and after.access != OPEN_ACCESS


def _lost_sections(before: Protecting, after: Protecting) -> Iterator[str]:
    for path, names in SECTIONS.items():
        old, new = _section(before, path), _section(after, path)
        yield from (f"{path}.{name}" for name in _vanished(old, new, names) if new is not None)
    if before.allowed_hosts and not after.allowed_hosts and not is_loopback(after.host):
        yield "gateway.allowed_hosts"
    if before.cache.models and after.cache.enabled and not after.cache.models:
        yield "gateway.cache.models"
    if before.usage.retention_days > after.usage.retention_days == UsageConfig().retention_days:
        yield "usage.retention_days"


def _section(config: Protecting, path: str) -> object:
    found: object = config
    for step in path.removeprefix("gateway").split("."):
        found = getattr(found, step) if step and found is not None else found
    return found


def _vanished(before: object, after: object, names: tuple[str, ...]) -> Iterator[str]:
    """The attributes that are set in `before` alone."""
    return (name for name in names if getattr(before, name, None) and not getattr(after, name, None))


def _lost_of_keys(before: Protecting, after: Protecting) -> Iterator[str]:
    """What a key that stays would no longer say. It keeps its tenant too: another one's data are not for the holder of this key."""
    held = {key.sha256: key for key in before.api_keys}
    tenants = {key.tenant for key in before.api_keys}
    for key in after.api_keys:
        if (old := held.get(key.sha256)) is None:
            continue
        where = f"gateway.api_keys[key-{key.sha256[:12]}]"
        if key.tenant != old.tenant and (_said(old, "tenant") or key.tenant in tenants):
            yield f"{where}.tenant"
        yield from (f"{where}.{name}" for name in OF_KEY if _said(old, name) and not _said(key, name))


def _said(key: ApiKey, name: str) -> str:
    """What the file says of the key; empty for the tenant that a key without one is given."""
    value: str = getattr(key, name)
    return "" if value == f"key-{key.sha256[:12]}" else value


def _lost_limits(before: Protecting, after: Protecting) -> Iterator[str]:
    """Limits of tiers, built-in ones included, and prices of models that stay. A tier that is no longer there lets no request in."""
    tiers = all_tiers(after.tiers)
    for name, tier in all_tiers(before.tiers).items():
        if name in tiers:
            yield from (f"tiers.{name}.{limit}" for limit in _vanished(tier, tiers[name], OF_TIER))
    served = {model.name for model in after.models}
    for name, price in before.prices.items():
        if name in served:
            yield from (f"prices.{name}.{each}" for each in _vanished(price, after.prices.get(name), OF_PRICE))


def _lost_tls(before: Protecting, after: Protecting) -> Iterator[str]:
    """Certificates towards engines that stay."""
    held = {(model.name, replica.name): replica for model in before.models for replica in model.replicas}
    for model in after.models:
        for replica in model.replicas:
            if (old := held.get((model.name, replica.name))) is not None and old.tls_dir and not replica.tls_dir:
                yield f"models[{model.name}].remote.tls_dir of the engine {replica.name}"
