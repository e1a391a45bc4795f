"""`headrace gateway` runs a gateway alone, for engines that were started by themselves. `headrace serve` starts its gateway with it too.

Started by hand, the gateway takes a configuration of `headrace serve`, but no model with engines that only `serve` would start. A
supervisor gives it a JSON file and a leash (`wire.leash`).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.engine import GRPC_LOG
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
    ParentFd,
    Port,
    PrivateKeyFile,
    RequestLogTarget,
    ServedNames,
    StateOfServer,
    TlsFolder,
)

if TYPE_CHECKING:
    from headrace.cli.serve_config import ServeConfig
    from headrace.gateway.config import GatewayConfig

Flag = typer.Option

PATHS: dict[str, tuple[str, ...]] = {
    "model": ("model.remote.model",),
    "replica": ("model.remote.replicas",),
    "tls_dir": ("model.remote.tls_dir",),
    "token_file": ("model.remote.token_file",),
    "served_model_name": ("model.name", "model.aliases"),
    "tool_call_parser": ("model.tool_call_parser",),
    "reasoning_parser": ("model.reasoning_parser",),
    "host": ("gateway.host",),
    "port": ("gateway.port",),
    "workers": ("gateway.workers",),
    "api_key": ("gateway.api_keys",),
    "allow_open": ("allow_open",),
    "ssl_certfile": ("gateway.tls.certificate",),
    "ssl_keyfile": ("gateway.tls.key",),
    "allowed_hosts": ("gateway.allowed_hosts",),
    "allowed_origins": ("gateway.allowed_origins",),
    "request_log": ("gateway.request_log",),
    "log_format": ("log_format",),
    "state": ("state",),
    "drain_timeout": ("drain_timeout_s",),
    "experimental": ("experimental",),
}
"""Parameter of `gateway` -> the configuration's paths that it sets."""


def gateway(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="What the engines serve: folder, bundled model or hub id. Default headrace-tiny.")
    ] = None,
    replica: Annotated[
        list[str] | None, Flag("--replica", metavar="NAME=ADDRESS", help="An engine: HOST:PORT or unix:/PATH; again for more.")
    ] = None,
    tls_dir: TlsFolder = None,
    token_file: Annotated[Path | None, Flag("--token-file", help="File with the token that the engines want; for TCP.")] = None,
    config: ConfigPath = None,
    served_model_name: ServedNames = None,
    host: Host = None,
    port: Port = None,
    workers: Annotated[
        int | None, Flag("--workers", help="Gateway processes on this port, each with its part of the limits. Default 1.")
    ] = None,
    api_key: ApiKeys = None,
    allow_open: AllowOpen = False,
    allowed_hosts: AllowedHosts = None,
    allowed_origins: AllowedOrigins = None,
    tool_call_parser: Annotated[str | None, Flag("--tool-call-parser", help="As for headrace serve. Default auto.")] = None,
    reasoning_parser: Annotated[str | None, Flag("--reasoning-parser", help="As for headrace serve. Default auto.")] = None,
    ssl_certfile: CertificateFile = None,
    ssl_keyfile: PrivateKeyFile = None,
    request_log: RequestLogTarget = None,
    log_format: LogFormatName = None,
    state: StateOfServer = None,
    drain_timeout: DrainTimeout = None,
    experimental: Experimental = False,
    parent_fd: ParentFd = None,
    worker: Annotated[int | None, Flag("--worker", hidden=True, help="Which of the supervisor's gateway workers this is.")] = None,
) -> None:
    """Run the OpenAI API for engines that run by themselves (headrace engine), here or on other machines."""
    os.environ.setdefault(*GRPC_LOG)
    if parent_fd is not None and config is not None:
        raise typer.Exit(_run_supervised(config, parent_fd, worker))
    if config is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # one that comes during the start waits until the gateway can reload
    raise typer.Exit(_run_by_hand(context, config))


def _run_supervised(file: Path, parent_fd: int, index: int | None) -> int:
    """Run a gateway under a supervisor. index: number of this worker; None: it is the only gateway. Returns the exit status."""
    from headrace.gateway.config import load_config
    from headrace.gateway.process import load_part, run_gateway
    from headrace.gateway.site.worker import GatewayWorker

    worker = None if index is None else GatewayWorker(index, file.parent)
    read = partial(load_config, file) if worker is None else partial(load_part, file, worker)
    return run_gateway(read, parent_fd, read_again=read, worker=worker)


def _run_by_hand(context: typer.Context, file: Path | None) -> int:
    """Run a gateway from file, environment and flags; several workers run under a supervisor. Returns the exit status.

    Raises: ConfigError, UsageRefused, and typer.Exit where the faults of a file were printed.
    """
    from headrace.cli.config import ENV_PREFIX, load
    from headrace.cli.config_commands import load_to_start
    from headrace.cli.config_origins import named_by_origin
    from headrace.cli.exits import UsageRefused
    from headrace.cli.serve import run
    from headrace.cli.state import make_state_folder
    from headrace.gateway.process import run_gateway

    if file is None and not context.params["replica"]:
        raise UsageRefused("--replica: name the engines (--replica NAME=HOST:PORT), or give a file with them (--config).")
    names, flags, environment = flag_names(context, sys.argv[1:], PATHS), flags_of(context.params), dict(os.environ)
    config = load_to_start(file, flags, names)

    def load_again() -> ServeConfig:
        changed = load(file, environment, flags, flag_names=names)
        check_no_engines(changed)
        return changed

    with named_by_origin(os.environ, ENV_PREFIX, names):
        check_no_engines(config)
        if config.gateway.workers > 1:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # the supervisor's own
            return run(config, read_again=None if file is None else load_again, file=file)
        make_state_folder(Path(config.state))
        values = gateway_of(config)
    read_again = None if file is None else lambda: _changed_gateway(load_again(), config)
    return run_gateway(lambda: values, read_again=read_again)


def _changed_gateway(config: ServeConfig, before: ServeConfig) -> GatewayConfig:
    """The gateway of a file that was read again. Raises ConfigError for a changed option that only this command reads and cannot change."""
    from headrace.core.errors import ConfigError
    from headrace.core.option import Reload, options

    for name, described in options(type(config)):
        if described.reload is not Reload.LIVE and name != "gateway" and getattr(config, name) != getattr(before, name):
            raise ConfigError(name, "cannot change while the gateway runs", "Start the gateway again, or write what it was.")
    return gateway_of(config)


def check_no_engines(config: ServeConfig) -> None:
    """Raises ConfigError for models whose engines only `headrace serve` would start."""
    from headrace.core.errors import ConfigError

    for index, section in enumerate(config.models):
        if section.engine is not None:
            remedy = "Use `headrace serve`, or name engines that run (remote)."
            raise ConfigError(f"models[{index}].engine", "is not started by `headrace gateway`", remedy)


def gateway_of(config: ServeConfig) -> GatewayConfig:
    """The gateway's configuration, for running without a supervisor. Raises ConfigError."""
    from headrace.core.errors import ConfigError
    from headrace.fleet.files import gateway_content
    from headrace.fleet.launcher import without_secrets
    from headrace.fleet.weights import resolve_model
    from headrace.gateway.config import config_from
    from headrace.observe.logs import ENVIRONMENT

    if config.admin is not None:
        raise ConfigError("admin", "needs a supervisor", "Leave it out, or use `headrace serve`, or several --workers.")
    fleet = config.fleet(partial(resolve_model, experimental=config.experimental))
    os.environ[ENVIRONMENT] = config.log_format
    for name in set(os.environ) - set(without_secrets(os.environ)):
        del os.environ[name]  # text workers inherit the environment
    return config_from(gateway_content(fleet))


def flags_of(params: Mapping[str, object]) -> dict[str, object]:
    """Configuration path -> value, for the flags that were given. Raises UsageRefused."""
    flags = {
        paths[0]: params[name] if params[name] == "" else params[name] or None
        for name, paths in PATHS.items()
        if len(paths) == 1 and name not in ("replica", "api_key")
    }
    if (port := params["port"]) is not None:
        flags["gateway.port"] = port  # 0 is a value
    if (drain := params["drain_timeout"]) is not None:
        flags["drain_timeout_s"] = drain
    if names := params["served_model_name"]:
        assert isinstance(names, list | tuple)
        flags |= {"model.name": names[0], "model.aliases": list(names[1:])}
    if keys := params["api_key"]:
        assert isinstance(keys, list | tuple)
        flags["gateway.api_keys"] = [{"key": key} for key in keys]
    if replicas := params["replica"]:
        from headrace.bundled import DEFAULT_MODEL

        assert isinstance(replicas, list | tuple)
        flags["model.remote.replicas"] = [_replica(word) for word in replicas]
        flags["model.remote.model"] = params["model"] or DEFAULT_MODEL
    flags |= {f"model.remote.{name}": str(params[name]) for name in ("tls_dir", "token_file") if params[name]}
    return {path: value for path, value in flags.items() if value is not None}


def _replica(word: str) -> dict[str, str]:
    """A replica given as NAME=ADDRESS. Raises UsageRefused for other texts."""
    from headrace.cli.exits import UsageRefused

    name, separator, address = word.partition("=")
    if not (name and separator and address):
        raise UsageRefused(f"--replica: {word!r} is not NAME=ADDRESS. Write --replica gpu1=10.0.0.7:7001.")
    return {"name": name, "address": address}
