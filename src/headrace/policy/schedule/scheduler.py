"""Decides which sequences compute which positions into which blocks in the next step, and commits or rolls back what a step computed.

    plan(now, costs)    -> Plan | None     decides; nothing is computed
    end_step(plan, result, seconds, gap_s) learns from how long a step took
    commit(plan, result, now) -> updates   appends tokens, finishes, frees
    rollback(plan)                         the step raised: nothing of it happened

Up to `depth` plans may be uncommitted, and a sequence is in several of them. Where stages compute them (`is_pipeline`), only chunks of its
prompt are: a sequence whose next token is in flight is in no later plan.

No torch, no clock, no lock: the loop owns the one thread that calls this.
"""

from __future__ import annotations

from array import array
from operator import add

from headrace.core.load import ClassLoad, ClassLoads
from headrace.core.plan import UNKNOWN_COSTS, Plan, Result, StepCosts
from headrace.core.update import SequenceUpdate
from headrace.policy.config import SchedulerConfig
from headrace.policy.kvcache.host_tier import HostTier
from headrace.policy.kvcache.manager import KvManager
from headrace.policy.schedule.drafting import Drafting
from headrace.policy.schedule.planner import Planner
from headrace.policy.schedule.sequence_table import SequenceTable
from headrace.policy.schedule.updates import NOTHING, RowOutput, are_plain, outputs, take_not_emitted
from headrace.policy.sequence import DONE, RUNNING, Sequence
from headrace.policy.step_builder import NO_ROWS, StepBuilder, StepRow, StepRows

MOVE_POLL_S = 0.005
"""While nothing else is to be computed, an empty plan asks for moves at most this often."""


class Scheduler:
    """Decides the steps of one engine: plans, commits and rolls back."""

    def __init__(self, config: SchedulerConfig, kv: KvManager, tier: HostTier | None = None) -> None:
        self.config = config
        self.kv = kv
        self.tier = tier
        self.sequences = SequenceTable(config, kv, tier)
        self._rows: dict[int, StepRows] = {}
        self._drafting = Drafting(config, kv, self.sequences) if config.num_speculative_tokens else None
        self._planner = Planner(config, kv, self.sequences, self._drafting)
        self._decode_columns = NO_ROWS
        self._unsent: StepBuilder | None = None
        self._next_step = 1
        self._next_poll = 0.0
        self._failures: list[Exception] = []

    def batch_statically(self) -> None:
        self._planner.is_static = True

    # what it knows beside its sequences

    @property
    def class_loads(self) -> ClassLoads:
        waiting = self.sequences.waiting
        queued = map(add, waiting.num_tokens, self._planner.prompt_tokens_left)
        return tuple(map(ClassLoad, self.sequences.slots.num_of_class, waiting.num_sequences, queued))

    @property
    def max_running(self) -> int:
        return self._planner.start_rules.max_running

    @property
    def step_prompt_tokens(self) -> int:
        return self._planner.step_prompt_tokens

    def next_deadline(self) -> float | None:
        deadline = self.sequences.next_deadline()
        if not self._waits_for_moves:
            return deadline
        return self._next_poll if deadline is None else min(deadline, self._next_poll)

    # planning

    def plan(self, now: float, costs: StepCosts = UNKNOWN_COSTS) -> Plan | None:
        """None when nothing can be computed now."""
        if (unsent := self.unsent_plan()) is not None:
            return unsent
        if self._rows and self._drafting is not None and self._drafting.is_on:
            self.sequences.counters.steps_not_overlapped += any(map(len, self._rows.values()))
            return None  # drafts follow what the step in flight gives
        self.kv.begin_plan(now)
        self.sequences.expire(now)
        step = StepBuilder(self._next_step, self.config.max_num_batched_tokens, now, costs)
        try:
            if self.tier is not None:
                self.sequences.end_host_waits(self.tier.plan(step, now))
            self._planner.fill(step)
            if not (len(step.rows) or step.has_changes or self.sequences.slots.has_ended or self._polls_moves(now)):
                return None
            return self._freeze(step)
        except Exception:
            self._unplan(step)
            raise

    @property
    def _waits_for_moves(self) -> bool:
        return not self._rows and len(self.kv.leases) > 0 and self.kv.leases.has_moves

    def _polls_moves(self, now: float) -> bool:
        if not self._waits_for_moves or now < self._next_poll:
            return False
        self._next_poll = now + MOVE_POLL_S
        return True

    def _unplan(self, step: StepBuilder) -> None:
        step.ended.extend(self.sequences.slots.take_ended())
        step.rows.close(self._decode_columns, self.sequences.slots.generation)
        self._undo(step.rows)
        self._unsent = step

    def _freeze(self, step: StepBuilder) -> Plan:
        step.ended.extend(self.sequences.slots.take_ended())
        return self._build_plan(step)

    def _build_plan(self, step: StepBuilder) -> Plan:
        step.rows.close(self._decode_columns, self.sequences.slots.generation)
        self._decode_columns = step.rows.decode_columns
        plan = step.build()
        self._rows[plan.step_id] = step.rows
        self.kv.note_planned(plan.step_id)
        self._next_step += 1
        return plan

    # results

    def end_step(self, plan: Plan, result: Result | None, seconds: float, gap_s: float) -> None:
        """Called before the commit of a plan with rows. result: None for a step that raised; seconds: that it took; gap_s: for which the
        runner had waited for it
        """
        if self._drafting is not None and result is not None:
            self._drafting.end_step(plan, result, seconds, gap_s)

    def commit(self, plan: Plan, result: Result, now: float) -> list[SequenceUpdate]:
        """Includes updates of sequences that ended otherwise since the last commit."""
        rows = self._rows.pop(plan.step_id)
        num_decodes = rows.num_decodes if are_plain(rows, result) else 0
        if num_decodes:
            self._commit_decodes(rows, result.token_ids[:num_decodes], now)
        self._commit_rows(rows, result, num_decodes, now)
        if self._drafting is not None:
            self._drafting.take(rows, result)
        self.kv.release_pending(plan.step_id)
        self.end_moves(result.moves_done)
        return self.sequences.take_updates()

    def _commit_decodes(self, rows: StepRows, token_ids: array[int], now: float) -> None:
        needs_block_commit: list[int] = []
        needs_full_commit: list[int] = []
        for i, seq, start, token in zip(range(rows.num_decodes), rows.decode_columns.seqs, rows.starts, token_ids, strict=False):
            computed = start + 1
            if computed >= seq.bulk_commit_limit or token in seq.end_ids:
                needs_block_commit.append(i)
                if not _goes_on(seq, computed, token):
                    needs_full_commit.append(i)
                    continue
            seq.num_computed = computed
            seq.tokens.append(token)
        self.sequences.emit_tokens(rows.decode_columns, token_ids.tolist(), needs_full_commit)
        for i in needs_block_commit:  # in the rows' order, so that blocks are registered in it
            if i in needs_full_commit:
                self._commit_guarded(rows.row(i), RowOutput(token_ids[i : i + 1]), None, now)
            else:
                self._commit_blocks(rows.seqs[i], now)

    def _commit_blocks(self, seq: Sequence, now: float) -> None:
        try:
            seq.bulk_commit_limit = min(self.kv.commit(seq), seq.limit - 1)
        except Exception as failure:  # as in `_commit_guarded`
            self._fail_commit(seq, failure, now)

    def _commit_rows(self, rows: StepRows, result: Result, first: int, now: float) -> None:
        if first == len(rows) == len(result.token_counts):
            return
        errors = dict(result.errors)
        for i, (row, output) in enumerate(zip(rows.rows(first), outputs(result, first), strict=True), first):
            self._commit_guarded(row, output, errors.get(i), now)

    def _commit_guarded(self, row: StepRow, output: RowOutput, error: str | None, now: float) -> None:
        if row.seq.state is DONE:
            return
        row.seq.ungrant(row.samples)
        try:
            self._commit_row(row, output, error, now)
        except Exception as failure:  # a failure in one sequence's bookkeeping must not end its neighbours
            self._fail_commit(row.seq, failure, now)

    def _fail_commit(self, seq: Sequence, failure: Exception, now: float) -> None:
        self._failures.append(failure)
        self.sequences.fail(seq, "internal error while a step was committed", now)

    def take_failures(self) -> list[Exception]:
        failures, self._failures = self._failures, []
        return failures

    def _commit_row(self, row: StepRow, output: RowOutput, error: str | None, now: float) -> None:
        seq = row.seq
        if error is not None:
            self.sequences.fail(seq, error, now)
            return
        if output.token_ids and row.first_sampled != len(seq.tokens):
            output = output._replace(token_ids=NOTHING.token_ids, logprobs=())  # an earlier row gave no token
        if output.prompt_logprobs:
            output = output._replace(prompt_logprobs=take_not_emitted(row, output.prompt_logprobs))
        appended = kept, reason, _ = seq.append(output.token_ids)
        if row.samples > 1 and kept and self._drafting is not None:
            self._drafting.verify(row, kept)
        is_current = row.is_current
        if is_current:
            seq.commit(row.num_computed(kept))
            if seq.num_computed >= seq.num_prompt > row.start:
                # Before blocks that the window has passed are freed: a fork recomputes the last prompt token, which sees one token more.
                self.sequences.fork_siblings(seq)
            next_block_commit = self.kv.commit(seq)
        if kept or output.prompt_logprobs:
            self.sequences.emit_output(seq, output, appended, now)
        if is_current and reason is None:
            if seq.first_token_emitted:
                seq.bulk_commit_limit = min(next_block_commit, seq.limit - 1)
            seq.waits_for_commit = False
            if kept < row.samples:
                self._roll_back(seq, row)

    def _roll_back(self, seq: Sequence, row: StepRow) -> None:
        """The row gave fewer tokens than it might have."""
        is_last = seq.num_planned == row.start + row.count
        seq.roll_back(seq.num_computed)
        if not is_last:
            self.sequences.slots.discard_rows(seq)

    def end_moves(self, move_ids: array[int]) -> None:
        """Raises LeaseError: see `Leases`."""
        if not move_ids:
            return
        finished = self.kv.leases.moves_done(move_ids)
        if self.tier is not None:
            self.sequences.end_host_waits(self.tier.moves_done(finished))

    def rollback(self, plan: Plan) -> list[Sequence]:
        """Sequences keep their blocks, since KV writes are idempotent. Returns the rows' live sequences."""
        rows = self._rows.pop(plan.step_id)
        self._undo(rows)
        self.kv.release_pending(plan.step_id)
        return [row.seq for row in rows.rows() if row.is_current]

    def _undo(self, rows: StepRows) -> None:
        for row in reversed(rows.rows()):
            row.seq.ungrant(row.samples)
            if row.is_current:
                row.seq.roll_back(row.start)

    def replan(self, sequences: list[Sequence], now: float) -> tuple[Plan | None, list[Sequence]]:
        """How a failed step is repeated in halves. Also returns the sequences that the step's budget did not reach."""
        step = StepBuilder(self._next_step, self.config.max_num_batched_tokens, now)
        left = self._planner.fill_within_held_blocks(sequences, step)
        return (self._freeze(step) if len(step.rows) else None), left

    def delta_plan(self, plan: Plan) -> Plan:
        """The state changes of a plan that raised: applying them again is harmless, missing them is not."""
        step = StepBuilder.repeating(plan, self._next_step, self.kv.leases.is_in_flight)
        self._rows[step.step_id] = step.rows
        self._next_step += 1
        return step.build()

    def unsent_plan(self) -> Plan | None:
        """The state changes left by a plan that could not be made, without rows.

        Slots given back since are announced by the plan after it: a runner applies `ended` before `started`, so the end of a sequence
        that this plan starts would be lost in it.
        """
        unsent, self._unsent = self._unsent, None
        if unsent is None or not unsent.has_changes:
            return None
        unsent.step_id, unsent.rows = self._next_step, StepRows()
        return self._build_plan(unsent)

    # invariants

    def check(self) -> None:
        self.sequences.check()
        if self.tier is not None:
            self.tier.check()
        in_flight = [row for rows in self._rows.values() for row in rows.rows()]
        for seq in self.sequences.alive():
            self._check_sequence(seq, [row for row in in_flight if row.seq is seq])

    def _check_sequence(self, seq: Sequence, in_flight: list[StepRow]) -> None:
        assert seq.num_in_flight == sum(row.samples for row in in_flight), "ids in flight and planned rows differ"
        assert seq.num_expected <= seq.limit or seq.state is DONE, "more is expected of it than its limit"
        assert seq.state is not RUNNING or bool(seq.adapter_slot) == (seq.request.adapter is not None), "it runs with other weights"
        current = sum(row.count for row in in_flight if row.plan_epoch == seq.plan_epoch)
        assert seq.state is not RUNNING or seq.num_planned == seq.num_computed + current, "planned and computed differ"
        assert not seq.drafts or (self._drafting and seq.state is RUNNING and seq.follows_all), "its drafts follow something else"
        assert not self.config.is_pipeline or not any(row.samples for row in in_flight[:-1]), "planned behind its own token in flight"
        assert len(in_flight) < 2 or all(row.samples < 2 for row in in_flight if row.is_current), "planned while its drafts are verified"
        if seq.num_planned < seq.bulk_decode_limit:
            assert seq.state is RUNNING, "planned in bulk, but does not run"
            assert seq.num_uncomputed == 1, "planned in bulk, but does not decode"
            assert seq.num_planned >= seq.num_prompt, "planned in bulk, but computes its prompt"
            assert seq.bulk_decode_limit <= min(seq.allocated_until, seq.limit - 1), "planned in bulk, beyond its blocks or its length"
        if seq.bulk_commit_limit:
            assert seq.first_token_emitted, "committed in bulk, but its first token is not emitted"
            assert all(row.is_current for row in in_flight), "committed in bulk, but a row was planned before a preemption"
            assert seq.bulk_commit_limit <= min(self.kv.bulk_commit_limit(seq), seq.limit - 1), "committed in bulk, but something falls due"


def _goes_on(seq: Sequence, computed: int, token: int) -> bool:
    """False for a sequence that was preempted or ended since its row was planned: `release` clears `bulk_commit_limit`."""
    return seq.bulk_commit_limit > 0 and computed < seq.limit - 1 and token not in seq.end_ids
