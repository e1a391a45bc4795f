"""The scheduler: who gets which positions and which blocks in the next step, and what a finished step means.

    plan(now)           -> Plan | None     decides; nothing is computed
    commit(plan, result) -> updates        appends tokens, finishes, frees
    rollback(plan)                         the step raised: nothing of it happened

One token budget per step. Prefill and decode are both "tokens wanted minus tokens computed", so chunked prefill, prefix hits and resumed
sequences need no loop of their own: decoding rows take their one token first, what is left goes to prefills in the queue policy's order,
then to newly admitted sequences.

`depth` plans may be uncommitted. A sequence's unknown (pending) ids live in the runner, so the next plan can be made before the last
result is read; whatever ends a sequence is only seen at commit, and a row planned meanwhile is dropped there.

No torch, no clock, no lock: the loop owns the one thread that calls this.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from headrace.core.ids import SlotId
from headrace.core.plan import Plan, Result, Started, TokenLogprobs
from headrace.core.update import SequenceUpdate
from headrace.policy.config import SchedulerConfig
from headrace.policy.kvcache.manager import KvManager
from headrace.policy.news import Output
from headrace.policy.plan_builder import PlanBuilder
from headrace.policy.price import ChunkPrice
from headrace.policy.roster import Roster
from headrace.policy.sequence import SeqState, Sequence
from headrace.policy.step import NOBODY, Row, StepRows

MAX_SCORED_TOKENS = 64
"""Prompt positions whose log-probabilities are computed in one chunked step. Each needs a row of logits over the whole vocabulary, many
times the cost of a plain prompt token: a full budget of them would hold up everybody's next token for seconds."""


@dataclass(slots=True)
class _Step:
    """A plan while it is being decided."""

    max_tokens: int
    builder: PlanBuilder
    score_budget: int = MAX_SCORED_TOKENS
    rows: StepRows = field(default_factory=StepRows)
    num_prefills: int = 0
    num_more: int = 0
    """Tokens granted beyond one per row, at what they cost."""
    num_charged: int = 0
    """Leading rows the queue policy has been told of."""

    @property
    def budget(self) -> int:
        return self.max_tokens - len(self.rows) - self.num_more


class Scheduler:
    """Decides steps over a `Roster` of sequences. All methods run on the loop's thread."""

    def __init__(self, config: SchedulerConfig, kv: KvManager) -> None:
        self.config = config
        self.kv = kv
        self.roster = Roster(config, kv)
        self._price = ChunkPrice(config.costly_context if config.enable_chunked_prefill else 0)
        self._rows: dict[int, StepRows] = {}
        self._lane = NOBODY
        self._unsent: PlanBuilder | None = None
        self._next_step = 1

    # planning

    def plan(self, now: float) -> Plan | None:
        """The next step, or None when nothing can be computed now (all waiting for results, prerequisites or blocks)."""
        self.roster.expire(now)
        self.kv.planning = self._next_step
        step = _Step(self.config.max_num_batched_tokens, self._unsent or PlanBuilder())
        self._unsent = None
        try:
            self._plan_running(step)
            self._plan_waiting(step, now)
            self._charge(step)
            if not (len(step.rows) or step.builder.has_changes or self.roster.has_ended_slots):
                return None
            return self._freeze(step)
        except Exception:
            self._take_back(step)
            raise

    def _take_back(self, step: _Step) -> None:
        """Planning raised: the rows were never planned; blocks and slots already handed out are announced with the next plan."""
        self._charge(step)
        step.rows.close(self._lane, self.roster.generation)
        self._undo(step.rows)
        self._unsent = step.builder

    def _freeze(self, step: _Step) -> Plan:
        """Slots of those who left are announced before `started` is applied, so a slot may change hands within one plan."""
        step.builder.ended.extend(self.roster.take_ended_slots())
        step.rows.close(self._lane, self.roster.generation)
        self._lane = step.rows.lane
        plan = step.builder.build(self._next_step, step.rows)
        self._rows[plan.step_id] = step.rows
        self.kv.last_planned = plan.step_id
        self._next_step += 1
        return plan

    def _plan_running(self, step: _Step) -> None:
        """Who decodes first, one token each; then prefills in the queue policy's order.

        The loop is the hottest place of the policy floor: a sequence below `run_until` has nothing to ask.
        """
        prefilling: list[Sequence] = []
        seqs, starts = step.rows.seqs, step.rows.starts
        for seq in list(self.roster.running):
            start = seq.planned
            if start < seq.run_until or self._renew(seq, step):
                seq.planned = start + 1
                seq.promised = start + 2
                seqs.append(seq)
                starts.append(start)
            elif seq.state is SeqState.RUNNING:  # not preempted earlier in this plan
                wanted = seq.wanted
                if wanted > 1:
                    prefilling.append(seq)
                elif wanted == 1 and not seq.is_complete:
                    self._plan_decode(seq, step)
        step.rows.num_decodes = len(seqs)
        if len(prefilling) > 1:
            self._charge(step)
            prefilling = self.roster.queue.prefill_order(prefilling)
        for seq in prefilling:
            self._plan_one(seq, step)

    def _renew(self, seq: Sequence, step: _Step) -> bool:
        """Give a sequence that decodes and has filled its block the next one. False: it has to be looked at."""
        last = seq.limit - 1
        if seq.run_until in (0, last) or step.budget <= 0 or not self.kv.grow(seq, seq.planned + 1, step.builder):
            return False
        seq.run_until = min(seq.room, last)
        return True

    def _plan_decode(self, seq: Sequence, step: _Step) -> None:
        if seq.planned < seq.room:
            self._grant(seq, 1, step)  # its block has room, nothing to ask
        else:
            self._plan_one(seq, step)

    def _plan_one(self, seq: Sequence, step: _Step) -> None:
        """Give a running sequence its share; preempt until its blocks fit."""
        if seq.state is not SeqState.RUNNING:
            return  # preempted earlier in this plan
        count = self._share(seq, seq.wanted, step)
        if count == 0:
            return
        while not self.kv.grow(seq, seq.planned + count, step.builder):
            if self.kv.has_limbo:
                return  # blocks come free with the step in flight
            if self.roster.drop_waiting_forks():
                continue
            self._charge(step)
            planned = {other.seq_id for other in step.rows.seqs}
            victim = self.roster.queue.victim(other for other in self.roster.running if other.seq_id not in planned)
            if victim is seq and self._is_in_flight(seq):
                return  # its own step may move a window on; preempting now would throw that step away, again and again
            self.roster.preempt(victim)
            if victim is seq:
                return
        self._grant(seq, count, step)

    def _is_in_flight(self, seq: Sequence) -> bool:
        return any(seq in rows.seqs for rows in self._rows.values())

    def _share(self, seq: Sequence, wanted: int, step: _Step) -> int:
        """Tokens of this step for a sequence that wants `wanted`.

        With others in the step, a chunk far into a prompt is shorter: they would wait for its attention to all that comes before.
        Without chunking a prompt runs whole or not; one longer than the whole budget runs as the only prefill of its step.
        """
        if self.config.enable_chunked_prefill or wanted == 1:
            most = self._price.most(seq.promised - wanted, step.budget) if wanted > 1 and len(step.rows) else max(step.budget, 0)
            return min(wanted, most, max(step.score_budget, 1) if wanted > 1 and seq.scores_prompt else wanted)
        if wanted <= step.budget:
            return wanted
        is_oversized = wanted > self.config.max_num_batched_tokens
        return wanted if is_oversized and step.num_prefills == 0 else 0

    def _grant(self, seq: Sequence, count: int, step: _Step) -> None:
        start = seq.planned
        samples = int(start + count == seq.promised)
        step.rows.add(seq, start, count, samples)
        step.num_more += count - 1 + self._price.surcharge(start, count)
        step.num_prefills += count > 1
        if seq.scores_prompt and start < seq.num_prompt:
            step.score_budget -= count
        seq.planned += count
        seq.promised += samples
        seq.run_until = min(seq.room, seq.limit - 1) if samples else 0

    def _charge(self, step: _Step) -> None:
        """Tell the queue policy of the rows it has not heard of; always before it is asked for an opinion."""
        if self.roster.queue.charges and step.num_charged < len(step.rows):
            step.rows.fill()
            self.roster.queue.charge(step.rows.seqs[step.num_charged :], step.rows.counts[step.num_charged :])
            step.num_charged = len(step.rows)

    def _plan_waiting(self, step: _Step, now: float) -> None:
        """Admit in the queue's order. Static batching fills a batch when the last one has ended, and only then."""
        is_static = self.config.static_batching
        if not len(self.roster.queue) or not self.roster.has_free_slot or (is_static and self.roster.running):
            return
        reserve = self._reserve()
        while self.roster.has_free_slot and (step.budget > 0 or is_static):
            self._charge(step)
            seq = self.roster.queue.head()
            if seq is None or seq.pending or not self._admit(seq, step, reserve, now):
                return

    def _reserve(self) -> int:
        """Blocks left to the running ones: one each for who may still grow, or admitting would only lead to preempting."""
        size = self.kv.block_size
        return sum(1 for seq in self.roster.running if len(seq.blocks[0]) * size < seq.limit)

    def _admit(self, seq: Sequence, step: _Step, reserve: int, now: float) -> bool:
        """Start the head of the queue. False when it does not fit yet; nobody behind it is tried then, or it could starve."""
        is_forked = bool(seq.blocks[0])
        hits = seq.planned if is_forked else self._hits(seq)
        count = self._share(seq, len(seq.tokens) - hits, step)
        if count == 0 and not self.config.static_batching:
            return False
        while not self.kv.can_admit(seq, hits, hits + count, reserve):
            if self.roster.running or self.kv.has_limbo or not self.roster.drop_waiting_forks():
                return False
            if is_forked:
                return True  # its own blocks may have been the ones let go: look at the head anew
        if not is_forked:
            self._take_hits(seq, hits)
        self._start(seq, step.builder, now)
        if count:
            grown = self.kv.grow(seq, seq.planned + count, step.builder)
            assert grown, "can_admit promised these blocks"
            self._grant(seq, count, step)
        return True

    def _start(self, seq: Sequence, builder: PlanBuilder, now: float) -> None:
        self.roster.start(seq, now)
        facts = Started(SlotId(seq.slot), array("i", seq.tokens), seq.num_prompt, seq.request.params, seq.index)
        builder.started.append(facts)
        self.kv.write_tables(seq, builder)

    def _take_hits(self, seq: Sequence, hits: int) -> None:
        self.kv.take_hits(seq, hits)
        if seq.incarnation == 0 and self.kv.caching and seq.uses_prefix_cache:
            seq.num_cached = min(hits, seq.num_prompt)
            self.roster.counters.prefix_cache_query_tokens += seq.num_prompt
            self.roster.counters.prefix_cache_hit_tokens += seq.num_cached

    def _hits(self, seq: Sequence) -> int:
        """Prompt log-probabilities need every prompt position computed."""
        return 0 if seq.scores_prompt else self.kv.num_hit_tokens(seq)

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
        for i, (seq, start, token) in enumerate(zip(rows.lane.seqs, rows.starts, token_ids, strict=False)):
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
        step, left = _Step(self.config.max_num_batched_tokens, PlanBuilder()), []
        for seq in sequences:
            if seq.state is SeqState.RUNNING and not (seq.wanted == 1 and seq.is_complete):
                held = min(len(blocks) for blocks in seq.blocks) * self.kv.block_size - seq.planned
                if seq.wanted > 0 and held > 0:
                    count = min(self._share(seq, seq.wanted, step), held)
                    if count:
                        self._grant(seq, count, step)
                    else:
                        left.append(seq)
        self._charge(step)
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
