"""`headrace cache purge` removes a tenant's stored answers, in the state folder or the Redis of a server. The server need not run."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from headrace.cli.directory import AsJson, KeyDirectory, of_directory

cache_app = typer.Typer(help="Answers that are kept to be given again.", no_args_is_help=True, rich_markup_mode=None)


@cache_app.callback()
def _cache() -> None:
    """Keeps `purge` a sub-command although it is the only one."""


@cache_app.command()
@of_directory
def purge(
    directory: KeyDirectory,
    tenant: Annotated[str, typer.Option("--tenant", help="Team or customer.")],
    everything: Annotated[bool, typer.Option("--all", help="Sessions, and streams that could be continued, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove all kept answers of a tenant: cached ones, and those under an Idempotency-Key."""
    from headrace.core.counted import counted

    num_removed = directory.purge(tenant, is_all=everything)
    removed = f"{num_removed} kept records" if everything else counted(num_removed, "answer")
    print(json.dumps({"removed": num_removed}) if as_json else f"{removed} of {tenant} removed")
