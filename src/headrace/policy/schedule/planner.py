"""Decides the rows of a step, for `Scheduler.plan`.

Prefill and decode both compute "tokens expected minus tokens planned", so chunked prefill, prefix hits and resumed sequences need no
loop of their own. Decoding rows come first: one token each, or 1 + k with k drafts.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

from headrace.core.ids import SlotId
from headrace.core.plan import Started
from headrace.core.request import PriorityClass
from headrace.policy.config import SchedulerConfig
from headrace.policy.kvcache.manager import KvManager
from headrace.policy.schedule.drafting import Drafting
from headrace.policy.schedule.sequence_table import SequenceTable
from headrace.policy.schedule.start_rules import StartRules
from headrace.policy.schedule.step_budget import ChunkPrice, prefill_part, tightest_tpot_s, tokens_within
from headrace.policy.sequence import RUNNING, Sequence
from headrace.policy.step_builder import StepBuilder

CHARGE_STEPS = 16
"""Steps after which the queue policy counts the tokens of all running sequences again."""


class Planner:
    """Fills a step with rows: running sequences first, then waiting ones. drafting: None: the runner drafts nothing"""

    def __init__(self, config: SchedulerConfig, kv: KvManager, sequences: SequenceTable, drafting: Drafting | None = None) -> None:
        self.config = config
        self.kv = kv
        self.sequences = sequences
        self.start_rules = StartRules(config, kv, sequences)
        self.is_static = False
        self._drafting = drafting
        self._price = ChunkPrice(config.costly_context if config.enable_chunked_prefill else 0)
        self._charge_at = 0
        self.prompt_tokens_left = [0] * len(PriorityClass)
        self.step_prompt_tokens = config.max_num_batched_tokens

    def fill(self, step: StepBuilder) -> None:
        step.first = self.start_rules.preempt_for_head(step.now, step.costs)
        prefilling, drafted = self._plan_decodes(step)
        if self._drafting is not None:
            self._plan_drafts(self._drafting, drafted, prefilling, step)
        self._plan_prefills(prefilling, step)
        self.prompt_tokens_left = _tokens_left({*prefilling, *step.rows.seqs[step.rows.num_decodes :]})
        self.charge(step)
        if self._drafting is not None:
            self._drafting.ask(step)
        if not (step.rows.seqs or len(self.sequences.slots)):
            self._forget_bounds()

    def _forget_bounds(self) -> None:
        self.step_prompt_tokens, self.start_rules.max_running = self.config.max_num_batched_tokens, self.config.max_num_seqs

    def fill_within_held_blocks(self, sequences: list[Sequence], step: StepBuilder) -> list[Sequence]:
        """Returns the sequences that the budget did not reach."""
        left: list[Sequence] = []
        for seq in sequences:
            if seq.state is RUNNING and not (seq.num_uncomputed == 1 and seq.is_complete):
                num_writable = self.kv.num_allocated(seq) - seq.num_planned
                if seq.num_uncomputed > 0 and num_writable > 0:
                    count = min(self._chunk_size(seq, seq.num_uncomputed, step), num_writable)
                    if count:
                        self._add_row(seq, count, step)
                    else:
                        left.append(seq)
        return left

    def _plan_decodes(self, step: StepBuilder) -> tuple[list[Sequence], list[Sequence]]:
        """Returns the running sequences with more than one token to compute, and those with drafted tokens to verify.

        This is the scheduler's hottest loop: for a sequence below its `bulk_decode_limit` there is nothing to decide.
        """
        prefilling: list[Sequence] = []
        drafted: list[Sequence] = []
        seqs, starts = step.rows.seqs, step.rows.starts
        for seq in self._computable() if self.config.is_pipeline else self.sequences.slots.running:
            start = seq.num_planned
            if start < seq.bulk_decode_limit or self._extend_bulk_decode(seq, step):
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

    def _computable(self) -> list[Sequence]:
        """The running sequences that this step of a pipeline may compute: those that prefill, and of those that decode an equal part.
        None has a token in flight. Where one is left out, this step has its full part, so that it is left out by `depth` steps at most.

        While drafts are verified there is one step at a time, and it has all.
        """
        running = self.sequences.slots.running
        if self._drafting is not None and self._drafting.is_on:
            return running
        ready = [seq for seq in running if not seq.num_in_flight]
        prefilling = [seq for seq in ready if seq.num_uncomputed > 1]
        decoding = [seq for seq in ready if seq.num_uncomputed <= 1]
        most = math.ceil((len(running) - len(prefilling)) / self.config.depth)
        return decoding[:most] + prefilling

    def _plan_drafts(self, drafting: Drafting, drafted: list[Sequence], prefilling: list[Sequence], step: StepBuilder) -> None:
        num_prompt_tokens = sum([seq.num_uncomputed for seq in prefilling])
        if self._may_start():
            num_prompt_tokens += sum(self.sequences.waiting.num_tokens)
        for seq, count in zip(drafted, drafting.counts(drafted, num_prompt_tokens, step), strict=True):
            if seq.state is not RUNNING:
                continue  # preempted earlier in this plan
            if count and self.kv.grow(seq, seq.num_planned + 1 + count, step):
                step.rows.drafts.extend(seq.drafts[:count])
                self._add_row(seq, 1 + count, step, samples=1 + count)
            else:
                drafting.leave(seq)
                self._plan_decode(seq, step)

    def _plan_prefills(self, prefilling: list[Sequence], step: StepBuilder) -> None:
        """Four passes: running prefills ahead of the first long prompt in the queue policy's order; the other running prefills that are
        not long; waiting sequences; the long prompts.
        """
        if not prefilling and not self._may_start():
            return
        self._charge_decodes(step)
        shares = self.sequences.queue.shares
        budget = step.budget
        step.num_unused = budget - min(shares.for_prefill(budget), self._within_goals(step, budget))
        self.step_prompt_tokens = max(1, budget - step.num_unused)
        if len(prefilling) > 1:
            self.charge(step)
            prefilling = self.sequences.queue.prefill_order(prefilling, step.now, step.costs)
        prefilling = [seq for seq in prefilling if seq.state is RUNNING]  # a decoding row may have preempted one
        self._start_ahead(prefilling, step)
        budget = step.budget
        long = [(seq, seq.plan_epoch) for seq in prefilling if self._is_long(seq, budget)]
        num_ahead = prefilling.index(long[0][0]) if long else len(prefilling)
        for seq in prefilling[:num_ahead]:
            self._plan_row(seq, step)
        if long:
            step.num_withheld_for_long = shares.withheld_for_long(step.budget)
        for seq in prefilling[num_ahead:]:
            if (seq, seq.plan_epoch) not in long:
                self._plan_row(seq, step)
        self._plan_waiting(step)
        step.num_withheld_for_long = 0
        for seq, plan_epoch in long:
            if seq.plan_epoch == plan_epoch:  # else it was preempted, and may have started again
                self._plan_row(seq, step)

    def _within_goals(self, step: StepBuilder, budget: int) -> int:
        """Tokens that prompts may take so that the step, which has no others yet, keeps the decoding rows' goals."""
        if not self.sequences.slots.num_goals or not self.config.enable_chunked_prefill or budget <= 0:
            return budget
        kept_waiting = self.sequences.slots.running if self.config.is_pipeline else step.rows.seqs
        most = tokens_within(tightest_tpot_s(kept_waiting) / self.config.steps_per_token, step.costs)
        return int(min(budget, max(most - (step.max_tokens - budget), prefill_part(most, step.max_tokens))))

    def _start_ahead(self, prefilling: list[Sequence], step: StepBuilder) -> None:
        queue = self.sequences.queue
        if not (queue.traits.has_tenants and prefilling and self._may_start()):
            return
        first = prefilling[0]
        while self.sequences.slots.has_free and step.budget > 0:
            head = step.first or self.start_rules.next_to_start(step.now, step.costs)
            if head is None or head.num_in_flight or not queue.precedes(head, first):
                return
            step.first = None
            if not self._try_start(head, step, len(self.sequences.slots)):
                return
            self.charge(step)

    def _charge_decodes(self, step: StepBuilder) -> None:
        step_id = step.step_id
        if self.sequences.queue.traits.has_tenants and step_id >= self._charge_at:
            self._charge_at = step_id + CHARGE_STEPS
            self.sequences.queue.charge(self.sequences.slots.running)

    def _is_long(self, seq: Sequence, budget: int) -> bool:
        if seq.needs_prompt_logprobs or not self.config.enable_chunked_prefill:
            return False
        cost = seq.num_uncomputed + self._price.surcharge(seq.num_planned, seq.num_uncomputed)
        return self.sequences.queue.shares.is_long(cost, budget)

    def _extend_bulk_decode(self, seq: Sequence, step: StepBuilder) -> bool:
        last = seq.limit - 1
        if seq.bulk_decode_limit in (0, last) or step.budget <= 0 or not self.kv.grow(seq, seq.num_planned + 1, step):
            return False
        seq.bulk_decode_limit = min(seq.allocated_until, last)
        seq.unstall(step.now)
        return True

    def _plan_decode(self, seq: Sequence, step: StepBuilder) -> None:
        if seq.num_planned < seq.allocated_until:
            self._add_row(seq, 1, step)  # its last block is not full
        else:
            self._plan_row(seq, step)

    def _plan_row(self, seq: Sequence, step: StepBuilder) -> None:
        if seq.state is not RUNNING:
            return  # preempted earlier in this plan
        count = self._chunk_size(seq, seq.num_uncomputed, step)
        if count == 0:
            seq.stall(step.now)
            return
        while not self.kv.grow(seq, seq.num_planned + count, step):
            if self.kv.has_pending_free:
                seq.stall(step.now)
                return  # the commit of the step in flight frees blocks
            if self.sequences.drop_waiting_forks():
                continue
            self.sequences.queue.charge(self.sequences.slots.running)
            planned = {other.seq_id for other in step.rows.seqs}
            victim = self.start_rules.victim([other for other in self.sequences.slots.running if other.seq_id not in planned])
            if victim is seq and seq.has_rows_in_flight:
                seq.stall(step.now)
                return  # its step in flight may free blocks before its window; preempting would discard that step, again and again
            self.sequences.preempt(victim, step.now)
            if victim is seq:
                return
        self._add_row(seq, count, step)

    def _chunk_size(self, seq: Sequence, num_uncomputed: int, step: StepBuilder) -> int:
        """A chunk far into a prompt is shortened when other rows would wait for the chunk's attention over its context. Without chunked
        prefill, a prompt longer than the whole budget is its step's only prefill.
        """
        if self.config.enable_chunked_prefill or num_uncomputed == 1:
            is_priced = num_uncomputed > 1 and (len(step.rows) or step.num_withheld_for_long)
            most = self._price.most(seq.num_expected - num_uncomputed, step.budget) if is_priced else max(step.budget, 0)
            if num_uncomputed > 1 and seq.needs_prompt_logprobs:
                most = min(most, max(step.logprob_budget, 1))
            return min(num_uncomputed, most)
        if num_uncomputed <= step.budget:
            return num_uncomputed
        is_oversized = num_uncomputed > self.config.max_num_batched_tokens
        return num_uncomputed if is_oversized and step.num_prefills == 0 else 0

    def _add_row(self, seq: Sequence, count: int, step: StepBuilder, samples: int | None = None) -> None:
        """samples: None without drafts; the row then samples one token if it ends at the last expected one"""
        start = seq.num_planned
        if samples is None:
            samples = int(start + count == seq.num_expected)
        step.rows.add(seq, start, count, samples)
        step.num_spent_beyond_rows += count - 1 + (self._price.surcharge(start, count) if samples < 2 else 0)
        step.num_prefills += count > max(samples, 1)
        if seq.needs_prompt_logprobs and start < seq.num_prompt:
            step.logprob_budget -= count
        seq.grant(count, samples)
        seq.unstall(step.now)

    def charge(self, step: StepBuilder) -> None:
        """Decoding rows are counted every CHARGE_STEPS steps: 64 of them take 30 us."""
        if not self.sequences.queue.traits.has_tenants:
            return
        first = max(step.num_charged_rows, step.rows.num_decodes)
        if first < len(step.rows):
            self.sequences.queue.charge(step.rows.seqs[first:])
            step.num_charged_rows = len(step.rows)

    def _plan_waiting(self, step: StepBuilder) -> None:
        if not self._may_start():
            return
        num_running_before = len(self.sequences.slots)
        while self.sequences.slots.has_free and (step.budget > 0 or self.is_static):
            self.charge(step)
            seq, step.first = step.first or self.start_rules.next_to_start(step.now, step.costs), None
            # A preempted sequence whose sampled token is not committed yet cannot start: its ids are not all known.
            if seq is None or seq.num_in_flight or not self._try_start(seq, step, num_running_before):
                return

    def _may_start(self) -> bool:
        if not len(self.sequences.queue) or not self.sequences.slots.has_free:
            return False
        return not (self.is_static and len(self.sequences.slots))

    def _try_start(self, seq: Sequence, step: StepBuilder, num_running_before: int) -> bool:
        """No sequence behind the head is tried when it does not fit, or the head could starve."""
        while True:
            # Of the sequences that wait, only forked siblings (n > 1) hold blocks: those of their shared prompt.
            start = seq.num_planned if any(seq.blocks) else self._num_cached_tokens(seq)
            count = self._chunk_size(seq, len(seq.tokens) - start, step)
            if count == 0 and not self.is_static:
                return False
            num_left = self.kv.num_left(seq, start, start + count, self._blocks_for_long_chunks(step))
            num_kept = self.start_rules.num_blocks_kept(seq, step.now)
            if self._leaves_blocks_to_grow(num_left - num_kept, num_running_before):
                break
            if len(self.sequences.slots) or self.kv.has_pending_free or not self.sequences.drop_waiting_forks():
                self.start_rules.note_short(seq, max(1, math.ceil(num_kept - num_left)))
                return False
        if not any(seq.blocks):
            self._take_cached_prefix(seq, start)
        self._start(seq, step)
        if count:
            grown = self.kv.grow(seq, seq.num_planned + count, step)
            assert grown, "num_left counted these blocks"
            self._add_row(seq, count, step)
        return True

    def _blocks_for_long_chunks(self, step: StepBuilder) -> int:
        return self.kv.blocks_for(step.budget + step.num_withheld_for_long) if step.num_withheld_for_long else 0

    def _leaves_blocks_to_grow(self, num_left: float, num_running_before: int) -> bool:
        if num_left < 0:
            return False
        if num_left >= num_running_before:
            return True
        return num_left >= self.kv.num_that_may_grow(self.sequences.slots.running[:num_running_before])

    def _start(self, seq: Sequence, step: StepBuilder) -> None:
        self.sequences.start(seq, step.now)
        request = seq.request
        started = Started(SlotId(seq.slot), array("i", seq.tokens), seq.num_prompt, request.params, seq.index, request.grammar)
        step.started.append(started)
        self.kv.write_tables(seq, step)

    def _take_cached_prefix(self, seq: Sequence, num_cached_tokens: int) -> None:
        if seq.plan_epoch == 0:
            seq.miss_reason = self.kv.miss_reason(seq, num_cached_tokens)
        if num_cached_tokens:
            self.kv.take_hits(seq, num_cached_tokens)
        if seq.plan_epoch == 0 and self.kv.caching and seq.uses_prefix_cache:
            seq.num_cached = min(num_cached_tokens, seq.num_prompt)
            self.sequences.counters.prefix_cache_query_tokens += seq.num_prompt
            self.sequences.counters.prefix_cache_hit_tokens += seq.num_cached

    def _num_cached_tokens(self, seq: Sequence) -> int:
        return 0 if seq.needs_prompt_logprobs else self.kv.num_hit_tokens(seq)


def _tokens_left(sequences: Iterable[Sequence]) -> list[int]:
    by_class = [0] * len(PriorityClass)
    for seq in sequences:
        if seq.state is RUNNING and (left := seq.num_uncomputed) > 1:
            by_class[seq.request.priority] += left
    return by_class
