"""Where commands find keys and tenants: in the state folder, or in the Redis of a configuration, whether a server runs or not."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from headrace.cli.config import ServeConfig
    from headrace.gateway.access.administration import Administration
    from headrace.gateway.access.key_records import TenantRecord

T = TypeVar("T")

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file of the server: its tiers, and its Redis where gateway.store.url names one.")
]
StateFolder = Annotated[
    str | None,
    typer.Option("--state", metavar="DIR", help="The server's state folder. Default: HEADRACE_STATE, else ~/.local/state/headrace."),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


def administered(file: Path | None, state: str | None, work: Callable[[Administration], Awaitable[T]]) -> T:
    """What `work` gives, done on the keys and tenants of a server. Raises ConfigError, InvalidRequest and StoreFailed."""
    import asyncio  # brings ssl, which takes its time

    config = _settings(file, state)

    async def run() -> T:
        administration = open_administration(config, actor=f"{user_name(os.geteuid())}, by command")
        try:
            return await work(administration)
        finally:
            await administration.close()

    return asyncio.run(run())


def used_limits(file: Path | None, state: str | None, tenant: TenantRecord) -> list[dict[str, object]]:
    """What a tenant has used of each of its limits. Raises ConfigError and StoreFailed."""
    import asyncio

    from headrace.cli.state import make_state_folder
    from headrace.gateway.limits.open import open_limits
    from headrace.gateway.limits.report import limit_states, shown_limits, tenant_principal
    from headrace.policy.limits.tier import all_tiers

    config = _settings(file, state)
    tier = all_tiers(config.tiers).get(tenant.tier)
    if tier is None:
        raise ConfigError(f"tiers.{tenant.tier}", f"is not there, and the tenant {tenant.name} has it", "Give --config FILE of the server.")
    principal = tenant_principal(tenant.name, tenant.tier, tier, monthly_budget=tenant.monthly_budget)

    async def run() -> list[dict[str, object]]:
        make_state_folder(Path(config.state))
        store = open_limits(config.gateway.store, config.state, clock=time.monotonic, unix_time=time.time)
        try:
            return shown_limits(await limit_states(store, principal))
        finally:
            await store.close()

    return asyncio.run(run())


def _settings(file: Path | None, state: str | None) -> ServeConfig:
    """Raises ConfigError."""
    from headrace.bundled import DEFAULT_MODEL
    from headrace.cli.config import load_settings

    return load_settings(file, os.environ, {"state": state}, default_model=None if file else DEFAULT_MODEL)


def open_administration(config: ServeConfig, *, actor: str) -> Administration:
    """actor: see `AuditRecord`. Raises ConfigError"""
    from headrace.cli.state import make_state_folder
    from headrace.gateway.access.administration import Administration
    from headrace.gateway.access.open_keys import open_keys
    from headrace.policy.limits.tier import all_tiers

    make_state_folder(Path(config.state))
    store = open_keys(config.state, config.gateway.store)
    assert store is not None, "`load` names a state folder"
    return Administration(store, tiers=all_tiers(config.tiers), unix_time=time.time, actor=actor)


def user_name(uid: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return f"user {uid}"
