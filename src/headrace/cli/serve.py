"""`headrace serve` goes from a model's name to a running server: it builds the configuration and hands it to the fleet's supervisor.

Flag names are vLLM's where vLLM has the option. A flag that is not given leaves the values of the file and the environment as they are.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.engine_flags import ENGINE_FLAGS, Given, with_engine_flags
from headrace.cli.flag_names import flag_names
from headrace.cli.server_flags import (
    AllowedHosts,
    AllowedOrigins,
    AllowOpen,
    ApiKeys,
    CertificateFile,
    ConfigPath,
    DrainTimeout,
    Experimental,
    Host,
    LogFormatName,
    Port,
    PrivateKeyFile,
    RequestLogTarget,
    ServedNames,
    StateOfServer,
)

if TYPE_CHECKING:
    from headrace.cli.serve_config import ServeConfig
    from headrace.fleet.admin import AdminRequests
    from headrace.fleet.supervisor import FleetReady

FLAG_PATHS = {
    **{flag.parameter: f"model.engine.{flag.field}" for flag in ENGINE_FLAGS},
    "model": "model.engine.model",
    "replicas": "model.replicas",
    "tool_call_parser": "model.tool_call_parser",
    "reasoning_parser": "model.reasoning_parser",
    "host": "gateway.host",
    "port": "gateway.port",
    "gateway_workers": "gateway.workers",
    "ssl_certfile": "gateway.tls.certificate",
    "ssl_keyfile": "gateway.tls.key",
    "allowed_hosts": "gateway.allowed_hosts",
    "allowed_origins": "gateway.allowed_origins",
    "request_log": "gateway.request_log",
    "log_format": "log_format",
    "state": "state",
    "drain_timeout": "drain_timeout_s",
}
"""Parameter of `serve` -> path of the one configuration value that it sets. The other parameters are in OTHER_PATHS."""

ENGINE_PATHS = {f"model.engine.{flag.field}" for flag in ENGINE_FLAGS}

OTHER_PATHS = {
    "model_argument": ("model.engine.model",),
    "served_model_name": ("model.name", "model.aliases"),
    "api_key": ("gateway.api_keys",),
    "allow_open": ("allow_open",),
    "experimental": ("experimental",),
}
"""Parameter of `serve` -> paths that it sets, to something else than its own value or to several values."""

PATHS = {**{name: (path,) for name, path in FLAG_PATHS.items()}, **OTHER_PATHS}

Flag = typer.Option


@with_engine_flags()
def serve(
    context: typer.Context,
    model_argument: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder, .gguf file, bundled model or hub id; default: the bundled headrace-tiny.")
    ] = None,
    config: ConfigPath = None,
    model: Annotated[str | None, Flag("--model", help="The same as MODEL.")] = None,
    served_model_name: ServedNames = None,
    host: Host = None,
    port: Port = None,
    gateway_workers: Annotated[
        int | None, Flag("--gateway-workers", help="Gateway processes on this port, each with its part of the limits. Default 1.")
    ] = None,
    api_key: ApiKeys = None,
    allow_open: AllowOpen = False,
    allowed_hosts: AllowedHosts = None,
    allowed_origins: AllowedOrigins = None,
    replicas: Annotated[int | None, Flag("--replicas", help="Engine processes, each with its own weights.")] = None,
    tool_call_parser: Annotated[
        str | None, Flag("--tool-call-parser", help="How the model writes calls: hermes, llama3_json, mistral, ...; none. Default auto.")
    ] = None,
    reasoning_parser: Annotated[
        str | None, Flag("--reasoning-parser", help="How the model marks reasoning: qwen3, deepseek_r1, ...; none. Default auto.")
    ] = None,
    ssl_certfile: CertificateFile = None,
    ssl_keyfile: PrivateKeyFile = None,
    request_log: RequestLogTarget = None,
    log_format: LogFormatName = None,
    state: StateOfServer = None,
    drain_timeout: DrainTimeout = None,
    experimental: Experimental = False,
    *,
    engine: Given,
) -> None:
    """Serve a model over the OpenAI API."""
    from headrace.cli.config import ENV_PREFIX, load
    from headrace.cli.config_commands import load_to_start
    from headrace.cli.config_origins import named_by_origin
    from headrace.cli.exits import UsageRefused
    from headrace.engine.config import try_gpus

    if model_argument is not None and model is not None:
        raise UsageRefused("MODEL and --model: give one of them")
    names = flag_names(context, sys.argv[1:], PATHS)
    flags = flags_of(context.params, engine)
    try_gpus()
    resolved = load_to_start(config, flags, names)
    read_again = None if config is None else partial(load, config, os.environ, flags, flag_names=names)
    with named_by_origin(os.environ, ENV_PREFIX, names):  # a port in use is found only now
        raise typer.Exit(run(resolved, read_again=read_again, file=config))


def flags_of(params: Mapping[str, object], engine: Given) -> dict[str, object]:
    """Configuration path -> value, for the flags that were given."""
    flags = {f"model.engine.{name}": value for name, value in engine.items()}
    flags |= {path: params.get(name) for name, path in FLAG_PATHS.items() if path not in ENGINE_PATHS}
    for name in ("allowed_hosts", "allowed_origins"):
        flags[FLAG_PATHS[name]] = params.get(name) or None  # typer gives an empty list where there is no flag
    flags["model.engine.model"] = params.get("model_argument") or params.get("model")
    if names := params.get("served_model_name"):
        assert isinstance(names, list | tuple)
        flags |= {"model.name": names[0], "model.aliases": list(names[1:])}
    if keys := params.get("api_key"):
        assert isinstance(keys, list | tuple)
        flags["gateway.api_keys"] = [{"key": key} for key in keys]
    for name in ("allow_open", "experimental"):
        flags[name] = True if params.get(name) else None
    return {path: value for path, value in flags.items() if value is not None}


def run(config: ServeConfig, *, read_again: Callable[[], ServeConfig] | None = None, file: Path | None = None) -> int:
    """Serve until stopped. Returns the exit code. Raises ConfigError and FleetFailed.

    read_again  reads the configuration at a reload; None: there is no file
    file        the configuration file, as it is shown to operators
    """
    from headrace.cli.announcement import announce_when_ready
    from headrace.cli.config_source import ServeSource
    from headrace.cli.directory import open_administration, read_limits
    from headrace.cli.state import make_state_folder
    from headrace.fleet.gateways import check_can_listen
    from headrace.fleet.supervisor import run_fleet
    from headrace.fleet.weights import resolve_model
    from headrace.gateway.access.admin_requests import REQUESTS, KeyRequests
    from headrace.gateway.control.purge import cache_requests
    from headrace.gateway.http.config import connection_limit
    from headrace.gateway.limits.report import limit_requests
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
    source = None if read_again is None else ServeSource(config, read_again, resolve, file)

    def held() -> ServeConfig:
        return config if source is None else source.held

    requests: list[AdminRequests] = [
        KeyRequests(
            lambda actor: open_administration(held(), actor=actor),
            {
                **REQUESTS,
                **limit_requests(lambda admin, work: read_limits(held(), admin, work)),
                **cache_requests(lambda: held().whole_gateway(), time.time),
            },
        )
    ]

    async def audit(actor: str, action: str, subject: str, detail: Mapping[str, object]) -> None:
        administration = open_administration(held(), actor=actor)
        try:
            await administration.record(action, subject, detail)
        finally:
            await administration.close()

    return int(run_fleet(config.fleet(resolve), source=source, requests=requests, audit=audit, on_ready=on_ready))
