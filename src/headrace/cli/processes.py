"""`headrace engine` and `headrace gateway`: the entry points of the processes that `headrace serve` starts. They are hidden from --help."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Option("--config", help="JSON file written by the supervisor.")]
ParentFd = Annotated[int | None, typer.Option("--parent-fd", help="Inherited end of the supervisor's leash.")]


def engine(config: ConfigFile, parent_fd: ParentFd = None) -> None:
    """Run one engine process (started by serve)."""
    # SIGUSR1 asks a ready engine for a dump; without a handler yet it would end the process.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    from headrace.engine.main import run_engine

    run_engine(config, parent_fd)


def gateway(config: ConfigFile, parent_fd: ParentFd = None) -> None:
    """Run the gateway process (started by serve)."""
    from headrace.gateway.main import run_gateway

    raise typer.Exit(run_gateway(config, parent_fd))
