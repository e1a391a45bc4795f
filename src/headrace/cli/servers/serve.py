"""`headrace serve` goes from a model's name to a running server: it builds the configuration and hands it to the fleet's supervisor."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headrace.cli.admin.directory import open_administration, read_limits
from headrace.cli.config.commands import load_to_start
from headrace.cli.flags.flag import ConfigPath, GivenFlags, with_flags
from headrace.cli.flags.rows import SERVE_FLAGS
from headrace.engine.config import find_gpus_to_start

if TYPE_CHECKING:
    from headrace.cli.config.sections import ServeConfig
    from headrace.fleet.admin import AdminRequests
    from headrace.fleet.supervisor import FleetReady


@with_flags(*SERVE_FLAGS)
def serve(config: ConfigPath = None, *, flags: GivenFlags) -> None:
    """Serve a model over the OpenAI API."""
    from headrace.cli.config.load import load, named_by_origin

    resolved = load_to_start(config, flags, find_gpus_to_start)
    read_again = None if config is None else partial(load, config, os.environ, flags, find_gpus_to_start)
    with named_by_origin(os.environ, flags):  # a port in use is found only now
        raise typer.Exit(run(resolved, read_again=read_again, file=config))


def run(config: ServeConfig, *, read_again: Callable[[], ServeConfig] | None = None, file: Path | None = None) -> int:
    """Serve until stopped. read_again: None: there is no file. Returns the exit code. Raises ConfigError and FleetFailed."""
    from headrace.cli.config.load import ServeSource
    from headrace.cli.config.state import make_state_folder
    from headrace.cli.servers.announcement import announce_when_ready
    from headrace.fleet.gateways import check_can_listen
    from headrace.fleet.supervisor import run_fleet
    from headrace.fleet.weights import resolve_model
    from headrace.gateway.access.admin_requests import REQUESTS, KeyRequests
    from headrace.gateway.control.purge import cache_requests
    from headrace.gateway.http.config import connection_limit
    from headrace.gateway.limits.report import limit_requests
    from headrace.lab.plan.here import decide_layout
    from headrace.observe.logs import LogFormat, set_up_logging

    set_up_logging(LogFormat(config.log_format))
    num_replicas, num_foreign = sum(model.num_replicas for model in config.models), sum(len(model.upstreams) for model in config.models)
    limits = config.gateway.limits
    connection_limit(limits.max_connections, num_replicas, num_foreign, num_text_workers=limits.max_text_workers)  # children inherit ours
    check_can_listen(config.gateway.host, config.gateway.port)
    make_state_folder(Path(config.state))

    def on_ready(ready: FleetReady) -> None:
        # On a thread: the callback runs on the supervisor's event loop, which must not wait.
        threading.Thread(target=announce_when_ready, args=(config, ready), name="announce", daemon=True).start()

    resolve = partial(resolve_model, experimental=config.experimental)
    source = ServeSource(config, read_again or (lambda: config), resolve, file)

    requests: list[AdminRequests] = [
        KeyRequests(
            lambda actor: open_administration(source.held, actor=actor),
            {
                **REQUESTS,
                **limit_requests(lambda admin, work: read_limits(source.held, admin, work)),
                **cache_requests(lambda: source.held.whole_gateway(), time.time),
            },
        )
    ]

    async def audit(actor: str, action: str, subject: str, detail: Mapping[str, object]) -> None:
        administration = open_administration(source.held, actor=actor)
        try:
            await administration.record(action, subject, detail)
        finally:
            await administration.close()

    return int(run_fleet(config.fleet(resolve, decide_layout), source=source, requests=requests, audit=audit, on_ready=on_ready))
