"""`headrace keys`: create, list, show, rotate and revoke API keys, and read the audit log of keys and tenants (docs/identity.md)."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from headrace.cli.admin.directory import AsJson, KeyDirectory, of_directory
from headrace.cli.exits import UsageRefused
from headrace.policy.limits.tier import BUILT_IN_TIERS

keys_app = typer.Typer(help="Create, list, rotate and revoke API keys.", no_args_is_help=True, rich_markup_mode=None)

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}

LIMIT_COLUMNS = ("of", "limit", "number", "used", "left", "reset_s")

TIERS = f"{', '.join(BUILT_IN_TIERS)}, or one of `tiers` in the file of --config"

ROLES = "user, or reader: reads what belongs to every tenant, and generates nothing."

KeyId = Annotated[str, typer.Argument(metavar="ID", help="As `headrace keys list` shows it.")]


@keys_app.command()
@of_directory
def create(
    directory: KeyDirectory,
    tenant: Annotated[str, typer.Option("--tenant", help="Team or customer; created where it is not there yet.")],
    role: Annotated[str, typer.Option("--role", help=ROLES)] = "user",
    tier: Annotated[str | None, typer.Option("--tier", help=f"The key's rules: {TIERS}. Default: its tenant's.")] = None,
    user: Annotated[str, typer.Option("--user", help="Person or program that gets the key.")] = "",
    expires: Annotated[str | None, typer.Option("--expires", metavar="TIME", help="30d, 12h, ... from now. Default: never.")] = None,
    budget: Annotated[float | None, typer.Option("--budget", help="Money per UTC month, in the currency of `prices`.")] = None,
    models: Annotated[str | None, typer.Option("--models", metavar="A,B", help="Models that it may use. Default: its tier's.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option("--requests-per-minute", help="Of this key alone.")] = None,
    as_json: AsJson = False,
) -> None:
    """Create an API key and print it. It is shown once: only its digest is kept."""
    names = [name.strip() for name in models.split(",")] if models else []
    directory.note_unknown_models(names)
    directory.note_unpriced_models(budget, names)
    wanted = {
        "tenant": tenant,
        **({} if role == "user" else {"role": role}),  # a server that knows no roles refuses the word
        "tier": tier,
        "user": user,
        "expires_s": None if expires is None else _seconds_of(expires, "--expires"),
        "budget": budget,
        "requests_per_minute": requests_per_minute,
        "models": names,
    }
    _print_issued(directory.ask("POST", "keys", body=wanted), as_json)


@keys_app.command("list")
@of_directory
def list_keys(
    directory: KeyDirectory,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only of this tenant.")] = None,
    as_json: AsJson = False,
) -> None:
    """List all keys, revoked and expired ones too."""
    keys = directory.ask("GET", "keys", query={} if tenant is None else {"tenant": tenant})
    print_rows(keys, ("id", "first_chars", "tenant", "user", "role", "tier", "state", "expires_at"), as_json)


@keys_app.command()
@of_directory
def show(
    directory: KeyDirectory,
    key_id: KeyId,
    as_json: AsJson = False,
) -> None:
    """Show what a key may do, and what is used of every limit that its requests are held to."""
    print_with_limits(directory.ask("GET", "keys", key_id), directory.limits("keys", key_id), as_json)


@keys_app.command()
@of_directory
def rotate(
    directory: KeyDirectory,
    key_id: KeyId,
    grace: Annotated[
        str, typer.Option("--grace", metavar="TIME", help="How long the old key is valid: 1h, 2d. Default: not at all.")
    ] = "0s",
    as_json: AsJson = False,
) -> None:
    """Replace a key by a new one of the same id, limits and budget, and print it."""
    body = {"grace_s": _seconds_of(grace, "--grace")}
    _print_issued(directory.ask("POST", "keys", key_id, "rotate", body=body), as_json)


@keys_app.command()
@of_directory
def revoke(directory: KeyDirectory, key_id: KeyId) -> None:
    """End a key on every gateway, within two seconds."""
    directory.ask("DELETE", "keys", key_id)
    print(f"{key_id} is revoked")


@keys_app.command()
@of_directory
def audit(
    directory: KeyDirectory,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="Newest records to show.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Show the changes to keys and tenants, newest first: when, by which user, what."""
    print_rows(directory.ask("GET", "audit", query={"limit": str(limit)}), ("time", "actor", "action", "subject", "detail"), as_json)


def _print_issued(issued: Mapping[str, str], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"id": issued["id"], "key": issued["key"]}))
        return
    print(issued["key"])
    print(f"{issued['id']}, tenant {issued['tenant']}. The key is shown this once.", file=sys.stderr)


def print_one(record: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(record))
        return
    for name, value in record.items():
        print(f"{name + ':':21}{_shown(name, value)}")


def print_with_limits(record: Mapping[str, Any], limits: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        print_one({**record, "limits": limits}, as_json)
        return
    print_one(record, as_json)
    if limits:
        print()
        print_rows(limits, LIMIT_COLUMNS, as_json)


def print_rows(records: Sequence[Mapping[str, Any]], columns: Sequence[str], as_json: bool) -> None:
    if as_json:
        print(json.dumps(list(records)))
        return
    rows = [columns, *([_shown(name, record.get(name)) for name in columns] for record in records)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(columns))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _shown(name: str, value: object) -> str:
    if value is None or value in ("", [], {}):
        return "-"
    if isinstance(value, float) and (name == "time" or name.endswith(("_at", "_until"))):
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return value if isinstance(value, str) else json.dumps(value)


def _seconds_of(text: str, flag: str) -> float:
    parts = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([smhdw])", text)
    if parts is None:
        raise UsageRefused(f"{flag}: {text!r} is no time. Write a number and s, m, h, d or w: 30d.")
    return float(parts[1]) * UNITS[parts[2]]
