"""Which rows a step has: the decisions behind `Scheduler.plan`.

A step has one token budget. Prefill and decode both compute "tokens expected minus tokens planned", so chunked prefill, prefix hits and
resumed sequences need no loop of their own. Decoding rows take one token each; the rest of the budget goes to running prefills in the
queue policy's order, then to newly admitted sequences. While a long prompt prefills, a quarter of that rest is reserved for the sequences
queued behind it (`policy.queues.shares`), so a short prompt does not wait until a long one is computed.
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

MAX_PROMPT_LOGPROB_TOKENS = 64
"""Most prompt positions in one chunked step that get log-probabilities. Each needs a row of logits over the whole vocabulary, which costs
many times a plain prompt token: a full budget of such positions would delay every other sequence's next token by seconds."""


@dataclass(slots=True)
class PlanDraft:
    """A plan while it is being decided. `budget` is what remains of the step's tokens."""

    max_tokens: int
    builder: PlanBuilder
    now: float
    logprob_budget: int = MAX_PROMPT_LOGPROB_TOKENS
    rows: StepRows = field(default_factory=StepRows)
    num_prefills: int = 0
    num_more: int = 0
    """Tokens charged beyond one per row: the rest of each prefill chunk, and the surcharge for its context (`price`)."""
    num_unused: int = 0
    """Tokens that the queue policy leaves unused (`StepShares.prefill`)."""
    num_reserved_for_long: int = 0
    """Tokens held back for long prompts while the sequences queued behind them are planned."""
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
        """Add rows for running sequences and for those that can be admitted. When this raises, the draft holds what was granted so far."""
        prefilling, drafted = self._plan_decodes(step)
        for seq in drafted:
            self._plan_drafted(seq, step)
        self._plan_prefills(prefilling, step)
        self.charge(step)

    def repeat(self, sequences: list[Sequence], step: PlanDraft) -> list[Sequence]:
        """Add rows for these sequences alone, within the blocks they hold. Returns the sequences that the budget did not reach."""
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
        """Add a row of one token for each decoding sequence. Returns the running sequences with more than one token to compute, and the
        sequences with drafted tokens to verify.

        This is the policy floor's hottest loop: for a sequence below its `bulk_decode_limit` there is nothing to decide.
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
        """Add one row over the last token and its drafted successors, as many as budget, length and blocks allow."""
        if seq.state is not RUNNING:
            return  # preempted earlier in this plan
        drafts = seq.drafts[: max(0, min(step.budget - 1, seq.limit - 1 - len(seq.tokens)))]
        if drafts and self.kv.grow(seq, seq.num_planned + 1 + len(drafts), step.builder):
            step.rows.drafts.extend(drafts)
            self._grant(seq, 1 + len(drafts), step, samples=1 + len(drafts))
        else:
            self._plan_decode(seq, step)

    def _plan_prefills(self, prefilling: list[Sequence], step: PlanDraft) -> None:
        """Plan prefills in the queue policy's order, then waiting sequences. Sequences behind the first long prompt are planned before it,
        within the share that is reserved for them."""
        if not prefilling and not self._may_admit():
            return
        shares = self.sequences.queue.shares
        step.num_unused = step.budget - shares.for_prefill(step.budget)
        if len(prefilling) > 1:
            self.charge(step)
            prefilling = self.sequences.queue.prefill_order(prefilling)
        prefilling = [seq for seq in prefilling if seq.state is RUNNING]  # a decoding row may have preempted one
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
        """Whether the rest of a prompt is long for steps like this one, which has `budget` for prefills (`StepShares.is_long`).

        A prompt with log-probabilities never is: it takes a small part of each step.
        """
        if seq.needs_prompt_logprobs or not self.config.enable_chunked_prefill:
            return False
        cost = seq.num_uncomputed + self._price.surcharge(seq.num_planned, seq.num_uncomputed)
        return self.sequences.queue.shares.is_long(cost, budget)

    def _renew(self, seq: Sequence, step: PlanDraft) -> bool:
        """Give the next block to a decoding sequence that has filled its last one. False: the sequence has to be checked in full."""
        last = seq.limit - 1
        if seq.bulk_decode_limit in (0, last) or step.budget <= 0 or not self.kv.grow(seq, seq.num_planned + 1, step.builder):
            return False
        seq.bulk_decode_limit = min(seq.allocated_until, last)
        seq.unstall(step.now)
        return True

    def _plan_decode(self, seq: Sequence, step: PlanDraft) -> None:
        if seq.num_planned < seq.allocated_until:
            self._grant(seq, 1, step)  # its last block is not full
        else:
            self._plan_one(seq, step)

    def _plan_one(self, seq: Sequence, step: PlanDraft) -> None:
        """Give a running sequence its share of the step, preempting others until its blocks fit."""
        if seq.state is not RUNNING:
            return  # preempted earlier in this plan
        count = self._share(seq, seq.num_uncomputed, step)
        if count == 0:
            seq.stall(step.now)
            return
        while not self.kv.grow(seq, seq.num_planned + count, step.builder):
            if self.kv.has_pending_free:
                seq.stall(step.now)
                return  # the commit of the step in flight frees blocks
            if self.sequences.drop_waiting_forks():
                continue
            self.charge(step)
            planned = {other.seq_id for other in step.rows.seqs}
            victim = self.sequences.queue.victim(other for other in self.sequences.running if other.seq_id not in planned)
            if victim is seq and seq.is_in_flight:
                seq.stall(step.now)
                return  # its step in flight may free blocks behind its window; preempting would discard that step, again and again
            self.sequences.preempt(victim, step.now)
            if victim is seq:
                return
        self._grant(seq, count, step)

    def _share(self, seq: Sequence, num_uncomputed: int, step: PlanDraft) -> int:
        """Tokens of this step for a sequence with `num_uncomputed` tokens to compute.

        A chunk far into a prompt is shortened when the step has other rows, or a long prompt is still to be planned: all rows of a step
        wait for the chunk's attention over its context.
        Without chunked prefill a prompt is computed in one step; a prompt longer than the whole budget is its step's only prefill.
        """
        if self.config.enable_chunked_prefill or num_uncomputed == 1:
            is_priced = num_uncomputed > 1 and (len(step.rows) or step.num_reserved_for_long)
            most = self._price.most(seq.num_expected - num_uncomputed, step.budget) if is_priced else max(step.budget, 0)
            if num_uncomputed > 1 and seq.needs_prompt_logprobs:
                most = min(most, max(step.logprob_budget, 1))
            return min(num_uncomputed, most)
        if num_uncomputed <= step.budget:
            return num_uncomputed
        is_oversized = num_uncomputed > self.config.max_num_batched_tokens
        return num_uncomputed if is_oversized and step.num_prefills == 0 else 0

    def _grant(self, seq: Sequence, count: int, step: PlanDraft, samples: int | None = None) -> None:
        """Add a row of `count` tokens. samples: None without drafts; the row then samples one token if it ends at the last expected one."""
        start = seq.num_planned
        if samples is None:
            samples = int(start + count == seq.num_expected)
        step.rows.add(seq, start, count, samples)
        step.num_more += count - 1 + self._price.surcharge(start, count)
        step.num_prefills += count > max(samples, 1)
        if seq.needs_prompt_logprobs and start < seq.num_prompt:
            step.logprob_budget -= count
        seq.grant(count, samples)
        seq.unstall(step.now)

    def charge(self, step: PlanDraft) -> None:
        """Charge the queue policy for the rows added since the last call. It has to be up to date whenever it is asked for an order."""
        if self.sequences.queue.charges and step.num_charged < len(step.rows):
            step.rows.fill()
            self.sequences.queue.charge(step.rows.seqs[step.num_charged :], step.rows.counts[step.num_charged :])
            step.num_charged = len(step.rows)

    def _plan_waiting(self, step: PlanDraft) -> None:
        """Admit waiting sequences in the queue's order. Static batching admits only once no sequence of the last batch runs."""
        if not self._may_admit():
            return
        is_static, num_ran = self.config.static_batching, self.sequences.num_running
        while self.sequences.has_free_slot and (step.budget > 0 or is_static):
            self.charge(step)
            seq = self.sequences.queue.head()
            if seq is None or seq.num_in_flight or not self._admit(seq, step, num_ran):
                return

    def _may_admit(self) -> bool:
        """Whether a sequence waits and there is a slot for it."""
        if not len(self.sequences.queue) or not self.sequences.has_free_slot:
            return False
        return not (self.config.static_batching and self.sequences.num_running)

    def _admit(self, seq: Sequence, step: PlanDraft, num_ran: int) -> bool:
        """Start the head of the queue. False: it does not fit yet. No sequence behind it is tried then, or the head could starve.

        num_ran: leading running sequences that were not started by this plan
        """
        while True:
            hits = seq.num_planned if any(seq.blocks) else self._hits(seq)
            count = self._share(seq, len(seq.tokens) - hits, step)
            if count == 0 and not self.config.static_batching:
                return False
            if self._fits(self.kv.num_left(seq, hits, hits + count, self._reserved_blocks(step)), num_ran):
                break
            if self.sequences.num_running or self.kv.has_pending_free or not self.sequences.drop_waiting_forks():
                return False
        if not any(seq.blocks):
            self._take_hits(seq, hits)
        self._start(seq, step.builder, step.now)
        if count:
            grown = self.kv.grow(seq, seq.num_planned + count, step.builder)
            assert grown, "num_left counted these blocks"
            self._grant(seq, count, step)
        return True

    def _reserved_blocks(self, step: PlanDraft) -> int:
        """Blocks that the chunks of long prompts, which are planned later, will need."""
        return self.kv.blocks_for(step.budget + step.num_reserved_for_long) if step.num_reserved_for_long else 0

    def _fits(self, num_left: float, num_ran: int) -> bool:
        """Whether the blocks left after an admission suffice: one for each of the first `num_ran` running sequences that may still grow.
        With fewer, admitting would only lead to preempting."""
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
        return 0 if seq.needs_prompt_logprobs else self.kv.num_hit_tokens(seq)
