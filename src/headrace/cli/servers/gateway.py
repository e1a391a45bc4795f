"""`headrace gateway` runs a gateway alone, for engines that were started by themselves. `headrace serve` starts its gateway with it too.

Started by hand, the gateway takes a configuration of `headrace serve`, but no model with engines that only `serve` would start. A
supervisor gives it a JSON file and a leash (`wire.leash`).
"""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.bundled import DEFAULT_MODEL
from headrace.cli.config.commands import load_to_start
from headrace.cli.exits import UsageRefused
from headrace.cli.flags.flag import ConfigPath, GivenFlags, ParentFd, with_flags
from headrace.cli.flags.rows import GATEWAY_FLAGS
from headrace.cli.servers.engine import GRPC_LOG
from headrace.cli.servers.serve import run
from headrace.core.errors import ConfigError
from headrace.core.option import Reload, options
from headrace.machine.gpus import find_gpus

if TYPE_CHECKING:
    from headrace.cli.config.sections import ServeConfig
    from headrace.gateway.config import GatewayConfig


@with_flags(*GATEWAY_FLAGS)
def gateway(
    config: ConfigPath = None,
    parent_fd: ParentFd = None,
    worker: Annotated[int | None, typer.Option("--worker", hidden=True, help="Which of the supervisor's gateway workers this is.")] = None,
    *,
    flags: GivenFlags,
) -> None:
    """Run the OpenAI API for engines that run by themselves (headrace engine), here or on other machines."""
    os.environ.setdefault(*GRPC_LOG)
    if parent_fd is not None and config is not None:
        raise typer.Exit(_run_supervised(config, parent_fd, worker))
    if config is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # one that comes during the start waits until the gateway can reload
    raise typer.Exit(_run_by_hand(flags, config))


def _run_supervised(file: Path, parent_fd: int, index: int | None) -> int:
    """index: number of this worker; None: it is the only gateway. Returns the exit status."""
    from headrace.gateway.config import load_config
    from headrace.gateway.process import load_part, run_gateway
    from headrace.gateway.site import GatewayWorker

    worker = None if index is None else GatewayWorker(index, file.parent)
    read = partial(load_config, file) if worker is None else partial(load_part, file, worker)
    return run_gateway(read, parent_fd, read_again=read, worker=worker)


def _run_by_hand(flags: GivenFlags, file: Path | None) -> int:
    """Several workers run under a supervisor. Raises ConfigError, UsageRefused, and typer.Exit where the faults of a file were printed.
    Returns the exit status."""
    from headrace.cli.config.load import load, named_by_origin
    from headrace.cli.config.state import make_state_folder
    from headrace.gateway.process import run_gateway

    if file is None and "model.remote.replicas" not in flags.values:
        raise UsageRefused("--replica: name the engines (--replica NAME=HOST:PORT), or give a file with them (--config).")
    given, environment = _with_model(flags), dict(os.environ)
    config = load_to_start(file, given, find_gpus)

    def load_again() -> ServeConfig:
        changed = load(file, environment, given)
        check_no_engines(changed)
        return changed

    with named_by_origin(os.environ, given):
        check_no_engines(config)
        if config.gateway.workers > 1 or config.has_pods:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # the supervisor's own
            return run(config, read_again=None if file is None else load_again, file=file)
        make_state_folder(Path(config.state))
        started = gateway_of(config)
    read_again = None if file is None else lambda: _changed_gateway(load_again(), config)
    return run_gateway(lambda: started, read_again=read_again)


def _changed_gateway(config: ServeConfig, before: ServeConfig) -> GatewayConfig:
    """Raises ConfigError for a changed option that only this command reads and cannot change."""
    for name, described in options(type(config)):
        if described.reload is not Reload.LIVE and name != "gateway" and getattr(config, name) != getattr(before, name):
            raise ConfigError(name, "cannot change while the gateway runs", "Start the gateway again, or write what it was.")
    return gateway_of(config)


def check_no_engines(config: ServeConfig) -> None:
    if config.ray is not None:
        raise ConfigError("ray", "is for engines that are started, and a gateway starts none", "Leave it out, or use `headrace serve`.")
    for index, section in enumerate(config.models):
        if section.engine is not None:
            remedy = "Use `headrace serve`, or name engines that run (remote)."
            raise ConfigError(f"models[{index}].engine", "is not started by `headrace gateway`", remedy)


def gateway_of(config: ServeConfig) -> GatewayConfig:
    """The configuration of a gateway without a supervisor. Raises ConfigError."""
    from headrace.fleet.files import gateway_content
    from headrace.fleet.launcher import without_secrets
    from headrace.fleet.weights import resolve_model
    from headrace.gateway.config import config_from
    from headrace.observe.logs import ENVIRONMENT

    if config.admin is not None:
        raise ConfigError("admin", "needs a supervisor", "Leave it out, or use `headrace serve`, or several --workers.")
    if config.has_pods:
        raise ConfigError("remote.kubernetes", "needs a supervisor, and this gateway was started without one", "Start it again.")
    fleet = config.fleet(partial(resolve_model, experimental=config.experimental))
    os.environ[ENVIRONMENT] = config.log_format
    for name in set(os.environ) - set(without_secrets(os.environ)):
        del os.environ[name]  # text workers inherit the environment
    return config_from(gateway_content(fleet))


def _with_model(flags: GivenFlags) -> GivenFlags:
    if "model.remote.replicas" not in flags.values:
        return flags
    return GivenFlags({"model.remote.model": DEFAULT_MODEL, **flags.values}, flags.names)
