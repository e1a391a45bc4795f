"""Runs the ranks of a replica other than 0, each in a thread of this process."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from headrace.engine.build import build_member
from headrace.engine.config import EngineConfig
from headrace.engine.ranks.member import RankMember
from headrace.wire.target import GrpcTarget

PATIENCE_S = 60.0


class RankThreads:
    """errors: what ended a rank otherwise than rank 0's END. Nothing runs for a replica of one rank."""

    def __init__(self, config: EngineConfig, addresses: Sequence[GrpcTarget] = ()) -> None:
        """addresses: of each rank, where every stage is taken for a machine of its own; none: all are on this one"""
        self.errors: dict[int, BaseException] = {}
        self._members: dict[int, RankMember] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="hr-"))
        self._addresses = addresses
        self.rendezvous = addresses[0] if addresses else self._folder / "ranks"
        ranks = range(1, config.parallelism.world)
        self._threads = [threading.Thread(target=self._run, args=(config, rank), name=f"rank {rank}", daemon=True) for rank in ranks]
        for thread in self._threads:
            thread.start()

    def _run(self, config: EngineConfig, rank: int) -> None:
        try:
            self._members[rank] = build_member(config, rank, self.rendezvous, self._addresses[rank] if self._addresses else None)
            self._members[rank].run()
        except BaseException as error:
            self.errors[rank] = error

    def leave(self, rank: int) -> None:
        """Close its link, as the end of its process would."""
        self._members[rank].link.shut()

    def join(self) -> None:
        """Once rank 0 has ended."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
        running = [thread.name for thread in self._threads if thread.is_alive()]
        self._folder.rmdir()
        assert not running, f"{running} have not ended"
