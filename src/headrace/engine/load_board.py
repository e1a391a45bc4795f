"""Publishes the replica's load: the loop's thread writes it, and other threads read it at any time.

Ages are computed when a load is read: a step or a loop that hangs shows in them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headrace.core.clock import Clock
from headrace.core.load import EngineCounters, LoadSnapshot, plus, summed
from headrace.engine.adapters.preparer import AdapterPreparer
from headrace.engine.inbox import Inbox, SubmittedWork
from headrace.engine.sleeping import EngineSleep
from headrace.engine.steps import StepQueue
from headrace.engine.utilisation import NO_USE, EngineMeter
from headrace.policy.schedule.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class _Published:
    load: LoadSnapshot
    taken: SubmittedWork
    at: float


class LoadBoard:
    def __init__(
        self,
        scheduler: Scheduler,
        inbox: Inbox,
        steps: StepQueue,
        clock: Clock,
        meter: EngineMeter | None = None,
        adapters: AdapterPreparer[Any] | None = None,
        sleep: EngineSleep | None = None,
    ) -> None:
        self._meter = meter
        self._sleep = sleep
        self._adapters = adapters
        self._num_running_highest = 0
        self._scheduler = scheduler
        self._inbox = inbox
        self._steps = steps
        self._clock = clock
        self.publish()

    def publish(self) -> None:
        scheduler, pools = self._scheduler, self._scheduler.kv.pools
        classes, costs = scheduler.class_loads, self._steps.reported_costs
        total = summed(classes)
        self._num_running_highest = max(self._num_running_highest, total.num_running)
        counters = scheduler.sequences.counters.copy()
        load = LoadSnapshot(
            num_running=total.num_running,
            num_waiting=total.num_waiting,
            kv_blocks_free=sum(pool.num_free for pool in pools),
            kv_blocks_cached=sum(pool.num_cached for pool in pools),
            kv_blocks_used=sum(pool.num_used for pool in pools),
            kv_blocks_total=sum(pool.total for pool in pools),
            counters=counters,
            num_queued_tokens=total.num_queued_tokens,
            max_num_seqs=scheduler.max_running,
            step_fixed_s=costs.fixed_s,
            step_token_s=costs.token_s,
            step_prompt_tokens=scheduler.step_prompt_tokens,
            classes=classes,
            num_running_highest=self._num_running_highest,
            is_asleep=self._sleep is not None and self._sleep.is_asleep,
            **({} if self._adapters is None else _adapter_load(self._adapters, counters)),
        )
        self._published = _Published(load, self._inbox.taken, self._clock())

    def snapshot(self) -> LoadSnapshot:
        """Sequences submitted since the publication count as waiting. Callable from any thread."""
        now = self._clock()
        published, step = self._published, self._steps.running
        submitted = self._inbox.put_since(published.taken).classes
        added = summed(submitted)
        use, counters = NO_USE, published.load.counters
        if self._meter is not None:
            use, counters = self._meter.read(now), self._meter.with_experts(counters)
        return replace(
            published.load,
            counters=counters,
            num_waiting=published.load.num_waiting + added.num_waiting,
            num_queued_tokens=published.load.num_queued_tokens + added.num_queued_tokens,
            step_age_s=None if step is None else now - step.started,
            step_predicted_s=0.0 if step is None else step.predicted_s,
            loop_age_s=now - published.at,
            classes=plus(published.load.classes, submitted),
            **use,
        )


def _adapter_load(adapters: AdapterPreparer[Any], counters: EngineCounters) -> dict[str, Any]:
    """Fields of the snapshot; those of `counters` are set."""
    use, reads = adapters.use, adapters.reads_done
    counters.adapter_reads, counters.adapter_reads_failed = reads.num, reads.num_failed
    counters.adapter_read_microseconds, counters.adapter_evictions = round(reads.read_s * 1e6), reads.num_evicted
    return {
        "running_adapters": use.running,
        "waiting_adapters": use.waiting,
        "max_loras": adapters.max_loras,
        "adapter_pool_bytes": reads.pool_bytes,
        "adapter_pool_highest_bytes": reads.pool_highest_bytes,
    }
