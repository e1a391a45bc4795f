"""Counts what the ranks of a replica exchange, and how long each stage of a pipeline has nothing to compute."""

from __future__ import annotations

import logging
from operator import sub

from headrace.core.load import EngineCounters
from headrace.core.parallelism import Parallelism, RankWork
from headrace.tensor.peers import Peers

log = logging.getLogger(__name__)


class RankMeter:
    """Made once the ranks are warm: what they did before is not counted."""

    def __init__(self, peers: Peers, parallelism: Parallelism) -> None:
        self._peers, self._parallelism = peers, parallelism
        self._before = peers.work()

    def count(self, counters: EngineCounters) -> None:
        """Called after each step, whose seconds are counted already."""
        pairs = zip(self._peers.work(), self._before, strict=True)
        work = [RankWork(*map(sub, now, before)) for now, before in pairs]
        counters.exchanges = sum(each.num_exchanges for each in work)
        counters.exchanged_kilobytes = sum(each.num_bytes for each in work) // 1000
        counters.exchange_wait_microseconds = round(1e6 * sum(each.waited_s for each in work))
        if self._parallelism.pp > 1:
            for stage in range(self._parallelism.pp):
                idle_s = self._idle_s(work, stage, counters.step_seconds)
                known = counters.stage_idle_microseconds.get(str(stage), 0)
                counters.stage_idle_microseconds[str(stage)] = max(known, round(1e6 * idle_s))

    def _idle_s(self, work: list[RankWork], stage: int, steps_s: float) -> float:
        """What the stage's first rank was. steps_s: in which a step was in flight. All that rank 0 does in them counts as computing."""
        first = (self._parallelism.pp - 1 - stage) * self._parallelism.tp
        waited_s = work[first].link_waited_s
        return waited_s if first == 0 else steps_s - (work[first].steps_s - waited_s)

    def log(self, counters: EngineCounters) -> None:
        line = f"{counters.exchanges:,} exchanges of ranks, {counters.exchanged_kilobytes / 1000:,.1f} MB"
        line += f", which waited {counters.exchange_wait_microseconds / 1e6:,.1f} s in them; {counters.steps:,} steps"
        if counters.step_seconds and counters.stage_idle_microseconds:
            shares = (us / 1e6 / counters.step_seconds for us in counters.stage_idle_microseconds.values())
            line += "; of their time the stages had nothing to compute for " + ", ".join(f"{share:.0%}" for share in shares)
        log.info("%s", line)
