"""Refuses a reload that would take away what protects a running server: a file that is cut off, or lacks some of its lines, is often a
valid one that allows more. Pure.

What protects may be changed by a reload, and does not vanish by one: keys as a whole, the tenant and tier of a key that stays, TLS, a
limit, a budget, a price, a sink of usage records, names of hosts. Nor does a value that stays become one that goes in the same reload: two
entries become one where lines are lost. Bounds with a default are not listed. Giving up the keys takes `gateway.access: open` in the file,
the rest a restart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import chain
from typing import Any

from headrace.core.errors import ConfigError, counted
from headrace.gateway.access.principal import OPEN_ACCESS, ApiKey, KeyRole
from headrace.gateway.config import GatewayConfig
from headrace.gateway.ledger.config import UsageConfig
from headrace.gateway.upstream.model_config import ModelConfig
from headrace.machine.hosts import is_loopback
from headrace.policy.limits.tier import BUILT_IN_TIERS, Tier, all_tiers

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

DEFAULT = Tier()

OF_KEY = ("user", "tier", "role")

OF_PRICE = ("input", "output")

SECTIONS = {
    "gateway.limits": ("daily_budget", "monthly_budget"),
    "gateway.timeouts": ("request_s",),
    "gateway": ("tls",),
    "usage": ("kafka", "clickhouse"),
    "usage.kafka": ("properties_file",),
    "usage.clickhouse": ("password_file",),
}

LISTS = ("allowed_hosts", "allowed_origins", "trusted_proxies")


Entries = dict[str, set[tuple[str, object]]]
"""Path of a part -> (name, value); items of lists have no name."""

MAX_SHOWN = 5
RESTORE = "Write what it was: only a restart gives it up."
TWICE = "If that is meant, reload twice: with the change, and then without the other."


def check_keeps_protections(before: GatewayConfig, after: GatewayConfig, *, has_stored_keys: bool) -> None:
    """Raise ConfigError by the paths of the operator's file."""
    if gives_up_keys(before, after) and not has_stored_keys:
        reason = f"would be gone, so that no request needs a key any more ({counted(len(before.api_keys), 'key')} now)"
        raise ConfigError("gateway.api_keys", reason, f"Write the keys again, or `access: {OPEN_ACCESS}` below `gateway` if that is meant.")
    paths = chain(_lost_sections(before, after), _lost_of_keys(before, after), _lost_limits(before, after), _lost_tls(before, after))
    if lost := list(dict.fromkeys(paths)):
        more = [*lost[1:MAX_SHOWN], *([f"{len(lost) - MAX_SHOWN} more"] if len(lost) > MAX_SHOWN else [])]
        raise ConfigError(lost[0], "protects the running server and would be gone" + f", and {', '.join(more)}" * bool(more), RESTORE)
    for where, source in _taken_over(before, after):
        raise ConfigError(where, f"would be taken from {source}, which goes in the same reload, as where lines are lost", TWICE)


def gives_up_keys(before: GatewayConfig, after: GatewayConfig) -> bool:
    return bool(before.api_keys) and not after.api_keys and after.access != OPEN_ACCESS


def _lost_sections(before: GatewayConfig, after: GatewayConfig) -> Iterator[str]:
    for path, names in SECTIONS.items():
        old, new = _section(before, path), _section(after, path)
        yield from (f"{path}.{name}" for name in _vanished(old, new, names) if new is not None)
    if before.allowed_hosts and not after.allowed_hosts and not is_loopback(after.host):
        yield "gateway.allowed_hosts"
    if before.usage.retention_days > after.usage.retention_days == UsageConfig().retention_days:
        yield "usage.retention_days"


def _section(config: GatewayConfig, path: str) -> object:
    section: object = config
    for step in path.removeprefix("gateway").split("."):
        section = getattr(section, step) if step and section is not None else section
    return section


def _vanished(before: object, after: object, names: tuple[str, ...]) -> Iterator[str]:
    return (name for name in names if getattr(before, name, None) and not getattr(after, name, None))


def _lost_of_keys(before: GatewayConfig, after: GatewayConfig) -> Iterator[str]:
    """Data of another tenant are not for the key's holder."""
    held = {key.sha256: key for key in before.api_keys}
    tenants = {key.tenant for key in before.api_keys}
    for key in after.api_keys:
        if (old := held.get(key.sha256)) is None:
            continue
        where = _path_of(key)
        if key.tenant != old.tenant and (_said(old, "tenant") or key.tenant in tenants):
            yield f"{where}.tenant"
        yield from (f"{where}.{name}" for name in OF_KEY if _said(old, name) and not _said(key, name))


def _path_of(key: ApiKey) -> str:
    return f"gateway.api_keys[key-{key.sha256[:12]}]"


def _said(key: ApiKey, name: str) -> str:
    value: str = getattr(key, name)
    unsaid = {"tenant": f"key-{key.sha256[:12]}", "role": KeyRole.USER}
    return "" if value == unsaid.get(name) else value


def _lost_limits(before: GatewayConfig, after: GatewayConfig) -> Iterator[str]:
    """A tier that is no longer there lets no request in."""
    tiers = all_tiers(after.tiers)
    for name, tier in all_tiers(before.tiers).items():
        if name in tiers:
            yield from (f"tiers.{name}.{limit}" for limit in chain(_vanished(tier, tiers[name], OF_TIER), _risen(tier, tiers[name])))
        if name in before.tiers and name not in after.tiers and tier != BUILT_IN_TIERS.get(name, tier):
            yield f"tiers.{name}"  # the numbers of the built-in tier would hold again
    held, served = {model.name for model in before.models}, {model.name for model in after.models}
    for old in (model for model in before.models if model.name in before.prices):
        for new in after.models:
            is_renamed = old.name not in served and new.name not in held and _answers(old) & _answers(new)
            if is_renamed or {old.name, *old.aliases} & {new.name, *new.aliases}:
                gone = _vanished(before.prices[old.name], after.prices.get(new.name), OF_PRICE)
                yield from (f"prices.{new.name}.{each}" for each in gone)


def _risen(before: Tier, after: Tier) -> Iterator[str]:
    """What lets a tier's requests pass those of other tiers."""
    if before.priority > after.priority == DEFAULT.priority:  # a lower value is served first
        yield "class"
    if before.weight < after.weight == DEFAULT.weight:
        yield "weight"


def _answers(model: ModelConfig) -> set[tuple[str, str]]:
    """Whatever a model's name: a folder, and models of foreign servers."""
    return {("", model.folder), *((upstream.url, upstream.model or model.name) for upstream in model.upstreams)} - {("", "")}


def _lost_tls(before: GatewayConfig, after: GatewayConfig) -> Iterator[str]:
    held = {(model.name, replica.name): replica for model in before.models for replica in model.replicas}
    for model in after.models:
        for replica in model.replicas:
            if (old := held.get((model.name, replica.name))) is not None and old.tls_dir and not replica.tls_dir:
                yield f"models[{model.name}].remote.tls_dir of the engine {replica.name}"


def _taken_over(before: GatewayConfig, after: GatewayConfig) -> Iterator[tuple[str, str]]:
    """Values of what stays that were those of what goes, each with the path of the latter."""
    old, new = _entries(before), _entries(after)
    left = {value: path for path in old if path not in new for value in old[path]}
    for path, values in new.items():
        yield from ((f"{path}.{value[0]}".rstrip("."), left[value]) for value in values - old.get(path, values) if value in left)


def _entries(config: GatewayConfig) -> Entries:
    entries: Entries = {
        _path_of(key): {(name, _said(key, name)) for name in ("tenant", *OF_KEY) if _said(key, name)} for key in config.api_keys
    }
    entries |= {f"tiers.{name}": _values(tier) for name, tier in config.tiers.items()}
    entries |= {f"prices.{name}": _values(price) for name, price in config.prices.items()}
    for model in config.models:
        entries |= {f"models[{model.name}].remote.replicas[{each.name}]": _values(each) for each in model.replicas}
        for each in model.upstreams:  # a key stays at its address, and with its account where several are at one
            for server in {each.url, f"{each.url} {each.model} {each.name}".rstrip()}:
                entry = entries.setdefault(f"models[{model.name}].upstreams[{server}]", set())
                entry |= _values(each, "api_key_file", "api_key_env")
    lists: Entries = {f"gateway.{name}": {("", each) for each in getattr(config, name)} for name in LISTS}
    entries |= {path: values for path, values in lists.items() if values}
    return entries | {"gateway.limits": _values(config.limits, "daily_budget", "monthly_budget")}


def _values(entry: Any, *names: str) -> set[tuple[str, object]]:
    values: set[tuple[str, object]] = set()
    for item in fields(entry):
        value = getattr(entry, item.name)
        if value != item.default and item.name in (names or (item.name,)):
            values |= {("", each) for each in value} if isinstance(value, tuple) else {(item.name, value)}
    return values
