"""Where commands find keys and tenants: in the state folder, or in the Redis of a configuration, whether a server runs or not."""

from __future__ import annotations

import asyncio
import os
import pwd
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from headrace.cli.config import ServeConfig
    from headrace.gateway.access.administration import Administration

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
    from headrace.bundled import DEFAULT_MODEL
    from headrace.cli.config import load_settings

    config = load_settings(file, os.environ, {"state": state}, default_model=None if file else DEFAULT_MODEL)

    async def run() -> T:
        administration = open_administration(config, actor=f"{user_name(os.geteuid())}, by command")
        try:
            return await work(administration)
        finally:
            await administration.close()

    return asyncio.run(run())


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
