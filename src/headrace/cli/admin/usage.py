"""`headrace usage` shows what tenants used, and how fast they were answered; `headrace log archive` moves records from Kafka to ClickHouse;
`headrace log trace` makes a trace of a request log.

The figures come from ClickHouse where it is configured, else from the usage.db of a state folder. No server need run.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.admin.directory import AsJson, ConfigFile, StateFolder, settings_of
from headrace.cli.exits import CommandExitCode, UsageRefused
from headrace.core.errors import ConfigError, counted

if TYPE_CHECKING:
    from headrace.gateway.ledger.config import ClickHouseConfig
    from headrace.gateway.ledger.usage_query import UsageQuery

Flag = typer.Option
ANSWER_S = 60.0


def usage(
    by: Annotated[
        list[str] | None, Flag("--by", help="tenant, user, key, model, adapter or day; commas between several. Default tenant.")
    ] = None,
    since: Annotated[str | None, Flag("--since", help="From this time on: 2026-11-30, 2026-11-30T12:00:00Z, or 90m, 24h, 7d ago.")] = None,
    until: Annotated[str | None, Flag("--until", help="Before this time.")] = None,
    tenant: Annotated[str | None, Flag("--tenant", help="Of this tenant alone.")] = None,
    latency: Annotated[bool, Flag("--latency", help="Outcomes, and p50 and p99 of times in ms, instead of tokens and cost.")] = False,
    as_json: AsJson = False,
    as_csv: Annotated[bool, Flag("--csv", help="As comma-separated values.")] = False,
    local: Annotated[bool, Flag("--local", help="Of this machine alone, from usage.db, also where ClickHouse is configured.")] = False,
    config: ConfigFile = None,
    state: StateFolder = None,
) -> None:
    """Show what was used, and what it costs."""
    from headrace.gateway.ledger.usage_query import LATENCY, USE, UsageQuery, groups_of, unix_ms_of

    if as_json and as_csv:
        raise UsageRefused("--json and --csv: give one of them")
    now = time.time()
    query = UsageQuery(
        by=groups_of(by or ["tenant"]),
        figures=LATENCY if latency else USE,
        since_ms=None if since is None else unix_ms_of("--since", since, now),
        until_ms=None if until is None else unix_ms_of("--until", until, now),
        tenant=tenant,
    )
    settings = settings_of(config, state)
    folder, clickhouse = Path(settings.state), None if local else settings.usage.clickhouse
    rows = read_rows(folder, query) if clickhouse is None else site_rows(clickhouse, query)
    if as_json:
        print(json.dumps(rows, indent=2))
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, query.names)
        writer.writeheader()
        writer.writerows(rows)
    else:
        print("\n".join(shown(query.names, rows)) if rows else _nothing(query, str(folder) if clickhouse is None else clickhouse.url))


def _nothing(query: UsageQuery, where: str) -> str:
    of_tenant = f" of the tenant {query.tenant}" if query.tenant is not None else ""
    in_time = " in this time" if (query.since_ms, query.until_ms) != (None, None) else ""
    return f"No usage{of_tenant}{in_time} is recorded in {where}."


def read_rows(folder: Path, query: UsageQuery) -> list[dict[str, object]]:
    from headrace.gateway.ledger.ledger import ship_orphaned
    from headrace.gateway.ledger.usage_db import FILE
    from headrace.gateway.ledger.usage_query import usage_rows

    ship_orphaned(folder)
    path = folder / FILE
    if not path.exists():
        return []
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            return usage_rows(connection, query)
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise ConfigError("state", f"{path} cannot be read: {error}") from None


def site_rows(config: ClickHouseConfig, query: UsageQuery) -> list[dict[str, object]]:
    from headrace.gateway.ledger.clickhouse import clickhouse_rows
    from headrace.gateway.ledger.record import SinkFailed

    try:
        return clickhouse_rows(config, query, timeout_s=ANSWER_S)
    except SinkFailed as failed:
        raise ConfigError("usage.clickhouse", f"cannot be read: {failed}", "--local shows what this machine recorded.") from None


def shown(names: Sequence[str], rows: Sequence[dict[str, object]]) -> list[str]:
    columns = [_aligned([name, *(_cell(name, row[name]) for row in rows)], is_word=isinstance(rows[0][name], str)) for name in names]
    return ["  ".join(line) for line in zip(*columns, strict=True)]


def _aligned(cells: Sequence[str], *, is_word: bool) -> list[str]:
    width = max(map(len, cells))
    return [cell.ljust(width) if is_word else cell.rjust(width) for cell in cells]


def _cell(name: str, value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6f}" if name == "cost" else f"{value:,.1f}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


log_app = typer.Typer(help="What the logs of requests say: usage records, and traces.", no_args_is_help=True, rich_markup_mode=None)


@log_app.command()
def trace(
    files: Annotated[list[Path], typer.Argument(metavar="REQUEST_LOG...", help="Files of --request-log, best with --log-prompt-blocks.")],
    model: Annotated[str | None, Flag("--model", help="Requests of this model alone; needed where the log has several.")] = None,
) -> None:
    """Print the trace of a request log, for `headrace simulate --trace` and `headrace bench serve --trace`."""
    from headrace.lab.simulate.recorded import RecordedTrace

    recording = RecordedTrace(model)
    for file in files:
        recording.read(file)
    for line in recording.trace_lines():
        print(line)
    left_out = f"; {counted(recording.num_left_out, 'request')} left out, see docs/simulation.md" if recording.num_left_out else ""
    print(f"headrace: {counted(len(recording.sequences), 'sequence')}{left_out}", file=sys.stderr)
    if not recording.sequences:
        raise typer.Exit(CommandExitCode.FAILED)


@log_app.command()
def archive(
    config: Annotated[Path, typer.Option("--config", help="Configuration file with usage.kafka and usage.clickhouse.")],
    until_end: Annotated[bool, typer.Option("--until-end", help="Leave once everything is archived that the topic has now.")] = False,
) -> None:
    """Move usage records from Kafka to ClickHouse until stopped (SIGTERM, Ctrl-C). Any number of these may run."""
    from headrace.cli.config.load import load_settings
    from headrace.gateway.ledger.kafka import Archive
    from headrace.observe.logs import LogFormat, set_up_logging

    loaded = load_settings(config, os.environ)
    set_up_logging(LogFormat(loaded.log_format))
    archive_run = Archive(loaded.usage)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: archive_run.stop())
    archive_run.run(until_end=until_end)
    print(f"{counted(archive_run.num_archived, 'record')} archived")
