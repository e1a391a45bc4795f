"""The scheduler: who gets which positions and which blocks in the next step, and what a finished step means.

    plan(now)           -> Plan | None     decides; nothing is computed
    commit(plan, result) -> updates        appends tokens, finishes, frees
    rollback(plan)                         the step raised: nothing of it happened

Which rows a step has is the planner's (`planner.py`); what becomes of them is said here.

`depth` plans may be uncommitted. A sequence's unknown (pending) ids live in the runner, so the next plan can be made before the last
result is read; whatever ends a sequence is only seen at commit, and a row planned meanwhile is dropped there.

No torch, no clock, no lock: the loop owns the one thread that calls this.
"""

from __future__ import annotations

from array import array

from headrace.core.plan import Plan, Result, TokenLogprobs
from headrace.core.update import SequenceUpdate
from headrace.policy.config import SchedulerConfig
from headrace.policy.kvcache.manager import KvManager
from headrace.policy.schedule.plan_builder import PlanBuilder
from headrace.policy.schedule.planner import Draft, Planner
from headrace.policy.schedule.roster import Roster
from headrace.policy.schedule.sequence import SeqState, Sequence
from headrace.policy.schedule.step_rows import NOBODY, Row, StepRows
from headrace.policy.schedule.updates import Output


class Scheduler:
    """Decides steps over a `Roster` of sequences. All methods run on the loop's thread."""

    def __init__(self, config: SchedulerConfig, kv: KvManager) -> None:
        self.config = config
        self.kv = kv
        self.roster = Roster(config, kv)
        self._rows: dict[int, StepRows] = {}
        self._planner = Planner(config, kv, self.roster, self._rows)
        self._lane = NOBODY
        self._unsent: PlanBuilder | None = None
        self._next_step = 1

    # planning

    def plan(self, now: float) -> Plan | None:
        """The next step, or None when nothing can be computed now (all waiting for results, prerequisites or blocks)."""
        self.roster.expire(now)
        self.kv.planning = self._next_step
        step = Draft(self.config.max_num_batched_tokens, self._unsent or PlanBuilder())
        self._unsent = None
        try:
            self._planner.fill(step, now)
            if not (len(step.rows) or step.builder.has_changes or self.roster.has_ended_slots):
                return None
            return self._freeze(step)
        except Exception:
            self._take_back(step)
            raise

    def _take_back(self, step: Draft) -> None:
        """Planning raised: the rows were never planned; blocks and slots already handed out are announced with the next plan."""
        self._planner.charge(step)
        step.rows.close(self._lane, self.roster.generation)
        self._undo(step.rows)
        self._unsent = step.builder

    def _freeze(self, step: Draft) -> Plan:
        """Slots of those who left are announced before `started` is applied, so a slot may change hands within one plan."""
        step.builder.ended.extend(self.roster.take_ended_slots())
        step.rows.close(self._lane, self.roster.generation)
        self._lane = step.rows.lane
        plan = step.builder.build(self._next_step, step.rows)
        self._rows[plan.step_id] = step.rows
        self.kv.last_planned = plan.step_id
        self._next_step += 1
        return plan

    # results

    def commit(self, plan: Plan, result: Result) -> list[SequenceUpdate]:
        """Take a step's result in. Returns this step's updates and those of sequences that ended otherwise since the last commit."""
        rows = self._rows.pop(plan.step_id)
        num_decodes = rows.num_decodes if _are_plain(rows, result) else 0
        if num_decodes:
            self._commit_decodes(rows, result.token_ids[:num_decodes])
        self._commit_rows(rows, result, num_decodes)
        self.kv.settle(plan.step_id)
        return self.roster.take_updates()

    def _commit_decodes(self, rows: StepRows, token_ids: array[int]) -> None:
        """Take in the leading rows, one token each: together where the token is all there is to say, one by one where there is more."""
        due: list[int] = []
        others: list[int] = []
        for i, seq, start, token in zip(range(rows.num_decodes), rows.lane.seqs, rows.starts, token_ids, strict=False):
            computed = start + 1
            if computed >= seq.calm_until or token in seq.end_ids:
                due.append(i)
                if not _goes_on(seq, computed, token):
                    others.append(i)
                    continue
            seq.computed = computed
            seq.tokens.append(token)
        self.roster.tell_tokens(rows.lane, token_ids.tolist(), others)
        for i in due:  # in the rows' order, which is that of the cache's blocks
            if i in others:
                self._commit_guarded(rows.row(i), Output(token_ids[i : i + 1]), None)
            else:
                self._commit_blocks(rows.seqs[i])

    def _commit_blocks(self, seq: Sequence) -> None:
        try:
            seq.calm_until = min(self.kv.commit(seq), seq.limit - 1)
        except Exception as failure:  # as in `_commit_guarded`
            self.roster.fail(seq, f"internal error while taking in a step: {type(failure).__name__}")

    def _commit_rows(self, rows: StepRows, result: Result, first: int) -> None:
        """Take in the rows from `first` on, of any kind; before it every row has one token."""
        if first == len(rows) == len(result.token_counts):
            return
        errors, prompt_logprobs = dict(result.errors), dict(result.prompt_logprobs)
        offset = first
        for i, (row, count) in enumerate(zip(rows.rows(first), result.token_counts[first:], strict=True), first):
            end = offset + count
            output = Output(result.token_ids[offset:end], result.logprobs[offset:end], _untold(row, prompt_logprobs.get(i, ())))
            self._commit_guarded(row, output, errors.get(i))
            offset = end

    def _commit_guarded(self, row: Row, output: Output, error: str | None) -> None:
        if row.seq.state is SeqState.DONE:
            return
        row.seq.promised -= row.samples
        try:
            self._commit_row(row, output, error)
        except Exception as failure:  # one sequence's bookkeeping must not take its neighbours along
            self.roster.fail(row.seq, f"internal error while taking in a step: {type(failure).__name__}")

    def _commit_row(self, row: Row, output: Output, error: str | None) -> None:
        seq = row.seq
        if error is not None:
            self.roster.fail(seq, error)
            return
        if row.is_current:
            seq.computed = row.start + row.count
            if seq.computed >= seq.num_prompt > row.start:
                self.roster.fork_siblings(seq)  # before the window moves on: a fork recomputes the last prompt token, seeing one token more
            due = self.kv.commit(seq)
        self.roster.append_output(seq, output)
        if row.is_current and seq.told_first:
            seq.calm_until = min(due, seq.limit - 1)

    def rollback(self, plan: Plan) -> list[Sequence]:
        """The step raised: its rows were not computed. Blocks stay, KV writes are idempotent. Returns the rows' live sequences."""
        rows = self._rows.pop(plan.step_id)
        self._undo(rows)
        self.kv.settle(plan.step_id)
        return [row.seq for row in rows.rows() if row.is_current]

    def _undo(self, rows: StepRows) -> None:
        """These rows will not be computed."""
        for row in reversed(rows.rows()):
            row.seq.promised -= row.samples
            if row.is_current:
                row.seq.planned = row.start
                row.seq.run_until = 0
            if self.roster.queue.charges:
                self.roster.queue.charge([row.seq], [-row.count])

    def replan(self, sequences: list[Sequence]) -> tuple[Plan | None, list[Sequence]]:
        """A plan of just these sequences (blocks are theirs already): how a failed step is repeated in halves.

        Also returns those the step's budget did not reach: they have to be asked for again.
        """
        step = Draft(self.config.max_num_batched_tokens, PlanBuilder())
        left = self._planner.repeat(sequences, step)
        return (self._freeze(step) if len(step.rows) else None), left

    def delta_plan(self, plan: Plan) -> Plan:
        """The state changes of a plan that raised, without rows: applying them again is harmless, missing them is not."""
        self._rows[self._next_step] = StepRows()
        delta = PlanBuilder.repeating(plan).build(self._next_step, self._rows[self._next_step])
        self._next_step += 1
        return delta

    # invariants

    def check(self) -> None:
        """Raise AssertionError unless sequences, slots and blocks add up. Cheap; runs when idle and after every test."""
        self.roster.check()
        in_flight = [row for rows in self._rows.values() for row in rows.rows()]
        for seq in self.roster.alive():
            self._check_sequence(seq, [row for row in in_flight if row.seq is seq])

    def _check_sequence(self, seq: Sequence, in_flight: list[Row]) -> None:
        """Counts agree with the rows in flight, and what lets a row pass in bulk is what a look at the sequence would say."""
        assert seq.pending == sum(row.samples for row in in_flight), "pending ids and planned rows differ"
        current = sum(row.count for row in in_flight if row.incarnation == seq.incarnation)
        assert seq.state is not SeqState.RUNNING or seq.planned == seq.computed + current, "planned and computed differ"
        if seq.planned < seq.run_until:
            assert seq.state is SeqState.RUNNING, "planned in bulk, but does not run"
            assert seq.wanted == 1, "planned in bulk, but does not decode"
            assert seq.planned >= seq.num_prompt, "planned in bulk, but computes its prompt"
            assert seq.run_until <= min(seq.room, seq.limit - 1), "planned in bulk, but has no room"
        if seq.calm_until:
            assert seq.told_first, "taken in in bulk, but its first token is not told"
            assert all(row.is_current for row in in_flight), "taken in in bulk, but a row was planned before a preemption"
            assert seq.calm_until <= min(self.kv.calm_until(seq), seq.limit - 1), "taken in in bulk, but something falls due"


def _are_plain(rows: StepRows, result: Result) -> bool:
    """Whether each of the leading rows has one token, and nothing else is said of any."""
    count = rows.num_decodes
    if result.logprobs or any(row < count for row, _ in (*result.errors, *result.prompt_logprobs)):
        return False
    return result.token_counts[:count] == rows.samples[:count]


def _goes_on(seq: Sequence, computed: int, token: int) -> bool:
    """Whether a sequence that is calm goes on after this token.

    One that was preempted or ended since its row was planned is not calm: `release` ends the calm, and it returns only with the commit of
    a row planned later.
    """
    return seq.calm_until > 0 and computed < seq.limit - 1 and token not in seq.end_ids


def _untold(row: Row, entries: tuple[TokenLogprobs, ...]) -> tuple[TokenLogprobs, ...]:
    """Entries for prompt positions row.start + 1 and on, less those already delivered before a preemption or a repeated step."""
    if not entries or row.seq.index:
        return ()  # the sequences of a request share their prompt: the first one tells
    fresh = entries[max(0, row.seq.num_prompt_told - row.start) :]
    row.seq.num_prompt_told += len(fresh)
    return fresh
