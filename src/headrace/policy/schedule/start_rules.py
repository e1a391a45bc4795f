"""Chooses the waiting sequence that starts next, and the running sequence that makes room for it (docs/fairness.md)."""

from __future__ import annotations

from collections import Counter

from headrace.core.plan import StepCosts
from headrace.core.request import PriorityClass
from headrace.policy.config import SchedulerConfig
from headrace.policy.kvcache.manager import KvManager
from headrace.policy.schedule.sequence_table import SequenceTable
from headrace.policy.schedule.step_budget import most_running, tightest_tpot_s, tokens_within
from headrace.policy.sequence import Sequence

HEADROOM_S = 60.0

PREEMPT_RATIO = 4
"""A tenant makes room for another one of its class if it has N times as many running sequences as the other will have, by weight."""

MAX_PREEMPTED = 8

PREEMPT_INTERVAL_S = 0.02

LARGE_SHARE = 0.5
"""Part of the KV blocks beyond which one sequence, of a tier without a `kv_share`, makes room for smaller ones of other tenants."""


class StartRules:
    """Decides which waiting sequence starts, and which are preempted for it."""

    def __init__(self, config: SchedulerConfig, kv: KvManager, sequences: SequenceTable) -> None:
        self.config = config
        self.kv = kv
        self.sequences = sequences
        self._short: Sequence | None = None
        self._num_short = 0
        self._next_attempt = 0.0
        self.max_running = config.max_num_seqs

    def next_to_start(self, now: float, costs: StepCosts) -> Sequence | None:
        head = self._head(now, costs)
        if head is None:
            return None
        if self._leaves_headroom(head, now) and self.sequences.slots.num_free <= self._part(self.config.max_num_seqs):
            return None
        return head if self._keeps_goals(head, costs) else None

    def _head(self, now: float, costs: StepCosts) -> Sequence | None:
        queue = self.sequences.queue
        head = queue.head(now, costs)
        if head is None or not self._exceeds_share(head):
            return head
        return next((other for other in queue.heads(now, costs) if not self._exceeds_share(other)), head)

    def num_blocks_kept(self, seq: Sequence, now: float) -> int:
        return self._part(min((pool.total for pool in self.kv.pools), default=0)) if self._leaves_headroom(seq, now) else 0

    def _leaves_headroom(self, seq: Sequence, now: float) -> bool:
        if now - self.sequences.last_premium >= HEADROOM_S or seq.request.priority is PriorityClass.PREMIUM:
            return False
        return len(self.sequences.slots) > 0

    def _part(self, total: int) -> int:
        return int(total * self.sequences.queue.shares.premium_headroom)

    def _keeps_goals(self, seq: Sequence, costs: StepCosts) -> bool:
        self.max_running = self.config.max_num_seqs
        if not self.sequences.slots.num_goals and seq.request.tier.tpot_ms is None:
            return True
        steps = self.config.steps_per_token
        most = tokens_within(tightest_tpot_s([*self.sequences.slots.running, seq]) / steps, costs)
        self.max_running = int(min(steps * most_running(most, self.config.max_num_batched_tokens), self.max_running))
        return len(self.sequences.slots) < self.max_running

    # shares of the KV blocks

    def _exceeds_share(self, seq: Sequence) -> bool:
        """One sequence of a tenant may always run."""
        share = seq.request.tier.kv_share
        if share is None:
            return False
        held = self._num_held()[seq.request.tenant]
        return held > 0 and held + self.kv.blocks_for(len(seq.tokens)) > share * self._num_blocks

    def _num_held(self) -> Counter[str]:
        held: Counter[str] = Counter()
        for seq in self.sequences.slots.running:
            held[seq.request.tenant] += self.kv.num_held(seq)
        return held

    @property
    def _num_blocks(self) -> int:
        return min((pool.total for pool in self.kv.pools), default=0) - 1

    def _above_share(self, *, is_large_counted: bool) -> set[Sequence]:
        """The running sequences of tenants that hold more than their share, and, where they count, large ones of tiers without a share."""
        running, total = self.sequences.slots.running, self._num_blocks
        has_shares = any(seq.request.tier.kv_share is not None for seq in running)
        if not (has_shares or is_large_counted):
            return set()
        held = self._num_held() if has_shares else Counter[str]()
        above: set[Sequence] = set()
        for seq in running:
            share = seq.request.tier.kv_share
            if share is None:
                is_above = is_large_counted and self.kv.num_held(seq) > LARGE_SHARE * total
            else:
                is_above = held[seq.request.tenant] > share * total
            if is_above and _has_paid(seq):
                above.add(seq)
        return above

    def victim(self, candidates: list[Sequence]) -> Sequence:
        """The sequence to preempt where a running one cannot grow: not one of a tenant within its share, while another tenant is above."""
        queue = self.sequences.queue
        first = queue.victim(candidates)
        above = self._above_share(is_large_counted=True) if queue.traits.has_tenants else set()
        instead = [
            seq for seq in candidates if seq in above and seq.request.tenant != first.request.tenant and not queue.outranks(seq, first)
        ]
        return queue.victim(instead) if instead and first not in above else first

    # room for the head of the queue

    def note_short(self, seq: Sequence, num_blocks: int) -> None:
        self._short, self._num_short = seq, num_blocks

    def preempt_for_head(self, now: float, costs: StepCosts) -> Sequence | None:
        """Preempt running sequences for the head of the queue, and for waiting sequences of the same tenant; None: no room was made.

        The caller starts the head before any other sequence, since the preempted sequences wait in the same queue.
        """
        sequences, queue = self.sequences, self.sequences.queue
        lacks_slot = not sequences.slots.has_free
        if not (lacks_slot or self._short) or now < self._next_attempt or not (queue.traits.has_tenants and len(queue)):
            return None
        self._next_attempt = now + PREEMPT_INTERVAL_S
        head = self._head(now, costs)
        if head is None or head.num_in_flight or (self.kv.has_pending_free and not lacks_slot):
            return None
        num_blocks = self._num_short if head is self._short else 0
        self._short = None
        if not (lacks_slot or num_blocks):
            return None
        num_preempted = 0
        while num_preempted < min(queue.num_of_tenant(head), MAX_PREEMPTED):
            candidates = self._candidates(head, num_preempted, num_blocks)
            if not candidates or sum(self.kv.num_held(seq) for seq in candidates) < num_blocks:
                break
            queue.charge(candidates)
            sequences.preempt(queue.victim(candidates), now)
            num_preempted += 1
        return head if num_preempted else None

    def _candidates(self, head: Sequence, num_preempted: int, num_blocks: int) -> list[Sequence]:
        queue, running = self.sequences.queue, self.sequences.slots.running
        counts = Counter(seq.request.tenant for seq in running)
        too_many = PREEMPT_RATIO * (counts[head.request.tenant] + num_preempted + 1) / head.request.tier.weight
        is_small = self.kv.blocks_for(len(head.tokens)) <= LARGE_SHARE * self._num_blocks
        above = self._above_share(is_large_counted=num_blocks > 0 and is_small)
        candidates: list[Sequence] = []
        for seq in running:
            if not _has_paid(seq) or queue.outranks(seq, head):
                continue
            has_many = counts[seq.request.tenant] / seq.request.tier.weight >= too_many
            if queue.outranks(head, seq) or (seq.request.tenant != head.request.tenant and (has_many or seq in above)):
                candidates.append(seq)
        return candidates


def _has_paid(seq: Sequence) -> bool:
    """A sequence that was preempted before makes room again only after some progress (`Sequence.start`), so that every sequence ends."""
    return seq.num_computed >= seq.preemptible_from
