"""`headrace tenants`: create, list, show, change and remove tenants. docs/identity.md"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.directory import AsJson, ConfigFile, StateFolder
from headrace.cli.keys import print_rows, print_with_limits

if TYPE_CHECKING:
    from headrace.gateway.access.administration import TenantChange

tenants_app = typer.Typer(help="Create, list, change and remove tenants.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(metavar="TENANT")]
TierName = Annotated[str | None, typer.Option("--tier", help="The tenant's rules. A new tenant without one is standard.")]
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
def create(
    name: Name,
    tier: TierName = None,
    budget: Budget = None,
    option: Options = None,
    config: ConfigFile = None,
    state: StateFolder = None,
) -> None:
    """Create a tenant. `headrace keys create` does it too, with the key's tier."""
    from headrace.cli.directory import administered

    change = _change(tier, budget, option)
    administered(config, state, lambda admin: admin.create_tenant(name, change))
    print(f"{name} is created")


@tenants_app.command("set")
def set_tenant(
    name: Name,
    tier: TierName = None,
    budget: Budget = None,
    option: Options = None,
    config: ConfigFile = None,
    state: StateFolder = None,
) -> None:
    """Change a tenant, on every gateway within two seconds."""
    from headrace.cli.directory import administered
    from headrace.cli.exits import UsageRefused

    if tier is None and budget is None and not option:
        raise UsageRefused("--tier, --budget, --option: give at least one of them")
    change = _change(tier, budget, option)
    administered(config, state, lambda admin: admin.set_tenant(name, change))
    print(f"{name} is changed")


@tenants_app.command("list")
def list_tenants(config: ConfigFile = None, state: StateFolder = None, as_json: AsJson = False) -> None:
    """List all tenants."""
    from headrace.cli.directory import administered
    from headrace.gateway.access.shown_records import shown_tenant

    found = [shown_tenant(tenant) for tenant in administered(config, state, lambda admin: admin.tenants())]
    print_rows(found, ("name", "tier", "budget", "options", "created_at"), as_json)


@tenants_app.command()
def show(name: Name, config: ConfigFile = None, state: StateFolder = None, as_json: AsJson = False) -> None:
    """Show a tenant, and what it, its users and its keys have used of their limits."""
    from headrace.cli.directory import KeyDirectory

    directory = KeyDirectory(config, state, None, None)
    print_with_limits(directory.ask("GET", "tenants", name), directory.limits("tenants", name), as_json)


@tenants_app.command()
def remove(
    name: Name,
    revoke_keys: Annotated[bool, typer.Option("--revoke-keys", help="Revoke the tenant's keys too.")] = False,
    config: ConfigFile = None,
    state: StateFolder = None,
) -> None:
    """Remove a tenant that has no active key. What was recorded of it stays."""
    from headrace.cli.directory import administered

    administered(config, state, lambda admin: admin.remove_tenant(name, revoke_keys=revoke_keys))
    print(f"{name} is removed")


def _change(tier: str | None, budget: float | None, options: Sequence[str] | None) -> TenantChange:
    from headrace.gateway.access.administration import TenantChange

    return TenantChange(tier=tier, monthly_budget=budget, options=dict(map(_option, options or ())))


def _option(word: str) -> tuple[str, object]:
    """NAME=VALUE, where VALUE is JSON or a word; nothing for the default. Raises UsageRefused."""
    from headrace.cli.exits import UsageRefused

    name, separator, value = word.partition("=")
    if not (name and separator):
        raise UsageRefused(f"--option: {word!r} is not NAME=VALUE. Write --option log_prompts=true.")
    if not value:
        return name, None
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
