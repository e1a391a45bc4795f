"""Builds a real scheduler and loop with a host tier, over a fake runner that has host memory and may fail steps when told to."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from enum import Enum
from typing import Any

from engine_kit import ManualClock

from headrace.core.plan import Plan, Result
from headrace.core.request import EngineRequest
from headrace.core.update import FinishReason, Rejected, SequenceUpdate
from headrace.engine.loop import Engine
from headrace.lab.fake_runner import FakeOptions, FakeRunner, fake_answer, fake_info
from headrace.policy.config import SchedulerConfig
from headrace.policy.kvcache.host_tier import HostTier, HostTierConfig
from headrace.policy.kvcache.manager import KvManager
from headrace.policy.schedule.scheduler import MOVE_POLL_S, Scheduler

OPTIONS = FakeOptions(vocab_size=50, max_model_len=48, block_size=4, num_blocks=14, host_slots=12, move_steps=(0, 3))


class Failure(Enum):
    BEFORE = "before"
    APPLIED = "applied"


class FailingRunner(FakeRunner):
    """fail_next: what becomes of the next steps that have rows. The steps that repeat a failed one's rows must not fail again, or the
    sequence that runs alone in one is to blame."""

    def __init__(self, options: FakeOptions) -> None:
        super().__init__(options)
        self.fail_next: list[Failure | None] = []
        self.plans: list[Plan] = []

    def _compute(self, plan: Plan) -> Result:
        self.plans.append(plan)
        failure = self.fail_next.pop(0) if self.fail_next and plan.num_rows else None
        if failure is Failure.APPLIED:
            self._apply(plan)
        if failure is not None:
            raise RuntimeError("a step that fails once")
        return super()._compute(plan)


class TieredEngine:
    """Turned by hand; collects what every sequence produced. is_tiered=False: the reference implementation."""

    def __init__(
        self, options: FakeOptions = OPTIONS, *, is_tiered: bool = True, tier: HostTierConfig | None = None, depth: int = 1, **config: Any
    ) -> None:
        self.options = options
        self.clock = ManualClock()
        self.runner = FailingRunner(options)
        info = fake_info(options)
        self.kv = KvManager(info.kv_groups, info.num_blocks, info.block_size)
        self.tier = HostTier(self.kv, tier or HostTierConfig(num_slots=options.host_slots)) if is_tiered else None
        settings: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": options.max_model_len, **config}
        self.scheduler = Scheduler(SchedulerConfig(depth=depth, **settings), self.kv, self.tier)
        self.engine = Engine(self.scheduler, self.runner, info=info, outbox=self.take, clock=self.clock)
        self.requests: dict[str, EngineRequest] = {}
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.finish: dict[tuple[str, int], FinishReason] = {}
        self.cached: dict[tuple[str, int], int] = {}

    def take(self, updates: list[SequenceUpdate | Rejected]) -> None:
        for update in updates:
            assert isinstance(update, SequenceUpdate), update
            key = (str(update.request_id), update.index)
            self.tokens[key] += update.token_ids
            if update.num_cached_tokens is not None:
                self.cached[key] = update.num_cached_tokens
            if update.finish is not None:
                self.finish[key] = update.finish
                assert update.finish is not FinishReason.ERROR, update.error

    def submit(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.requests[str(request.request_id)] = request
            self.engine.submit(request)

    def turn(self, count: int = 1) -> bool:
        """Whether the last turn found something to do."""
        is_busy = False
        for _ in range(count):
            is_busy = self.engine.turn()
            self.scheduler.check()
        return is_busy

    def run(self, max_turns: int = 3000) -> None:
        for _ in range(max_turns):
            if self.turn():
                continue
            if not self.kv.leases.has_moves:
                return
            self.clock.now += MOVE_POLL_S
        raise AssertionError("the engine did not come to rest")

    def evict_all(self) -> None:
        """Other sequences need every block of the device: what was cached is gone from it."""
        pool = self.kv.pools[0]
        blocks = [pool.take() for _ in range(pool.num_available)]
        for block in blocks:
            pool.drop(block)

    def check_answers(self) -> None:
        """What every sequence produced is the beginning of what the plain function says, all of it where it ended by itself."""
        for (name, index), tokens in self.tokens.items():
            answer = fake_answer(self.requests[name], index, len(tokens), replace(self.options, host_slots=0))
            assert tokens == answer, (name, index)
            if self.finish.get((name, index)) is FinishReason.LENGTH:
                assert len(tokens) == self.requests[name].params.max_tokens
