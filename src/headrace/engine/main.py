"""Starts the process of one replica (`headrace engine`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial

from headrace.core.errors import ConfigError
from headrace.engine.build import build_member, build_served_engine, part_of_machine
from headrace.engine.config import EngineConfig
from headrace.engine.server.adapter_reload import adapters_of
from headrace.engine.server.config import ProcessConfig
from headrace.engine.server.process import EngineExitCode, leave, run_member, run_process
from headrace.observe.logs import set_up_logging
from headrace.tensor.host.openmp import prepare_openmp
from headrace.wire.leash import Leash


def run_engine(read: Callable[[], tuple[ProcessConfig, EngineConfig]], parent_fd: int | None = None) -> None:
    """Never returns. parent_fd: the inherited end of the supervisor's leash; None when started by hand"""
    set_up_logging()
    prepare_openmp(os.environ)  # before torch is imported, which building the engine does
    leash = Leash(parent_fd)
    try:
        held = process, engine = read()
        engine = part_of_machine(engine, 1 + process.num_neighbours)
        process.keep_to_share()
        rendezvous = process.ranks_target() if engine.parallelism.world > 1 else None
        own = process.target() if process.meets_over_tcp and process.rank > 0 else None
    except (ConfigError, OSError, ValueError) as error:
        print(f"headrace engine: {error}", file=sys.stderr)
        leash.failed(str(error), can_retry=False)
        leave(EngineExitCode.REFUSED)
        return
    if rendezvous is not None and process.rank > 0:
        leave(run_member(partial(build_member, engine, process.rank, rendezvous, own), leash))
        return
    read_adapters = None if parent_fd is None else partial(adapters_of, read, held)
    build = partial(build_served_engine, engine, rendezvous=rendezvous, block_key=process.block_key, compiles_beside=True)
    leave(run_process(build, process, leash, read_adapters))
