"""`headrace cache`: what is kept of whole answers, in the state folder or the Redis of a server, whether it runs or not."""

from __future__ import annotations

import json
import os
import time
from typing import Annotated

import typer

from headrace.cli.directory import AsJson, ConfigFile, StateFolder

cache_app = typer.Typer(help="Answers that are kept to be given again.", no_args_is_help=True, rich_markup_mode=None)


@cache_app.callback()
def _cache() -> None:
    """Keeps `purge` a sub-command although it is the only one."""


@cache_app.command()
def purge(
    tenant: Annotated[str, typer.Option("--tenant", help="Team or customer.")],
    everything: Annotated[bool, typer.Option("--all", help="Sessions, and streams that could be continued, too.")] = False,
    config: ConfigFile = None,
    state: StateFolder = None,
    as_json: AsJson = False,
) -> None:
    """Remove all kept answers of a tenant: cached ones, and those under an Idempotency-Key."""
    from headrace.bundled import DEFAULT_MODEL
    from headrace.cli.config import load_settings
    from headrace.cli.directory import administered
    from headrace.core.counted import counted
    from headrace.gateway.purge import purge_all, purge_answers

    settings = load_settings(config, os.environ, {"state": state}, default_model=None if config else DEFAULT_MODEL).whole_gateway()
    work = purge_all if everything else purge_answers
    num_removed = administered(config, state, lambda admin: work(settings, tenant, admin, time.time))
    removed = f"{num_removed} kept records" if everything else counted(num_removed, "answer")
    print(json.dumps({"removed": num_removed}) if as_json else f"{removed} of {tenant} removed")
