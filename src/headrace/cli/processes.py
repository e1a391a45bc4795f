"""`headrace engine` and `headrace gateway`: entries of the processes that `headrace serve` starts. People rarely type them."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Option("--config", help="JSON file written by the supervisor.")]
ParentFd = Annotated[int | None, typer.Option("--parent-fd", help="Inherited end of the supervisor's leash.")]


def engine(config: ConfigFile, parent_fd: ParentFd = None) -> None:
    """Run one engine process (started by serve)."""
    # It asks a ready engine for a dump; while modules are still being imported it would end the process.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    from headrace.engine.main import run_engine

    run_engine(config, parent_fd)


def gateway(config: ConfigFile, parent_fd: ParentFd = None) -> None:
    """Run the gateway process (started by serve)."""
    from headrace.gateway.main import run_gateway

    raise typer.Exit(run_gateway(config, parent_fd))
