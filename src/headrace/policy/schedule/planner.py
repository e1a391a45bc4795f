"""Which rows a step has: the decisions behind `Scheduler.plan`.

One token budget per step. Prefill and decode are both "tokens expected minus tokens planned", so chunked prefill, prefix hits and resumed
sequences need no loop of their own: decoding rows take their one token first, what is left goes to prefills in the queue policy's order,
then to newly admitted sequences. The sequences queued behind a long prompt get a quarter of what it would take, so a short prompt
does not wait until a long one is computed.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from headrace.core.ids import SlotId
from headrace.core.plan import Started
from headrace.policy.config import SchedulerConfig
from headrace.policy.kvcache.manager import KvManager
from headrace.policy.schedule.plan_builder import PlanBuilder
from headrace.policy.schedule.price import ChunkPrice
from headrace.policy.schedule.sequence import RUNNING, Sequence
from headrace.policy.schedule.sequence_table import SequenceTable
from headrace.policy.schedule.step_rows import StepRows

MAX_SCORED_TOKENS = 64
"""Prompt positions whose log-probabilities are computed in one chunked step. Each needs a row of logits over the whole vocabulary, many
times the cost of a plain prompt token: a full budget of them would hold up every other sequence's next token for seconds."""


@dataclass(slots=True)
class PlanDraft:
    """A plan while it is being decided. Budget is what is left of the step's tokens."""

    max_tokens: int
    builder: PlanBuilder
    now: float
    score_budget: int = MAX_SCORED_TOKENS
    rows: StepRows = field(default_factory=StepRows)
    num_prefills: int = 0
    num_more: int = 0
    """Tokens granted beyond one per row, at what they cost."""
    num_unused: int = 0
    """Tokens that the queue policy does not give to prefills."""
    num_reserved_for_long: int = 0
    """Tokens kept for long prompts while those behind them have their share."""
    num_charged: int = 0
    """Leading rows the queue policy has been charged for."""

    @property
    def budget(self) -> int:
        return self.max_tokens - len(self.rows.seqs) - self.num_more - self.num_unused - self.num_reserved_for_long


class Planner:
    """Fills a draft with rows."""

    def __init__(self, config: SchedulerConfig, kv: KvManager, sequences: SequenceTable) -> None:
        self.config = config
        self.kv = kv
        self.sequences = sequences
        self._price = ChunkPrice(config.costly_context if config.enable_chunked_prefill else 0)

    def fill(self, step: PlanDraft) -> None:
        """Rows for who runs and who can be admitted. On an error the draft says what was granted so far."""
        prefilling, drafted = self._plan_decodes(step)
        for seq in drafted:
            self._plan_drafted(seq, step)
        self._plan_prefills(prefilling, step)
        self.charge(step)

    def repeat(self, sequences: list[Sequence], step: PlanDraft) -> list[Sequence]:
        """Rows for these sequences alone, within the blocks they hold. Returns those the budget did not reach."""
        left: list[Sequence] = []
        for seq in sequences:
            if seq.state is RUNNING and not (seq.num_uncomputed == 1 and seq.is_complete):
                held = self.kv.num_allocated(seq) - seq.num_planned
                if seq.num_uncomputed > 0 and held > 0:
                    count = min(self._share(seq, seq.num_uncomputed, step), held)
                    if count:
                        self._grant(seq, count, step)
                    else:
                        left.append(seq)
        self.charge(step)
        return left

    def _plan_decodes(self, step: PlanDraft) -> tuple[list[Sequence], list[Sequence]]:
        """One token for each that decodes. Returns those that run and want more than one, and those with drafted tokens to verify.

        The loop is the hottest place of the policy floor: a sequence below `bulk_decode_limit` has nothing to ask.
        """
        prefilling: list[Sequence] = []
        drafted: list[Sequence] = []
        seqs, starts = step.rows.seqs, step.rows.starts
        for seq in self.sequences.running:
            start = seq.num_planned
            if start < seq.bulk_decode_limit or self._renew(seq, step):
                seq.num_planned = start + 1
                seq.num_expected = start + 2
                seqs.append(seq)
                starts.append(start)
            elif seq.state is RUNNING:  # not preempted earlier in this plan
                num_uncomputed = seq.num_uncomputed
                if num_uncomputed > 1:
                    prefilling.append(seq)
                elif num_uncomputed == 1 and seq.drafts:
                    drafted.append(seq)
                elif num_uncomputed == 1 and not seq.is_complete:
                    self._plan_decode(seq, step)
        step.rows.num_decodes = len(seqs)
        return prefilling, drafted

    def _plan_drafted(self, seq: Sequence, step: PlanDraft) -> None:
        """One row over the last token and those drafted to follow it, as far as budget, length and blocks reach."""
        if seq.state is not RUNNING:
            return  # preempted earlier in this plan
        drafts = seq.drafts[: max(0, min(step.budget - 1, seq.limit - 1 - len(seq.tokens)))]
        if drafts and self.kv.grow(seq, seq.num_planned + 1 + len(drafts), step.builder):
            step.rows.drafts.extend(drafts)
            self._grant(seq, 1 + len(drafts), step, samples=1 + len(drafts))
        else:
            self._plan_decode(seq, step)

    def _plan_prefills(self, prefilling: list[Sequence], step: PlanDraft) -> None:
        """Prefills in the queue policy's order, then who waits; those behind the first long prompt have their share before it."""
        if not prefilling and not self._may_admit():
            return
        shares = self.sequences.queue.shares
        step.num_unused = step.budget - shares.for_prefill(step.budget)
        if len(prefilling) > 1:
            self.charge(step)
            prefilling = self.sequences.queue.prefill_order(prefilling)
        prefilling = [seq for seq in prefilling if seq.state is RUNNING]  # not preempted meanwhile, for a row that decodes
        budget = step.budget
        long = [(seq, seq.incarnation) for seq in prefilling if self._is_long(seq, budget)]
        num_ahead = prefilling.index(long[0][0]) if long else len(prefilling)
        for seq in prefilling[:num_ahead]:
            self._plan_one(seq, step)
        if long:
            step.num_reserved_for_long = shares.reserved_for_long(step.budget)
        for seq in prefilling[num_ahead:]:
            if (seq, seq.incarnation) not in long:
                self._plan_one(seq, step)
        self._plan_waiting(step)
        step.num_reserved_for_long = 0
        for seq, incarnation in long:
            if seq.incarnation == incarnation:  # or it was preempted, and may have been admitted anew
                self._plan_one(seq, step)

    def _is_long(self, seq: Sequence, budget: int) -> bool:
        """Whether the rest of a prompt would fill more than two steps like this one, which has `budget` for prefills.

        One that is scored never does: it takes a small part of a step.
        """
        if seq.scores_prompt or not self.config.enable_chunked_prefill:
            return False
        cost = seq.num_uncomputed + self._price.surcharge(seq.num_planned, seq.num_uncomputed)
        return self.sequences.queue.shares.is_long(cost, budget)

    def _renew(self, seq: Sequence, step: PlanDraft) -> bool:
        """Give a sequence that decodes and has filled its block the next one. False: it has to be checked."""
        last = seq.limit - 1
        if seq.bulk_decode_limit in (0, last) or step.budget <= 0 or not self.kv.grow(seq, seq.num_planned + 1, step.builder):
            return False
        seq.bulk_decode_limit = min(seq.allocated_until, last)
        seq.unstall(step.now)
        return True

    def _plan_decode(self, seq: Sequence, step: PlanDraft) -> None:
        if seq.num_planned < seq.allocated_until:
            self._grant(seq, 1, step)  # its block has room, nothing to ask
        else:
            self._plan_one(seq, step)

    def _plan_one(self, seq: Sequence, step: PlanDraft) -> None:
        """Give a running sequence its share; preempt until its blocks fit."""
        if seq.state is not RUNNING:
            return  # preempted earlier in this plan
        count = self._share(seq, seq.num_uncomputed, step)
        if count == 0:
            seq.stall(step.now)
            return
        while not self.kv.grow(seq, seq.num_planned + count, step.builder):
            if self.kv.has_pending_free:
                seq.stall(step.now)
                return  # blocks come free with the step in flight
            if self.sequences.drop_waiting_forks():
                continue
            self.charge(step)
            planned = {other.seq_id for other in step.rows.seqs}
            victim = self.sequences.queue.victim(other for other in self.sequences.running if other.seq_id not in planned)
            if victim is seq and seq.is_in_flight:
                seq.stall(step.now)
                return  # its own step may move a window on; preempting now would throw that step away, again and again
            self.sequences.preempt(victim, step.now)
            if victim is seq:
                return
        self._grant(seq, count, step)

    def _share(self, seq: Sequence, num_uncomputed: int, step: PlanDraft) -> int:
        """Tokens of this step for a sequence with `num_uncomputed` to compute.

        With others in the step, or a long prompt to come, a chunk far into a prompt is shorter: they would wait for its attention to all
        that comes before.
        Without chunking a prompt runs whole or not; one longer than the whole budget runs as the only prefill of its step.
        """
        if self.config.enable_chunked_prefill or num_uncomputed == 1:
            is_priced = num_uncomputed > 1 and (len(step.rows) or step.num_reserved_for_long)
            most = self._price.most(seq.num_expected - num_uncomputed, step.budget) if is_priced else max(step.budget, 0)
            return min(num_uncomputed, most, max(step.score_budget, 1) if num_uncomputed > 1 and seq.scores_prompt else num_uncomputed)
        if num_uncomputed <= step.budget:
            return num_uncomputed
        is_oversized = num_uncomputed > self.config.max_num_batched_tokens
        return num_uncomputed if is_oversized and step.num_prefills == 0 else 0

    def _grant(self, seq: Sequence, count: int, step: PlanDraft, samples: int | None = None) -> None:
        """samples: given for a row with drafted tokens; else it samples one token when it reaches the end of what is expected."""
        start = seq.num_planned
        if samples is None:
            samples = int(start + count == seq.num_expected)
        step.rows.add(seq, start, count, samples)
        step.num_more += count - 1 + self._price.surcharge(start, count)
        step.num_prefills += count > max(samples, 1)
        if seq.scores_prompt and start < seq.num_prompt:
            step.score_budget -= count
        seq.grant(count, samples)
        seq.unstall(step.now)

    def charge(self, step: PlanDraft) -> None:
        """Tell the queue policy of the rows it has not heard of; always before it is asked for an opinion."""
        if self.sequences.queue.charges and step.num_charged < len(step.rows):
            step.rows.fill()
            self.sequences.queue.charge(step.rows.seqs[step.num_charged :], step.rows.counts[step.num_charged :])
            step.num_charged = len(step.rows)

    def _plan_waiting(self, step: PlanDraft) -> None:
        """Admit in the queue's order. Static batching fills a batch when the last one has ended, and only then."""
        if not self._may_admit():
            return
        is_static, num_ran = self.config.static_batching, self.sequences.num_running
        while self.sequences.has_free_slot and (step.budget > 0 or is_static):
            self.charge(step)
            seq = self.sequences.queue.head()
            if seq is None or seq.num_in_flight or not self._admit(seq, step, num_ran):
                return

    def _may_admit(self) -> bool:
        """Whether there is a sequence that waits, and a place for it."""
        if not len(self.sequences.queue) or not self.sequences.has_free_slot:
            return False
        return not (self.config.static_batching and self.sequences.num_running)

    def _admit(self, seq: Sequence, step: PlanDraft, num_ran: int) -> bool:
        """Start the head of the queue. False when it does not fit yet; none behind it is tried then, or it could starve.

        num_ran: leading sequences of those that run which are not new in this plan.
        """
        is_forked = any(seq.blocks)
        hits = seq.num_planned if is_forked else self._hits(seq)
        count = self._share(seq, len(seq.tokens) - hits, step)
        if count == 0 and not self.config.static_batching:
            return False
        chunks = (
            self.kv.blocks_for(step.budget + step.num_reserved_for_long) if step.num_reserved_for_long else 0
        )  # of the long prompts, planned after this
        while not self._fits(self.kv.num_left(seq, hits, hits + count, chunks), num_ran):
            if self.sequences.num_running or self.kv.has_pending_free or not self.sequences.drop_waiting_forks():
                return False
            if is_forked:
                return True  # its own blocks may have been the ones let go: look at the head anew
        if not is_forked:
            self._take_hits(seq, hits)
        self._start(seq, step.builder, step.now)
        if count:
            grown = self.kv.grow(seq, seq.num_planned + count, step.builder)
            assert grown, "can_admit promised these blocks"
            self._grant(seq, count, step)
        return True

    def _fits(self, num_left: float, num_ran: int) -> bool:
        """Whether so many blocks are enough for the first `num_ran` of those that run: one each for all that may still grow, or admitting
        would only lead to preempting."""
        if not 0 <= num_left < num_ran:
            return num_left >= 0
        return num_left >= self.kv.num_that_may_grow(self.sequences.running[:num_ran])

    def _start(self, seq: Sequence, builder: PlanBuilder, now: float) -> None:
        self.sequences.start(seq, now)
        facts = Started(SlotId(seq.slot), array("i", seq.tokens), seq.num_prompt, seq.request.params, seq.index)
        builder.started.append(facts)
        self.kv.write_tables(seq, builder)

    def _take_hits(self, seq: Sequence, hits: int) -> None:
        if hits:
            self.kv.take_hits(seq, hits)
        if seq.incarnation == 0 and self.kv.caching and seq.uses_prefix_cache:
            seq.num_cached = min(hits, seq.num_prompt)
            self.sequences.counters.prefix_cache_query_tokens += seq.num_prompt
            self.sequences.counters.prefix_cache_hit_tokens += seq.num_cached

    def _hits(self, seq: Sequence) -> int:
        """Prompt log-probabilities need every prompt position computed."""
        return 0 if seq.scores_prompt else self.kv.num_hit_tokens(seq)
