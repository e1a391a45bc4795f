"""`headrace engine` runs one engine at an address, for gateways on this or other machines. `headrace serve` starts its engines with it too.

Started by hand, the engine is configured by flags, or by a YAML file with the keys of `engine.server.config`. A supervisor gives it a JSON
file and a leash (`wire.leash`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.bundled import DEFAULT_MODEL
from headrace.cli.exits import UsageRefused
from headrace.cli.flags.flag import GivenFlags, ParentFd, with_flags
from headrace.cli.flags.rows import ENGINE_PROCESS_FLAGS
from headrace.core.errors import ConfigError
from headrace.core.model_names import name_of_file
from headrace.engine.config import find_gpus_to_start

if TYPE_CHECKING:
    from headrace.engine.config import EngineConfig
    from headrace.engine.server.config import ProcessConfig

GRPC_LOG = ("GRPC_VERBOSITY", "NONE")
"""Without it gRPC prints a line to stderr for each failed connection, beside its exceptions."""


@with_flags(*ENGINE_PROCESS_FLAGS)
def engine(
    config: Annotated[Path | None, typer.Option("--config", help="YAML file instead of MODEL and flags; see docs/config.md.")] = None,
    parent_fd: ParentFd = None,
    *,
    flags: GivenFlags,
) -> None:
    """Run one engine, which gateways reach at an address (headrace gateway)."""
    # SIGUSR1 asks a ready engine for a dump; without a handler yet it would end the process.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.environ.setdefault(*GRPC_LOG)
    from headrace.engine.main import run_engine
    from headrace.engine.server.config import load_process_config

    if parent_fd is not None and config is not None:
        run_engine(partial(load_process_config, config, find_gpus_to_start), parent_fd)
        return
    given = dict(flags.values)
    log_format, experimental = given.pop("log_format", None), bool(given.pop("experimental", False))
    if log_format is not None:
        set_log_format(str(log_format))
    values = (
        _from_flags(given, flags.names, experimental=experimental)
        if config is None
        else _from_file(config, [flags.names[path] for path in given], experimental=experimental)
    )
    run_engine(lambda: values)


def set_log_format(log_format: str) -> None:
    """Set it for this process and its children. Raises UsageRefused."""
    from headrace.observe.logs import ENVIRONMENT, LogFormat

    if log_format not in list(LogFormat):
        raise UsageRefused(f"--log-format: {log_format!r} is not one of {', '.join(LogFormat)}")
    os.environ[ENVIRONMENT] = log_format


def _from_file(path: Path, given: Sequence[str], *, experimental: bool) -> tuple[ProcessConfig, EngineConfig]:
    """given: flags beside the file. Raises ConfigError, or UsageRefused for such a flag."""
    from headrace.cli.config.yaml_files import read_yaml
    from headrace.engine.server.config import process_config_from

    for flag in given:
        raise UsageRefused(f"{flag}: the file given with --config holds everything. Leave one of them out.")
    process, engine = process_config_from(read_yaml(path), find_gpus_to_start)
    return process, _with_folders(engine, experimental=experimental)


def _with_folders(config: EngineConfig, *, experimental: bool) -> EngineConfig:
    """With those of its models and adapters. Raises ConfigError."""
    from headrace.fleet.weights import resolve_adapter, resolve_model

    resolve = partial(resolve_model, experimental=experimental)
    config = config.with_folders(resolve)
    folders = []
    for index, adapter in enumerate(config.lora_modules):
        try:
            folders.append(replace(adapter, path=str(resolve_adapter(adapter.path))))
        except ConfigError as error:
            raise error.at(f"lora_modules[{index}].path") from None
    return replace(config, lora_modules=tuple(folders))


def _from_flags(given: Mapping[str, object], names: Mapping[str, str], *, experimental: bool) -> tuple[ProcessConfig, EngineConfig]:
    """given: path -> value. Raises ConfigError naming the flag, or UsageRefused."""
    from headrace.cli.config.load import set_at
    from headrace.engine.server.config import process_config_from
    from headrace.fleet.weights import resolve_model

    if "address" not in given:
        remedy = "`headrace serve` starts an engine and a gateway together."
        raise UsageRefused(f"--listen: the address is missing, HOST:PORT or unix:/PATH. {remedy}")
    folder = resolve_model(str(given.get("engine.model", DEFAULT_MODEL)), experimental=experimental)
    data: dict[str, object] = {}
    implied = {"engine.enable_lora": True} if "engine.lora_modules" in given else {}
    for path, value in {"replica": name_of_file(folder.name), **implied, **given, "engine.model": str(folder)}.items():
        set_at(data, path.split("."), value, path)
    known = {path: flag.names[0].partition("/")[0] for flag in ENGINE_PROCESS_FLAGS if flag.names for path in flag.paths}
    spellings = {path.removeprefix("engine."): name for path, name in {**known, **names}.items()}  # errors name fields of `EngineConfig`
    try:
        process, engine = process_config_from(data, find_gpus_to_start)
        return process, _with_folders(engine, experimental=experimental)
    except ConfigError as error:
        raise error.at(spellings.get(error.where.removeprefix("engine."), error.where)) from error
