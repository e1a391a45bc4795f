"""Brings `policy.speculation` into plans and commits: which drafts stand in a step, which are asked for, and what became of them."""

from __future__ import annotations

from array import array
from operator import eq

from headrace.core.plan import Plan, Result
from headrace.policy.config import SchedulerConfig
from headrace.policy.kvcache.manager import KvManager
from headrace.policy.schedule.sequence_table import SequenceTable
from headrace.policy.schedule.step_budget import prefill_part, tightest_tpot_s, tokens_within
from headrace.policy.sequence import Sequence
from headrace.policy.speculation import Offer, Speculation, StepShape, StepTime
from headrace.policy.step_builder import StepBuilder, StepRow, StepRows

LEAST_ROOM_DIVISOR = 4
"""While prompts could fill the step, drafts take at most 1/N of what the rows leave."""


class Drafting:
    def __init__(self, config: SchedulerConfig, kv: KvManager, sequences: SequenceTable) -> None:
        self.speculation = Speculation(config.num_speculative_tokens, is_free=config.has_free_drafts, is_overlapped=config.depth > 1)
        self._kv = kv
        self._sequences = sequences

    @property
    def is_on(self) -> bool:
        return self.speculation.is_on

    # planning

    def counts(self, drafted: list[Sequence], num_prompt_tokens: int, step: StepBuilder) -> list[int]:
        """How many drafts of each sequence the step computes, which has its other decoding rows.

        num_prompt_tokens  that could be computed
        """
        decoding = [*step.rows.seqs, *drafted]
        if not decoding:
            return []
        room = max(0, step.budget - len(drafted))
        num_prompt_tokens = min(num_prompt_tokens, room)
        most = max(room - num_prompt_tokens, room // LEAST_ROOM_DIVISOR)
        if self._sequences.slots.num_goals:
            within = tokens_within(tightest_tpot_s(decoding), step.costs)
            within -= len(decoding) + (prefill_part(within, step.max_tokens) if num_prompt_tokens else 0)
            most = int(max(0, min(most, within)))
        shape = StepShape(len(decoding), num_prompt_tokens, most, step.costs.token_s)
        if self.speculation.is_due:
            self.speculation.consider([seq.draft_record for seq in decoding], shape)
        offers = [Offer(self.speculation.chance(seq.draft_record), len(seq.drafts)) for seq in drafted]
        return self.speculation.choose(offers, shape)

    def leave(self, seq: Sequence) -> None:
        self.speculation.leave(seq.draft_record, seq.drafts, seq.tokens)

    def ask(self, step: StepBuilder) -> None:
        """Ask for drafts to follow the step's rows, which are all there. No sequence is preempted for them, and while speculation is off
        none gets a block for them."""
        rows = step.rows
        if not rows.seqs or not (most := self.speculation.most_asked()):
            return
        rows.fill()
        columns = zip(rows.seqs, rows.starts, rows.samples, strict=True)
        rows.num_drafts = array("i", [self._num_asked(seq, start, most, step) if samples else 0 for seq, start, samples in columns])

    def _num_asked(self, seq: Sequence, start: int, most: int, step: StepBuilder) -> int:
        if start < seq.num_prompt and seq.needs_prompt_logprobs:
            return 0
        count = min(self.speculation.asked_for(seq.draft_record, most), seq.limit - 1 - seq.num_expected)
        if count <= 0:
            return 0
        end, has_room = seq.num_planned + 1 + count, self._has_room(count)
        if end <= seq.allocated_until or (has_room and self._kv.grow(seq, end, step)):
            return count
        return max(0, seq.allocated_until - seq.num_planned - 1)

    def _has_room(self, count: int) -> bool:
        """Whether each running sequence can have a block in the next plan too: a row may begin one beside its drafts', and copy one."""
        least = len(self._sequences.slots) + self._kv.blocks_for(count) + 2
        return self.is_on and all(pool.num_available >= least for pool in self._kv.pools)

    # results

    def end_step(self, plan: Plan, result: Result, seconds: float, gap_s: float) -> None:
        num_rows, num_drafts = sum(map(eq, plan.counts, plan.samples)), len(plan.drafts)
        shape = StepShape(num_rows, plan.num_tokens - num_rows - num_drafts, 0, plan.costs.token_s)
        made = result.draft_counts or bytes(plan.num_rows)
        catches_up = any(map(_has_none, plan.num_drafts, result.token_counts, made))
        time = StepTime(seconds, gap_s, result.drafting_s, max(made, default=0), catches_up)
        self.speculation.end_step(shape, num_drafts, time)

    def verify(self, row: StepRow, num_tokens: int) -> None:
        """num_tokens: that the row gave and the sequence kept"""
        num_drafts, num_accepted = row.samples - 1, num_tokens - 1
        self.speculation.observe(row.seq.draft_record, num_accepted, num_drafts)
        self.speculation.note_accepted(num_accepted)
        self._sequences.counters.note_verified(num_drafts, num_accepted)

    def take(self, rows: StepRows, result: Result) -> None:
        """Called after the commit. Drafts that do not follow all that is planned for their sequence are compared, and not computed."""
        end = 0
        for i, count in enumerate(result.draft_counts):
            if not count:
                continue
            begin, end = end, end + count
            row, seq, drafts = rows.row(i), rows.seqs[i], result.drafts[begin:end]
            if not row.is_current or row.first_sampled + result.token_counts[i] != len(seq.tokens):
                continue
            if self.is_on and seq.follows_all:
                seq.draft(drafts)
            else:
                self.speculation.leave(seq.draft_record, drafts, seq.tokens)


def _has_none(num_asked: int, num_given: int, num_made: int) -> bool:
    return num_asked > 0 and num_given > 0 and not num_made
