"""`headrace tenants` and `headrace cache`: tenants (docs/identity.md), and the answers that are kept of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer

from headrace.cli.admin.directory import AsJson, KeyDirectory, of_directory
from headrace.cli.admin.keys import LIMIT_COLUMNS, TIERS, print_rows, print_with_limits
from headrace.cli.exits import UsageRefused
from headrace.core.errors import counted

tenants_app = typer.Typer(help="Create, list, change and remove tenants.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(metavar="TENANT")]
TierName = Annotated[str | None, typer.Option("--tier", help=f"The tenant's rules: {TIERS}. A new tenant without one is standard.")]
Budget = Annotated[float | None, typer.Option("--budget", help="Money per UTC month in the place of the tier's; 0: the tier's again.")]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help="log_prompts=true, cache=false, context_fitting=summary; NAME= for the default; repeatable.",
    ),
]


@tenants_app.command()
@of_directory
def create(
    directory: KeyDirectory,
    name: Name,
    tier: TierName = None,
    budget: Budget = None,
    option: Options = None,
) -> None:
    """Create a tenant. `headrace keys create` does it too, with the key's tier."""
    directory.note_unpriced_models(budget)
    body = {"name": name, **_change(tier, budget, option)}
    directory.ask("POST", "tenants", body=body)
    print(f"{name} is created")


@tenants_app.command("set")
@of_directory
def set_tenant(
    directory: KeyDirectory,
    name: Name,
    tier: TierName = None,
    budget: Budget = None,
    option: Options = None,
) -> None:
    """Change a tenant, on every gateway within two seconds."""
    if tier is None and budget is None and not option:
        raise UsageRefused("--tier, --budget, --option: give at least one of them")
    directory.note_unpriced_models(budget)
    directory.ask("POST", "tenants", name, body=_change(tier, budget, option))
    print(f"{name} is changed")


@tenants_app.command("list")
@of_directory
def list_tenants(
    directory: KeyDirectory,
    as_json: AsJson = False,
) -> None:
    """List all tenants."""
    print_rows(directory.ask("GET", "tenants"), ("name", "tier", "budget", "options", "created_at"), as_json)


@tenants_app.command()
@of_directory
def show(
    directory: KeyDirectory,
    name: Name,
    as_json: AsJson = False,
) -> None:
    """Show a tenant, and what it, its users and its keys have used of their limits."""
    print_with_limits(directory.ask("GET", "tenants", name), directory.limits("tenants", name), as_json)


@tenants_app.command("budget")
@of_directory
def deployment_budget(
    directory: KeyDirectory,
    as_json: AsJson = False,
) -> None:
    """Show what all tenants together have used of the deployment's budget (gateway.limits.daily_budget, monthly_budget)."""
    rows = directory.deployment_limits()
    if not rows and not as_json:
        print("The deployment has no budget: gateway.limits.daily_budget and monthly_budget are not set.")
        return
    print_rows(rows, LIMIT_COLUMNS, as_json)


@tenants_app.command()
@of_directory
def remove(
    directory: KeyDirectory,
    name: Name,
    revoke_keys: Annotated[bool, typer.Option("--revoke-keys", help="Revoke the tenant's keys too.")] = False,
) -> None:
    """Remove a tenant that has no active key. What was recorded of it stays."""
    directory.ask("DELETE", "tenants", name, body={"revoke_keys": revoke_keys})
    print(f"{name} is removed")


def _change(tier: str | None, budget: float | None, options: Sequence[str] | None) -> dict[str, object]:
    return {"tier": tier, "budget": budget, "options": dict(map(_option, options or ()))}


def _option(word: str) -> tuple[str, object]:
    """An option given as NAME=VALUE: VALUE is JSON or a word, and nothing means the default."""
    name, separator, value = word.partition("=")
    if not (name and separator):
        raise UsageRefused(f"--option: {word!r} is not NAME=VALUE. Write --option log_prompts=true.")
    if not value:
        return name, None
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


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
    num_removed = directory.purge(tenant, is_all=everything)
    removed = f"{num_removed} kept records" if everything else counted(num_removed, "answer")
    print(json.dumps({"removed": num_removed}) if as_json else f"{removed} of {tenant} removed")
