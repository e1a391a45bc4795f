"""`headrace engine` runs one engine at an address, for gateways on this or other machines. `headrace serve` starts its engines with it too.

Started by hand, the engine is configured by flags, or by a YAML file with the keys of `engine.server.config`. A supervisor gives it a JSON
file and a leash (`wire.leash`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.engine_flags import ENGINE_FLAGS, Given, with_engine_flags
from headrace.cli.server_flags import DrainTimeout, Experimental, LogFormatName, ParentFd, TlsFolder

if TYPE_CHECKING:
    from headrace.engine.config import EngineConfig
    from headrace.engine.server.config import ProcessConfig

Flag = typer.Option

FLAG_OF = {flag.field: flag.names[0].partition("/")[0] for flag in ENGINE_FLAGS}
"""Field of EngineConfig -> its flag, for errors."""

GRPC_LOG = ("GRPC_VERBOSITY", "NONE")
"""Environment variable and value that silence gRPC, which otherwise prints a line to stderr for each failed connection, beside its
exceptions."""


@with_engine_flags()
def engine(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder, .gguf file, bundled model or hub id; default: the bundled headrace-tiny.")
    ] = None,
    listen: Annotated[str | None, Flag("--listen", metavar="ADDRESS", help="HOST:PORT or unix:/PATH; port 0 takes a free one.")] = None,
    tls_dir: TlsFolder = None,
    token_file: Annotated[Path | None, Flag("--token-file", help="File with the token that gateways must send; for TCP.")] = None,
    name: Annotated[str | None, Flag("--name", help="In the log and in answers to gateways. Default: the model folder's name.")] = None,
    drain_timeout: DrainTimeout = None,
    log_format: LogFormatName = None,
    experimental: Experimental = False,
    config: Annotated[Path | None, Flag("--config", help="YAML file instead of MODEL and flags; see docs/config.md.")] = None,
    parent_fd: ParentFd = None,
    *,
    engine: Given,
) -> None:
    """Run one engine, which gateways reach at an address (headrace gateway)."""
    # SIGUSR1 asks a ready engine for a dump; without a handler yet it would end the process.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.environ.setdefault(*GRPC_LOG)
    from headrace.engine.config import try_gpus
    from headrace.engine.main import run_engine
    from headrace.engine.server.config import load_process_config

    try_gpus()
    if parent_fd is not None and config is not None:
        run_engine(partial(load_process_config, config), parent_fd)
        return
    if log_format is not None:
        set_log_format(log_format)
    flags: dict[str, object] = {"MODEL": model, "--listen": listen, "--tls-dir": tls_dir, "--token-file": token_file, "--name": name}
    flags |= {"--drain-timeout": drain_timeout, **{FLAG_OF[field]: value for field, value in engine.items()}}
    given = {flag: value for flag, value in flags.items() if value is not None}
    values = (
        _from_flags(given, engine, experimental=experimental) if config is None else _from_file(config, given, experimental=experimental)
    )
    run_engine(lambda: values)


def set_log_format(log_format: str) -> None:
    """Set the log format of this process and its children. Raises UsageRefused."""
    from headrace.cli.exits import UsageRefused
    from headrace.observe.logs import ENVIRONMENT, LogFormat

    if log_format not in list(LogFormat):
        raise UsageRefused(f"--log-format: {log_format!r} is not one of {', '.join(LogFormat)}")
    os.environ[ENVIRONMENT] = log_format


def _from_file(path: Path, given: Mapping[str, object], *, experimental: bool) -> tuple[ProcessConfig, EngineConfig]:
    """The configuration from a file. Raises ConfigError, or UsageRefused for flags beside the file."""
    from headrace.cli.config_yaml import read_yaml
    from headrace.cli.exits import UsageRefused
    from headrace.engine.server.config import process_config_from
    from headrace.fleet.weights import resolve_model

    for flag in given:
        raise UsageRefused(f"{flag}: the file given with --config holds everything. Leave one of them out.")
    process, engine = process_config_from(read_yaml(path))
    return process, replace(engine, model=str(resolve_model(engine.model, experimental=experimental)))


def _from_flags(given: Mapping[str, object], engine: Given, *, experimental: bool) -> tuple[ProcessConfig, EngineConfig]:
    """The configuration from flags. Raises ConfigError naming the flag, or UsageRefused."""
    from headrace.bundled import DEFAULT_MODEL
    from headrace.cli.exits import UsageRefused
    from headrace.core.errors import ConfigError
    from headrace.core.model_names import name_of_file
    from headrace.engine.server.config import process_config_from
    from headrace.fleet.weights import resolve_model

    if "--listen" not in given:
        remedy = "`headrace serve` starts an engine and a gateway together."
        raise UsageRefused(f"--listen: the address is missing, HOST:PORT or unix:/PATH. {remedy}")
    folder = resolve_model(str(given.get("MODEL", DEFAULT_MODEL)), experimental=experimental)
    data: dict[str, object] = {
        "replica": given.get("--name", name_of_file(folder.name)),
        "address": given["--listen"],
        "tls_dir": str(given.get("--tls-dir", "")),
        "token_file": str(given.get("--token-file", "")),
        **({"drain_timeout_s": given["--drain-timeout"]} if "--drain-timeout" in given else {}),
        "engine": {**engine, "model": str(folder)},
    }
    try:
        return process_config_from(data)
    except ConfigError as error:
        raise error.at(FLAG_OF.get(error.where.removeprefix("engine."), error.where)) from error
