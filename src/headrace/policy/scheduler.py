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
from headrace.policy.plan_builder import PlanBuilder
from headrace.policy.roster import Output, Roster
from headrace.policy.sequence import SeqState, Sequence

MAX_SCORED_TOKENS = 64
"""Prompt positions whose log-probabilities are computed in one chunked step. Each needs a row of logits over the whole vocabulary, many
times the cost of a plain prompt token: a full budget of them would hold up everybody's next token for seconds."""


@dataclass(slots=True, eq=False)
class _Row:
    """What a planned row meant, remembered until its step is committed or rolled back."""

    seq: Sequence
    incarnation: int
    start: int
    count: int
    samples: int

    @property
    def is_current(self) -> bool:
        """Its sequence still runs, and was not preempted since."""
        return self.incarnation == self.seq.incarnation and self.seq.state is SeqState.RUNNING


@dataclass(slots=True)
class _Step:
    """A plan while it is being decided."""

    budget: int
    builder: PlanBuilder
    score_budget: int = MAX_SCORED_TOKENS
    rows: list[_Row] = field(default_factory=list)
    num_prefills: int = 0


class Scheduler:
    """Decides steps over a `Roster` of sequences. All methods run on the loop's thread."""

    def __init__(self, config: SchedulerConfig, kv: KvManager) -> None:
        self.config = config
        self.kv = kv
        self.roster = Roster(config, kv)
        self._rows: dict[int, list[_Row]] = {}
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
            if not (step.rows or step.builder.has_changes or self.roster.has_ended_slots):
                return None
            return self._freeze(step)
        except Exception:
            self._take_back(step)
            raise

    def _take_back(self, step: _Step) -> None:
        """Planning raised: the rows were never planned; blocks and slots already handed out are announced with the next plan."""
        self._undo(step.rows)
        step.builder.rows.clear()
        self._unsent = step.builder

    def _freeze(self, step: _Step) -> Plan:
        """Slots of those who left are announced before `started` is applied, so a slot may change hands within one plan."""
        step.builder.ended += self.roster.take_ended_slots()
        plan = step.builder.build(self._next_step)
        self._rows[plan.step_id] = step.rows
        self.kv.last_planned = plan.step_id
        self._next_step += 1
        return plan

    def _plan_running(self, step: _Step) -> None:
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for seq in self.roster.running:
            wanted = seq.wanted
            if wanted == 1:
                if not seq.is_complete:
                    decoding.append(seq)
            elif wanted > 1:
                prefilling.append(seq)
        for seq in decoding:
            if seq.planned < seq.room and seq.state is SeqState.RUNNING:
                self._grant(seq, 1, step)  # the usual case: its block has room, nothing to ask
            else:
                self._plan_one(seq, step)
        for seq in self.roster.queue.prefill_order(prefilling) if len(prefilling) > 1 else prefilling:
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
            planned = {row.seq.seq_id for row in step.rows}
            victim = self.roster.queue.victim(other for other in self.roster.running if other.seq_id not in planned)
            if victim is seq and self._is_in_flight(seq):
                return  # its own step may move a window on; preempting now would throw that step away, again and again
            self.roster.preempt(victim)
            if victim is seq:
                return
        self._grant(seq, count, step)

    def _is_in_flight(self, seq: Sequence) -> bool:
        return any(row.seq is seq for rows in self._rows.values() for row in rows)

    def _share(self, seq: Sequence, wanted: int, step: _Step) -> int:
        """Tokens of this step for a sequence that wants `wanted`.

        Without chunking a prompt runs whole or not; one longer than the whole budget runs as the only prefill of its step.
        """
        if self.config.enable_chunked_prefill or wanted == 1:
            limit = max(step.score_budget, 1) if wanted > 1 and seq.scores_prompt else wanted
            return min(wanted, limit, max(step.budget, 0))
        if wanted <= step.budget:
            return wanted
        is_oversized = wanted > self.config.max_num_batched_tokens
        return wanted if is_oversized and step.num_prefills == 0 else 0

    def _grant(self, seq: Sequence, count: int, step: _Step) -> None:
        start = seq.planned
        samples = int(start + count == len(seq.tokens) + seq.pending)
        step.builder.row(seq.slot, start, count, samples)
        step.rows.append(_Row(seq, seq.incarnation, start, count, samples))
        step.budget -= count
        step.num_prefills += count > 1
        if seq.scores_prompt and start < seq.num_prompt:
            step.score_budget -= count
        seq.planned += count
        seq.pending += samples
        if self.roster.queue.charges:
            self.roster.queue.charge(seq, count)

    def _plan_waiting(self, step: _Step, now: float) -> None:
        """Admit in the queue's order. Static batching fills a batch when the last one has ended, and only then."""
        is_static = self.config.static_batching
        if is_static and self.roster.running:
            return
        reserve = self._reserve() if len(self.roster.queue) else 0
        while self.roster.has_free_slot and (step.budget > 0 or is_static):
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
        errors = dict(result.errors)
        prompt_logprobs = dict(result.prompt_logprobs)
        offset = 0
        for i, (row, count) in enumerate(zip(rows, result.token_counts, strict=True)):
            end = offset + count
            if row.seq.state is not SeqState.DONE:
                row.seq.pending -= row.samples
                output = Output(result.token_ids[offset:end], result.logprobs[offset:end], _untold(row, prompt_logprobs.get(i, ())))
                try:
                    self._commit_row(row, output, errors.get(i))
                except Exception as error:  # one sequence's bookkeeping must not take its neighbours along
                    self.roster.fail(row.seq, f"internal error while taking in a step: {type(error).__name__}")
            offset = end
        self.kv.settle(plan.step_id)
        return self.roster.take_updates()

    def _commit_row(self, row: _Row, output: Output, error: str | None) -> None:
        seq = row.seq
        if error is not None:
            self.roster.fail(seq, error)
            return
        if row.is_current:
            seq.computed = row.start + row.count
            if seq.computed >= seq.num_prompt > row.start:
                self.roster.fork_siblings(seq)  # before the window moves on: a fork recomputes the last prompt token, seeing one token more
            self.kv.commit(seq)
        self.roster.append_output(seq, output)

    def rollback(self, plan: Plan) -> list[Sequence]:
        """The step raised: its rows were not computed. Blocks stay, KV writes are idempotent. Returns the rows' live sequences."""
        rows = self._rows.pop(plan.step_id)
        self._undo(rows)
        self.kv.settle(plan.step_id)
        return [row.seq for row in rows if row.is_current]

    def _undo(self, rows: list[_Row]) -> None:
        """These rows will not be computed."""
        for row in reversed(rows):
            row.seq.pending -= row.samples
            if row.is_current:
                row.seq.planned = row.start
            if self.roster.queue.charges:
                self.roster.queue.charge(row.seq, -row.count)

    def replan(self, sequences: list[Sequence]) -> Plan | None:
        """A plan of just these sequences (blocks are theirs already): how a failed step is repeated in halves."""
        step = _Step(self.config.max_num_batched_tokens, PlanBuilder())
        for seq in sequences:
            if seq.state is SeqState.RUNNING and not (seq.wanted == 1 and seq.is_complete):
                held = min(len(blocks) for blocks in seq.blocks) * self.kv.block_size
                count = min(self._share(seq, seq.wanted, step), held - seq.planned)
                if count > 0:
                    self._grant(seq, count, step)
        return self._freeze(step) if step.rows else None

    def delta_plan(self, plan: Plan) -> Plan:
        """The state changes of a plan that raised, without rows: applying them again is harmless, missing them is not."""
        builder = PlanBuilder()
        builder.tables = list(zip(plan.table_groups, plan.table_slots, plan.table_indices, plan.table_blocks, strict=True))
        builder.moves = list(zip(plan.move_groups, plan.move_sources, plan.move_targets, strict=True))
        builder.started = list(plan.started)
        builder.ended = list(plan.ended)
        delta = builder.build(self._next_step)
        self._rows[delta.step_id] = []
        self._next_step += 1
        return delta

    # invariants

    def check(self) -> None:
        """Raise AssertionError unless sequences, slots and blocks add up. Cheap; runs when idle and after every test."""
        self.roster.check()
        for seq in self.roster.alive():
            in_flight = [row for rows in self._rows.values() for row in rows if row.seq is seq]
            assert seq.pending == sum(row.samples for row in in_flight), "pending ids and planned rows differ"
            current = sum(row.count for row in in_flight if row.incarnation == seq.incarnation)
            assert seq.state is not SeqState.RUNNING or seq.planned == seq.computed + current, "planned and computed differ"


def _untold(row: _Row, entries: tuple[TokenLogprobs, ...]) -> tuple[TokenLogprobs, ...]:
    """Entries for prompt positions row.start + 1 and on, less those already delivered before a preemption or a repeated step."""
    if not entries or row.seq.index:
        return ()  # the sequences of a request share their prompt: the first one tells
    fresh = entries[max(0, row.seq.num_prompt_told - row.start) :]
    row.seq.num_prompt_told += len(fresh)
    return fresh
