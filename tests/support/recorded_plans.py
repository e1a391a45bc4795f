"""Records random lives of an engine as one digest each: every plan's bytes and every update, in order.

`record(seed)` depends on the scheduler's decisions only, so a change that is meant to cost less and decide the same leaves all digests as
they are. Updates of one turn are compared sequence by sequence, since the order of the sequences within a step has no meaning.
"""

from __future__ import annotations

import hashlib
import json
import struct
from random import Random
from typing import Any

from engine_kit import FULL, VOCAB, WINDOW, DrivenEngine, request

from headrace.core.ids import RequestId
from headrace.core.plan import UNKNOWN_COSTS, Plan, Result, StepCosts
from headrace.core.plan_codec import COLUMNS, _params_to_json
from headrace.core.request import NO_TIER, PriorityClass, TierTerms
from headrace.core.sampling import SamplingParams
from headrace.core.update import Rejected, SequenceUpdate
from headrace.policy.schedule.scheduler import Scheduler

POISON = 96
LATER_COLUMNS = ("move_ids", "drafts", "num_drafts")
TOLD = (
    "request_id",
    "epoch",
    "index",
    "token_ids",
    "logprobs",
    "prompt_logprobs",
    "finish",
    "stop_token_id",
    "error",
    "num_cached_tokens",
    "queue_time_s",
)


def record(
    seed: int,
    *,
    one_by_one: bool = False,
    queue_policy: str | None = None,
    priority: PriorityClass | None = None,
    tenant: str | None = None,
    costs: StepCosts | None = None,
) -> str:
    """The digest of the life that `seed` draws.

    one_by_one    every row is looked at, none passes in bulk (the reference implementation)
    queue_policy  takes the place of the drawn one;  priority, tenant (in one tier)  of every request's. None: as drawn
    costs         are given to every plan; None: those of the driven engine's own steps
    """
    life = Life(seed, queue_policy, priority, tenant)
    if costs is not None:
        give_costs(life.driven.scheduler, costs)
    if one_by_one:
        check_every_row(life.driven.scheduler)
    for _ in range(life.random.randint(20, 90)):
        life.act()
    life.driven.turn(40)
    life.driven.clock.now += 100.0  # prerequisites that never came
    life.driven.run()
    return life.digest.hexdigest()


def give_costs(scheduler: Scheduler, costs: StepCosts) -> None:
    plan, given = scheduler.plan, costs

    def plan_with_costs(now: float, costs: StepCosts = UNKNOWN_COSTS) -> Plan | None:
        return plan(now, given)

    scheduler.plan = plan_with_costs  # type: ignore[method-assign]


def check_every_row(scheduler: Scheduler) -> None:
    """Take back, before each decision, what lets rows pass in bulk."""
    plan, commit = scheduler.plan, scheduler.commit

    def forget() -> None:
        for seq in scheduler.sequences.alive():
            seq.bulk_decode_limit = seq.bulk_commit_limit = 0

    def plan_one_by_one(now: float, costs: StepCosts = UNKNOWN_COSTS) -> Plan | None:
        forget()
        return plan(now, costs)

    def commit_one_by_one(plan: Plan, result: Result, now: float) -> list[SequenceUpdate]:
        forget()
        return commit(plan, result, now)

    scheduler.plan = plan_one_by_one  # type: ignore[method-assign]
    scheduler.commit = commit_one_by_one  # type: ignore[method-assign]


def recorded_bytes(plan: Plan) -> bytes:
    """A plan as it was written when the digests were made. What came later (ids of moves, drafts, `structured_outputs`) does not change
    them."""
    started = [
        {"slot": s.slot, "num_prompt_tokens": s.num_prompt_tokens, "index": s.index, "params": _recorded_params(s.params)}
        for s in plan.started
    ]
    columns = [getattr(plan, name) for name in COLUMNS if name not in LATER_COLUMNS] + [s.token_ids for s in plan.started]
    header = {"step_id": plan.step_id, "columns": [len(column) for column in columns], "started": started}
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<I", len(text)) + text + b"".join(column.tobytes() for column in columns)


def _recorded_params(params: SamplingParams) -> dict[str, Any]:
    return {name: value for name, value in _params_to_json(params).items() if name != "structured_outputs"}


class Life:
    def __init__(
        self, seed: int, queue_policy: str | None = None, priority: PriorityClass | None = None, tenant: str | None = None
    ) -> None:
        self.random = Random(seed)
        self.queue_policy, self.priority, self.tenant = queue_policy, priority, tenant
        self.digest = hashlib.blake2b(digest_size=16)
        self.num_requests = 0
        self.driven = DrivenEngine(**self._settings())
        self.driven.runner.fail_when = [POISON]
        compute, take = self.driven.runner.compute, self.driven.engine._outbox

        def seen(plan: Plan) -> Result:
            self.digest.update(recorded_bytes(plan))
            return compute(plan)

        def told(updates: list[SequenceUpdate | Rejected]) -> None:
            self._note(updates)
            take(updates)

        self.driven.runner.compute = seen  # type: ignore[method-assign]
        self.driven.engine._outbox = told

    def _settings(self) -> dict[str, Any]:
        draw = self.random
        drawn = {
            "depth": draw.choice([1, 2]),
            "caching": draw.random() < 0.6,
            "groups": draw.choice([(FULL,), (FULL,), (FULL, WINDOW), (WINDOW,)]),
            "queue_policy": draw.choice(["fcfs", "priority", "sjf", "fair"]),
            "block_size": draw.choice([2, 4, 4, 8]),
            "num_blocks": draw.choice([24, 40, 60, 200]),
            "max_num_seqs": draw.choice([3, 6, 12]),
            "max_num_batched_tokens": draw.choice([5, 12, 32]),
            "max_model_len": 48,
            "enable_chunked_prefill": draw.random() < 0.8,
            "static_batching": draw.random() < 0.15,
            "eos": (3, 5) if draw.random() < 0.5 else (),
            "prerequisite_timeout_s": 20.0,
        }
        return drawn if self.queue_policy is None else {**drawn, "queue_policy": self.queue_policy}

    def _note(self, updates: list[SequenceUpdate | Rejected]) -> None:
        for update in sorted(updates, key=lambda one: (one.request_id, getattr(one, "index", 0))):
            facts = [str(update.error)] if isinstance(update, Rejected) else [getattr(update, name) for name in TOLD]
            # When the lives were recorded, this message named the exception.
            recorded = repr(facts).replace("step failed for this sequence'", "step failed for this sequence (RuntimeError)'")
            self.digest.update(recorded.encode())

    def act(self) -> None:
        draw, engine = self.random, self.driven.engine
        name = RequestId(f"r{draw.randrange(self.num_requests + 1)}")
        chance = draw.random()
        if chance < 0.30:
            self._submit()
        elif chance < 0.34:
            engine.cancel(name)
        elif chance < 0.38:
            engine.finish(name, draw.randrange(2), draw.randrange(8))
        elif chance < 0.45:
            self.driven.satisfied(name, "thing")
        elif chance < 0.50:
            self.driven.clock.now += draw.choice([0.5, 3.0, 25.0])
        elif chance < 0.53 and self.driven.scheduler.sequences.slots.running:
            self.driven.scheduler.sequences.preempt(draw.choice(self.driven.scheduler.sequences.slots.running), self.driven.clock.now)
        else:
            self.driven.turn(draw.randint(1, 6))
        self.driven.scheduler.check()

    def _submit(self) -> None:
        draw = self.random
        family = draw.randrange(3)
        prompt = [(family * 20 + i) % (VOCAB - 2) for i in range(draw.randint(1, 24))]
        if draw.random() < 0.05:
            prompt[-1] = POISON
        given: dict[str, Any] = {
            "max_tokens": draw.randint(1, 22),
            "n": draw.choice([1, 1, 1, 2, 3]),
            "ignore_eos": draw.random() < 0.5,
            "min_tokens": draw.choice([0, 0, 1]),
            "stop_token_ids": draw.choice([(), (), (7, 11, 13, 17, 19, 23)]),
            "stop": draw.choice([(), (), ("end",)]),
            "prompt_logprobs": draw.choice([None, None, None, 0]),
            "needs": frozenset({"thing"}) if draw.random() < 0.1 else frozenset(),
            "deadline_at": draw.choice([None, None, None, self.driven.clock.now + 5]),
            "priority": draw.choice(list(PriorityClass)),
            "tenant": str(family),
            "tier": TierTerms(name=f"tier-{family}", weight=draw.choice([1.0, 2.0])),
            "salt": b"s" * family,
            "prefix_caching": draw.random() < 0.9,
        }
        if self.priority is not None:
            given["priority"] = self.priority
        if self.tenant is not None:
            given |= {"tenant": self.tenant, "tier": NO_TIER}
        needs = given.pop("needs")
        self.driven.submit(request(f"r{self.num_requests}", prompt, **given), needs=needs)
        self.num_requests += 1
