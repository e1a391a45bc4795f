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

import heapq
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.core.errors import Overloaded, RequestTooLarge
from headrace.core.finish import FinishReason
from headrace.core.ids import RequestId, SeqId, SlotId
from headrace.core.load import EngineCounters
from headrace.core.plan import Plan, Result, Started, TokenLogprobs
from headrace.core.request import EngineRequest
from headrace.core.update import SequenceUpdate
from headrace.policy.kvcache.manager import KvManager
from headrace.policy.plan_builder import PlanBuilder
from headrace.policy.queues import Queue, make_queue
from headrace.policy.sequence import NO_SLOT, SeqState, Sequence

FORK = "headrace.fork"
"""Prerequisite of the 2nd..nth sequence of a request: the first one's prompt has been computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler reads of the engine's configuration; see `engine.config.EngineConfig` for the meaning."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_waiting: int = 1024
    eos_token_ids: tuple[int, ...] = ()
    queue_policy: str = "fcfs"
    enable_chunked_prefill: bool = True
    static_batching: bool = False
    prerequisite_timeout_s: float = 60.0


@dataclass(slots=True, eq=False)
class _Row:
    """What a planned row meant, remembered until its step is committed or rolled back."""

    seq: Sequence
    incarnation: int
    start: int
    count: int
    samples: int


class _Output(NamedTuple):
    """What one row produced."""

    token_ids: array[int]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


NOTHING = _Output(array("i"))


@dataclass(slots=True)
class _Step:
    """A plan while it is being decided."""

    budget: int
    builder: PlanBuilder = field(default_factory=PlanBuilder)
    rows: list[_Row] = field(default_factory=list)
    num_prefills: int = 0


class Scheduler:
    """Owns every sequence of one engine. All methods run on the loop's thread."""

    def __init__(self, config: SchedulerConfig, kv: KvManager) -> None:
        self.config = config
        self.kv = kv
        self.queue: Queue = make_queue(config.queue_policy)
        self.running: list[Sequence] = []
        self.counters = EngineCounters()
        self._blocked: dict[SeqId, Sequence] = {}
        self._requests: dict[RequestId, list[Sequence]] = {}
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._ended_slots: list[int] = []
        self._rows: dict[int, list[_Row]] = {}
        self._updates: list[SequenceUpdate] = []
        self._eos = frozenset(config.eos_token_ids)
        self._next_seq = 0
        self._next_step = 1

    # questions

    @property
    def num_waiting(self) -> int:
        return len(self.queue) + len(self._blocked)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def has_work(self) -> bool:
        return bool(self.running or len(self.queue) or self._blocked or self._updates or self._ended_slots)

    def requests(self) -> Iterable[RequestId]:
        return self._requests.keys()

    # requests in

    def add(self, request: EngineRequest, now: float) -> None:
        """Take a checked request in. Raises Overloaded when the waiting queue is full, ValueError for a request id still in use."""
        n = request.params.n
        self._refuse_what_never_fits(request)
        if self.num_waiting + n > self.config.max_waiting:
            raise Overloaded(f"the engine's waiting queue is full ({self.num_waiting} of {self.config.max_waiting})", retry_after_s=1.0)
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id} is in use")
        family = [self._make_sequence(request, index, now) for index in range(n)]
        self._requests[request.request_id] = family
        for seq in family:
            self._place(seq)
            if request.deadline_s is not None:
                heapq.heappush(self._deadlines, (now + request.deadline_s, seq.seq_id, seq))
            if seq.missing - {FORK}:
                heapq.heappush(self._deadlines, (now + self.config.prerequisite_timeout_s, -seq.seq_id, seq))
        self.counters.prompt_tokens += len(request.prompt_ids)

    def _refuse_what_never_fits(self, request: EngineRequest) -> None:
        length = self._limit(request)
        if reason := self.kv.shortage(length, self.config.max_num_batched_tokens):
            raise RequestTooLarge(
                "max_tokens",
                f"prompt ({len(request.prompt_ids)}) + output tokens that fit the KV cache: {reason}",
                length - len(request.prompt_ids),
                "Shorten the prompt or lower max_tokens.",
            )

    def _limit(self, request: EngineRequest) -> int:
        """Length at which a sequence of this request ends."""
        if request.params.max_tokens is None:
            return self.config.max_model_len
        return min(self.config.max_model_len, len(request.prompt_ids) + request.params.max_tokens)

    def _make_sequence(self, request: EngineRequest, index: int, now: float) -> Sequence:
        tokens = array("i", request.prompt_ids)
        tokens.extend(request.output_ids)
        self._next_seq += 1
        seq = Sequence(SeqId(self._next_seq), request, index, now, tokens, len(request.prompt_ids), self._limit(request))
        seq.missing = set(request.prerequisites) | ({FORK} if index else set())
        self.kv.open(seq)
        return seq

    def _place(self, seq: Sequence) -> None:
        """Into the queue, or aside while prerequisites are missing."""
        if seq.missing:
            self._blocked[seq.seq_id] = seq
            return
        seq.state = SeqState.WAITING
        hits = seq.computed or self.kv.num_hit_tokens(seq)
        self.queue.push(seq, seq.num_prompt - min(hits, seq.num_prompt) + seq.limit - seq.num_prompt)

    def satisfied(self, request_id: RequestId, what: str) -> None:
        """A prerequisite is there. Unknown requests are ignored: they may have been cancelled meanwhile."""
        for seq in self._requests.get(request_id, ()):
            self._satisfy(seq, what)

    def _satisfy(self, seq: Sequence, what: str) -> None:
        if what not in seq.missing:
            return
        seq.missing.discard(what)
        if not seq.missing and self._blocked.pop(seq.seq_id, None) is not None:
            self._place(seq)

    # requests out

    def cancel(self, request_id: RequestId) -> None:
        """The client left: every sequence of the request ends now, its blocks are free once no uncommitted plan names them."""
        for seq in list(self._requests.get(request_id, ())):
            self._end(seq, FinishReason.CANCELLED)

    def finish(self, request_id: RequestId, index: int, keep_tokens: int, reason: FinishReason) -> None:
        """The text side ended a sequence (a stop string) after `keep_tokens` output tokens; what was sampled beyond is dropped."""
        for seq in list(self._requests.get(request_id, ())):
            if seq.index == index:
                self._end(seq, reason, keep_tokens=keep_tokens)

    def fail(self, seq: Sequence, message: str) -> None:
        self._end(seq, FinishReason.ERROR, error=message)

    def expire(self, now: float) -> None:
        """End what is past its deadline or waited too long for a prerequisite."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, tag, seq = heapq.heappop(self._deadlines)
            if seq.state is SeqState.DONE:
                continue
            if tag < 0:
                if waiting_for := sorted(seq.missing - {FORK}):
                    self.fail(seq, f"prerequisite not met in {self.config.prerequisite_timeout_s:g} s: {', '.join(waiting_for)}")
            else:
                self._end(seq, FinishReason.DEADLINE)

    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    def _end(
        self,
        seq: Sequence,
        reason: FinishReason,
        *,
        keep_tokens: int | None = None,
        error: str | None = None,
        is_told: bool = False,
    ) -> None:
        """The one way out, from every state. is_told: the update that carries the end is on its way already."""
        if seq.state is SeqState.DONE:
            return
        update = None if is_told else self._update(seq, NOTHING, 0, finish=reason, error=error)
        self._leave_state(seq)
        num_outputs = seq.num_outputs if keep_tokens is None else min(keep_tokens, seq.num_outputs)
        if seq.request.params.stop:
            self.counters.generation_tokens += max(0, num_outputs - len(seq.request.output_ids))
        self.kv.release(seq, keep_tokens=seq.num_prompt + num_outputs)
        seq.state = SeqState.DONE
        self.counters.finished[reason.value] = self.counters.finished.get(reason.value, 0) + 1
        if update is not None:
            self._updates.append(update)
        self._forget(seq)

    def _leave_state(self, seq: Sequence) -> None:
        if seq.state is SeqState.RUNNING:
            self.running.remove(seq)
            self._give_slot_back(seq)
        elif seq.state is SeqState.WAITING:
            self.queue.remove(seq)
        else:
            self._blocked.pop(seq.seq_id, None)

    def _forget(self, seq: Sequence) -> None:
        """Remove a done sequence from its family; siblings that hoped to share its prompt compute their own."""
        family = self._requests[seq.request.request_id]
        family.remove(seq)
        if not family:
            del self._requests[seq.request.request_id]
        if seq.index == 0:
            for sibling in list(family):
                self._satisfy(sibling, FORK)

    def _give_slot_back(self, seq: Sequence) -> None:
        self._ended_slots.append(seq.slot)
        self._free_slots.append(seq.slot)
        seq.slot = NO_SLOT

    # planning

    def plan(self, now: float) -> Plan | None:
        """The next step, or None when nothing can be computed now (all waiting for results, prerequisites or blocks)."""
        self.expire(now)
        step = _Step(self.config.max_num_batched_tokens)
        self._plan_running(step)
        self._plan_waiting(step, now)
        if not (step.rows or step.builder.started or self._ended_slots):
            return None
        return self._freeze(step)

    def _freeze(self, step: _Step) -> Plan:
        """Slots of those who left are announced before `started` is applied, so a slot may change hands within one plan."""
        step.builder.ended, self._ended_slots = self._ended_slots, []
        plan = step.builder.build(self._next_step)
        self._rows[plan.step_id] = step.rows
        self.kv.last_planned = plan.step_id
        self._next_step += 1
        return plan

    def _plan_running(self, step: _Step) -> None:
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for seq in self.running:
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
        for seq in self.queue.prefill_order(prefilling) if len(prefilling) > 1 else prefilling:
            self._plan_one(seq, step)

    def _plan_one(self, seq: Sequence, step: _Step) -> None:
        """Give a running sequence its share; preempt until its blocks fit."""
        if seq.state is not SeqState.RUNNING:
            return  # preempted earlier in this plan
        count = self._share(seq.wanted, step)
        if count == 0:
            return
        while not self.kv.grow(seq, seq.planned + count, step.builder):
            if self.kv.has_limbo:
                return  # blocks come free with the step in flight
            if self._drop_waiting_forks():
                continue
            planned = {row.seq.seq_id for row in step.rows}
            victim = self.queue.victim(other for other in self.running if other.seq_id not in planned)
            self._preempt(victim)
            if victim is seq:
                return
        self._grant(seq, count, step)

    def _share(self, wanted: int, step: _Step) -> int:
        """Tokens of this step for somebody who wants `wanted`.

        Without chunking a prompt runs whole or not; one longer than the whole budget runs as the only prefill of its step.
        """
        if self.config.enable_chunked_prefill or wanted == 1:
            return min(wanted, max(step.budget, 0))
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
        seq.planned += count
        seq.pending += samples
        if self.queue.charges:
            self.queue.charge(seq, count)

    def _plan_waiting(self, step: _Step, now: float) -> None:
        """Admit in the queue's order. Static batching fills a batch when the last one has ended, and only then."""
        is_static = self.config.static_batching
        if is_static and self.running:
            return
        reserve = self._reserve() if len(self.queue) else 0
        while self._free_slots and (step.budget > 0 or is_static):
            seq = self.queue.head()
            if seq is None or seq.pending or not self._admit(seq, step, reserve, now):
                return

    def _reserve(self) -> int:
        """Blocks left to the running ones: one each for who may still grow, or admitting would only lead to preempting."""
        size = self.kv.block_size
        return sum(1 for seq in self.running if len(seq.blocks[0]) * size < seq.limit)

    def _admit(self, seq: Sequence, step: _Step, reserve: int, now: float) -> bool:
        """Start the head of the queue. False when it does not fit yet; nobody behind it is tried then, or it could starve."""
        is_forked = bool(seq.blocks[0])
        hits = seq.planned if is_forked else self._hits(seq)
        count = self._share(len(seq.tokens) - hits, step)
        if count == 0 and not self.config.static_batching:
            return False
        while not self.kv.can_admit(seq, hits, hits + count, reserve):
            if self.running or self.kv.has_limbo or not self._drop_waiting_forks():
                return False
            if is_forked:
                return True  # its own blocks may have been the ones let go: look at the head anew
        self.queue.remove(seq)
        if not is_forked:
            self._take_hits(seq, hits)
        self._start(seq, step.builder, now)
        if count:
            grown = self.kv.grow(seq, seq.planned + count, step.builder)
            assert grown, "can_admit promised these blocks"
            self._grant(seq, count, step)
        return True

    def _take_hits(self, seq: Sequence, hits: int) -> None:
        self.kv.take_hits(seq, hits)
        if seq.incarnation == 0 and self.kv.caching and seq.uses_prefix_cache:
            seq.num_cached = min(hits, seq.num_prompt)
            self.counters.prefix_cache_query_tokens += seq.num_prompt
            self.counters.prefix_cache_hit_tokens += seq.num_cached

    def _hits(self, seq: Sequence) -> int:
        """Prompt log-probabilities need every prompt position computed."""
        return 0 if seq.request.params.prompt_logprobs is not None else self.kv.num_hit_tokens(seq)

    def _start(self, seq: Sequence, builder: PlanBuilder, now: float) -> None:
        seq.slot = self._free_slots.pop()
        seq.state = SeqState.RUNNING
        self.running.append(seq)
        if seq.first_scheduled is None:
            seq.first_scheduled = now
        builder.started.append(Started(SlotId(seq.slot), array("i", seq.tokens), seq.num_prompt, seq.request.params, seq.index))
        self.kv.write_tables(seq, builder)

    def _preempt(self, seq: Sequence) -> None:
        """Take everything from a running sequence; it will recompute what the prefix cache does not give back."""
        self._leave_state(seq)
        self.kv.release(seq)
        seq.incarnation += 1
        seq.state = SeqState.WAITING
        self.queue.push(seq, seq.limit)
        self.counters.preemptions += 1

    def _drop_waiting_forks(self) -> bool:
        """Let go of prompt blocks that waiting siblings hold; they prefill by themselves. True when something was freed."""
        for family in self._requests.values():
            for seq in family:
                if seq.state is SeqState.WAITING and seq.blocks[0]:
                    self.kv.release(seq)
                    return True
        return False

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
                output = _Output(result.token_ids[offset:end], result.logprobs[offset:end], prompt_logprobs.get(i, ()))
                try:
                    self._commit_row(row, output, errors.get(i))
                except Exception as error:  # one sequence's bookkeeping must not take its neighbours along
                    self.fail(row.seq, f"internal error while taking in a step: {type(error).__name__}")
            offset = end
        self.kv.settle(plan.step_id)
        return self.take_updates()

    def _commit_row(self, row: _Row, output: _Output, error: str | None) -> None:
        seq = row.seq
        if error is not None:
            self.fail(seq, error)
            return
        if row.incarnation == seq.incarnation and seq.state is SeqState.RUNNING:
            seq.computed = row.start + row.count
            if seq.computed >= seq.num_prompt > row.start:
                self._fork_siblings(seq)  # before the window moves on: a fork recomputes the last prompt token, seeing one token more
            self.kv.commit(seq)
        self._append(seq, output)

    def rollback(self, plan: Plan) -> list[Sequence]:
        """The step raised: its rows were not computed. Blocks stay, KV writes are idempotent. Returns the rows' live sequences."""
        rows = self._rows.pop(plan.step_id)
        for row in reversed(rows):
            row.seq.pending -= row.samples
            if row.incarnation == row.seq.incarnation and row.seq.state is SeqState.RUNNING:
                row.seq.planned = row.start
        self.kv.settle(plan.step_id)
        return [row.seq for row in rows if row.seq.state is SeqState.RUNNING and row.incarnation == row.seq.incarnation]

    def replan(self, sequences: list[Sequence]) -> Plan | None:
        """A plan of just these sequences (blocks are theirs already): how a failed step is repeated in halves."""
        step = _Step(self.config.max_num_batched_tokens)
        for seq in sequences:
            if seq.state is SeqState.RUNNING and not (seq.wanted == 1 and seq.is_complete):
                held = min(len(blocks) for blocks in seq.blocks) * self.kv.block_size
                count = min(self._share(seq.wanted, step), held - seq.planned)
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

    def take_updates(self) -> list[SequenceUpdate]:
        updates, self._updates = self._updates, []
        return updates

    def _append(self, seq: Sequence, output: _Output) -> None:
        """Known tokens grow; the sequence may end; whoever listens is told."""
        reason: FinishReason | None = None
        stop_token: int | None = None
        kept = 0
        params = seq.request.params
        for token in output.token_ids:
            seq.tokens.append(token)
            kept += 1
            if (token in self._eos or token in params.stop_token_ids) and self._is_end_token(seq, token):
                reason, stop_token = FinishReason.STOP, token
            elif len(seq.tokens) >= seq.limit:
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        if not params.stop:
            self.counters.generation_tokens += kept  # with stop strings the text side decides how many count: see _end
        if kept == 0 and not output.prompt_logprobs:
            return
        self._updates.append(self._update(seq, output, kept, finish=reason, stop_token_id=stop_token))
        if reason is not None:
            self._end(seq, reason, is_told=True)

    def _is_end_token(self, seq: Sequence, token: int) -> bool:
        params = seq.request.params
        if seq.num_outputs < params.min_tokens:
            return False
        return (token in self._eos and not params.ignore_eos) or token in params.stop_token_ids

    def _fork_siblings(self, seq: Sequence) -> None:
        """The first sequence's prompt is computed: its siblings share it."""
        if seq.index or seq.request.params.n == 1:
            return
        for sibling in list(self._requests.get(seq.request.request_id, ())):
            if FORK in sibling.missing:
                self.kv.fork(seq, sibling)
                self._satisfy(sibling, FORK)

    def _update(
        self,
        seq: Sequence,
        output: _Output,
        kept: int,
        *,
        finish: FinishReason | None,
        stop_token_id: int | None = None,
        error: str | None = None,
    ) -> SequenceUpdate:
        tells_first = kept > 0 and not seq.told_first
        seq.told_first = seq.told_first or tells_first
        return SequenceUpdate(
            request_id=seq.request.request_id,
            epoch=seq.request.epoch,
            index=seq.index,
            token_ids=tuple(output.token_ids[:kept]),
            logprobs=tuple(entry for entry in output.logprobs[:kept] if entry is not None) if output.logprobs else (),
            prompt_logprobs=output.prompt_logprobs,
            finish=finish,
            stop_token_id=stop_token_id,
            error=error,
            num_cached_tokens=seq.num_cached if tells_first else None,
            queue_time_s=seq.first_scheduled - seq.arrival if tells_first and seq.first_scheduled is not None else None,
        )

    # invariants

    def check(self) -> None:
        """Raise AssertionError unless sequences, slots and blocks add up. Cheap; runs when idle and after every test."""
        alive = [seq for family in self._requests.values() for seq in family]
        self.kv.check(alive)
        slots = [seq.slot for seq in self.running]
        assert len(set(slots)) == len(slots), "two sequences in one slot"
        assert sorted([*slots, *self._free_slots]) == list(range(self.config.max_num_seqs)), "a slot was lost"
        states = {state: [seq for seq in alive if seq.state is state] for state in SeqState}
        assert not states[SeqState.DONE], "a done sequence was not forgotten"
        assert len(states[SeqState.RUNNING]) == len(self.running)
        assert len(states[SeqState.WAITING]) == len(self.queue)
        assert len(states[SeqState.BLOCKED]) == len(self._blocked)
        for seq in alive:
            in_flight = [row for rows in self._rows.values() for row in rows if row.seq is seq]
            assert seq.pending == sum(row.samples for row in in_flight), "pending ids and planned rows differ"
            current = sum(row.count for row in in_flight if row.incarnation == seq.incarnation)
            assert seq.state is not SeqState.RUNNING or seq.planned == seq.computed + current, "planned and computed differ"
