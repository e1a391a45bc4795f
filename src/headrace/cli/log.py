"""`headrace log archive`: moves usage records from a Kafka topic to ClickHouse. The process may run on any machine, apart from gateways."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated

import typer

log_app = typer.Typer(help="Usage records beyond this machine.", no_args_is_help=True, rich_markup_mode=None)


@log_app.callback()
def _log() -> None:
    """Keeps `archive` a sub-command although it is the only one."""


@log_app.command()
def archive(
    config: Annotated[Path, typer.Option("--config", help="Configuration file with usage.kafka and usage.clickhouse.")],
    until_end: Annotated[bool, typer.Option("--until-end", help="Leave once everything is archived that the topic has now.")] = False,
) -> None:
    """Move usage records from Kafka to ClickHouse until stopped (SIGTERM, Ctrl-C). Any number of these may run."""
    from headrace.cli.config import load_settings
    from headrace.core.counted import counted
    from headrace.gateway.ledger.kafka import Archive
    from headrace.observe.logs import LogFormat, set_up_logging

    loaded = load_settings(config, os.environ)
    set_up_logging(LogFormat(loaded.log_format))
    found = Archive(loaded.usage)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: found.stop())
    found.run(until_end=until_end)
    print(f"{counted(found.num_archived, 'record')} archived")
