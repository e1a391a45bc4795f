"""Starts the other ranks of an engine in this program (docs/ranks.md): `headrace engine` processes, on a leash (`wire.leash`) each, so that
they end with the program however it ends.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import IO, Self

from headrace.core.errors import ConfigError, EngineFatal
from headrace.core.strict_decode import plain
from headrace.engine.build import build_engine, part_of_machine
from headrace.engine.config import EngineConfig
from headrace.engine.loop import Engine, Outbox
from headrace.machine.forks import FORKS
from headrace.machine.gpus import deal_gpu, find_gpus
from headrace.machine.private_files import MAX_DIR_BYTES
from headrace.machine.resources import MachineShare, allowed_cpus, share_of, why_crowded

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "headrace", "engine")
MAX_LINE_BYTES = 1 << 16

END_S = 2.0
"""A member whose leash is closed ends at once; one that is stopped is killed after this long."""

LAST_WORDS_S = 2.0


def build_ranks(config: EngineConfig, outbox: Outbox) -> Engine:
    """The engine of rank 0. The other ranks run until it is closed.

    Raises: as `build_engine`; ConfigError with the reason of a rank that ended at its start, and for a long temporary directory.
    """
    if config.parallelism.world == 1:
        return build_engine(config, outbox)
    with TemporaryDirectory(prefix="headrace-ranks-") as folder, ExitStack() as ending:
        if len(os.fsencode(folder)) > MAX_DIR_BYTES:
            raise ConfigError("TMPDIR", f"{folder} has more than {MAX_DIR_BYTES} bytes", "Sockets need a short path: set another TMPDIR.")
        members = ending.enter_context(MemberProcesses(config, Path(folder)))
        try:
            engine = build_engine(members.rank_0, outbox, members.rendezvous, members.check)
        except EngineFatal:
            members.check(LAST_WORDS_S)
            raise
        ending.enter_context(engine.closing)
        engine.closing = ending.pop_all()
    return engine


@dataclass(frozen=True, slots=True)
class _Member:
    rank: int
    process: subprocess.Popen[bytes]
    leash: socket.socket

    def why_ended(self) -> str:
        """Waits for its last words."""
        self.leash.settimeout(LAST_WORDS_S)
        try:
            with self.leash.makefile("rb") as said:
                messages = [json.loads(line) for line in said]
        except (OSError, ValueError):
            messages = []  # it died in the middle of a line
        status = self.process.wait()
        how = f"was killed by {Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return next((str(message["reason"]) for message in messages if message.get("event") == "failed"), how)


class MemberProcesses:
    """rank_0  the options of the engine in this program, with its share of the machine"""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        """folder: private"""
        world, cpus = config.parallelism.world, allowed_cpus()
        self.rendezvous = folder / "ranks"
        if crowd := why_crowded(world, config.num_threads or 1):
            log.warning("the ranks of the model are %s", crowd)
        names = find_gpus().names if config.device == "cuda" else ()
        dealt = [deal_gpu(names, rank, world) if names else ("", world - 1) for rank in range(world)]
        self.rank_0 = part_of_machine(config, 1 + dealt[0][1])  # on the GPU that torch finds first; its threads are not bound to CPUs
        self._members: list[_Member] = []
        try:
            for rank in range(1, world):
                share = share_of(cpus, MachineShare(rank, world)) if config.num_threads is None else ()
                content = {
                    "replica": "LLM",
                    "address": f"unix:{folder / 'none'}",
                    "rank": rank,
                    "rendezvous": f"unix:{self.rendezvous}",
                    "cpus": ",".join(map(str, share)),
                    "gpu": dealt[rank][0],
                    "num_neighbours": dealt[rank][1],
                    "engine": plain(config),
                }
                path = folder / f"r{rank}.json"
                path.write_text(json.dumps(content), encoding="utf-8")
                self._members.append(_start(rank, path))
        except BaseException:
            self.close()
            raise

    def check(self, timeout_s: float = 0.0) -> None:
        """Waits for at most `timeout_s` for one to end. Raises ConfigError with its reason if one has ended."""
        for member in self._members:
            try:
                member.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                continue
            raise ConfigError(f"rank {member.rank}", member.why_ended().rstrip("."))

    def close(self) -> None:
        for member in self._members:
            member.leash.close()
        for member in self._members:
            try:
                member.process.wait(END_S)
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _start(rank: int, path: Path) -> _Member:
    from headrace.observe.logs import ENVIRONMENT, LogFormat  # which an engine of one process does not need

    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            [*COMMAND, "--config", str(path), "--parent-fd", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C is the program's
            env={**os.environ, ENVIRONMENT: LogFormat.JSON},
        )
    except OSError as error:
        ours.close()
        raise ConfigError(f"rank {rank}", f"cannot be started ({error.strerror})") from error
    finally:
        theirs.close()
    FORKS.close_in_forks(ours)
    assert process.stdout is not None
    threading.Thread(target=_relay, args=(process.stdout, f"rank {rank}"), name=f"log of rank {rank}", daemon=True).start()
    return _Member(rank, process, ours)


def _relay(output: IO[bytes], label: str) -> None:
    from headrace.observe.logs import relay

    with output:
        while line := output.readline(MAX_LINE_BYTES):
            relay(line.decode("utf-8", "replace").rstrip("\n"), label)
