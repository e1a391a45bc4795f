"""Runs the process of a gateway (`headrace gateway`), from its configuration to its exit status.

0   drained after SIGTERM or SIGINT
2   refused to start: configuration or model folder (starting it again with the same file fails again)
1   the address could not be bound
69  the supervisor has ended (wire.leash)
75  the drain ended by its time limit or a second signal: the requests that were still open got a retryable error

`gateway.main` does the serving. It is imported only after the text workers were started: the import and the start of the workers take about
a second of processor time each, and so run side by side.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from headrace.core.errors import CheckpointError, ConfigError, HeadraceError
from headrace.gateway.config import GatewayConfig, load_config
from headrace.gateway.site import GatewayWorker, part_of
from headrace.gateway.text_workers.frames import HostConfig, Workers
from headrace.gateway.text_workers.processes import HostProcess
from headrace.gateway.upstream.model_config import key_variables, text_folders
from headrace.machine.resources import machine_bytes
from headrace.observe.logs import set_up_logging
from headrace.wire.leash import Leash

REFUSED = 2
CANNOT_BIND = 1
CUT = 75
SWITCH_S = 0.0005
"""Interpreter switch interval in seconds: how long another thread (the request log's, gRPC's) may keep the GIL while the event loop waits.
The loop releases the GIL at every send, receive and drawn request id. Python's default is 5 ms. The value was chosen when a thread encoded
answers, and the default cost seconds under a storm. That thread is gone, and no measurement since then compares the two values."""


def run_gateway(
    read: Callable[[], GatewayConfig],
    parent_fd: int | None = None,
    *,
    read_again: Callable[[], GatewayConfig] | None = None,
    worker: GatewayWorker | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status.

    read        makes the configuration; its ConfigError is reported as a refusal
    parent_fd   the inherited end of the supervisor's leash; None when started by hand
    read_again  makes the configuration of a reload; None: there is no file to read again
    worker      this process among several gateway workers; None: it is the only gateway of its port
    """
    set_up_logging(process="" if worker is None else worker.name)
    sys.setswitchinterval(SWITCH_S)
    leash = Leash(parent_fd)
    leash.watch()
    try:
        config = read()
        workers = text_workers(config)
        workers.spawn()
        try:
            return _serve(config, workers, leash, read_again, worker)
        finally:
            workers.kill()  # where a refusal came before they were opened
    except (ConfigError, CheckpointError) as error:
        _refuse(error, leash, can_retry=False)
        return REFUSED


def load_part(path: Path, worker: GatewayWorker) -> GatewayConfig:
    """The configuration in a JSON file, with this worker's part of the limits. Raises ConfigError."""
    config = load_config(path)
    if not 0 <= worker.index < config.workers:
        raise ConfigError(
            "--worker", f"{worker.index} is outside 0..{config.workers - 1}", "The supervisor starts the workers of its file."
        )
    return replace(config, limits=part_of(config.limits, config.workers, machine_bytes()))


def text_workers(config: GatewayConfig) -> HostProcess:
    """The text workers, not yet started. They tokenize for the models that engines serve, and parse large bodies for every model."""
    return HostProcess(HostConfig(text_folders(config.models)), key_variables(config.models))


def _serve(
    config: GatewayConfig,
    workers: Workers,
    leash: Leash,
    read_again: Callable[[], GatewayConfig] | None,
    worker: GatewayWorker | None,
) -> int:
    """The exit status. Raises ConfigError, and CheckpointError where no model can be served."""
    from headrace.gateway.compose import load_texts
    from headrace.gateway.main import CannotBind, run_loop, serve

    try:
        is_complete = run_loop(serve(config, load_texts(config), workers, leash, read_again, worker))
    except CannotBind as error:
        _refuse(error, leash, can_retry=True)
        return CANNOT_BIND
    return 0 if is_complete else CUT


def _refuse(error: HeadraceError, leash: Leash, *, can_retry: bool) -> None:
    """Report once why this process ends: through the supervisor, or on stderr where there is none."""
    leash.failed(str(error), can_retry=can_retry)
    if not leash.is_held:
        print(f"headrace gateway: {error}", file=sys.stderr)
