"""Keeps every sequence of one engine from arrival to end: states, slots, deadlines, prerequisites, and the updates about each.

    add -> BLOCKED (prerequisites missing) -> WAITING (in the queue) -> RUNNING (slot and blocks) -> DONE
                                                  ^---- preempt ----'

There is one way in (`add`) and one way out (`_end`, from every state).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping

from headrace.core.errors import HeadraceError, QueueFull, Unavailable
from headrace.core.ids import PreparationId, RequestId, SeqId
from headrace.core.load import EngineCounters
from headrace.core.request import EngineRequest, PriorityClass, submitted_bytes
from headrace.core.update import FinishReason, SequenceUpdate
from headrace.policy.config import SchedulerConfig
from headrace.policy.kvcache.host_tier import HostTier
from headrace.policy.kvcache.manager import KvManager
from headrace.policy.queues import QUEUES
from headrace.policy.schedule.arrival import FORK, HOST_KV, NO_PREREQUISITES, NO_TIME_LIMIT, Arrivals, Deadlines, Limit
from headrace.policy.schedule.slots import Slots
from headrace.policy.schedule.updates import NOTHING, RowOutput, sequence_update, token_updates
from headrace.policy.schedule.waiting import Family, WaitingWork, displaced
from headrace.policy.sequence import BLOCKED, DONE, NO_PREPARATION, RUNNING, WAITING, Appended, SeqState, Sequence
from headrace.policy.step_builder import RunningColumns

OVERDUE_RETRY_S = 5.0

DISPLACED = "the engine's waiting queue is full, and this tenant had more than its part of it; send the request again later"


class SequenceTable:
    """All sequences of one engine, by state, with its slots and its waiting queue."""

    def __init__(self, config: SchedulerConfig, kv: KvManager, tier: HostTier | None = None) -> None:
        self.config = config
        self.kv = kv
        self.tier = tier
        self.queue = QUEUES[config.queue_policy]()
        self.slots = Slots(config.max_num_seqs)
        self._arrivals = Arrivals(config, kv)
        self.last_premium = -math.inf
        self.counters = EngineCounters()
        self.waiting = WaitingWork(config, self.queue.traits)
        self._blocked: dict[SeqId, Sequence] = {}
        self._families: dict[RequestId, list[Sequence]] = {}
        self._prepared: dict[PreparationId, list[Sequence]] = {}
        self._ended_preparations: deque[tuple[int, PreparationId]] = deque()
        self._refused: list[tuple[EngineRequest, HeadraceError]] = []
        self._deadlines = Deadlines()
        self._updates: list[SequenceUpdate] = []

    # questions

    @property
    def num_waiting(self) -> int:
        return sum(self.waiting.num_sequences)

    @property
    def has_work(self) -> bool:
        return bool(len(self.slots) or len(self.queue) or self._blocked or self._updates or self.slots.has_ended)

    def alive(self) -> list[Sequence]:
        return [seq for family in self._families.values() for seq in family]

    # in

    def check_room(self, request: EngineRequest) -> list[Family]:
        """Returns the waiting requests that it takes the place of (`waiting.displaced`): they are for `add`.

        Raises: QueueFull when the waiting queue is full, RequestTooLarge for what never fits, ValueError for a request id still in use.
        """
        num_bytes = submitted_bytes(request)
        self.waiting.refuse_too_large(request, num_bytes)
        self._arrivals.refuse_what_never_fits(request)
        leaving = displaced(request, num_bytes, self.waiting, self._families.values(), self.config, self.queue.traits)
        if not leaving:
            self.waiting.refuse_while_full(request, num_bytes)
        if request.request_id in self._families:
            raise ValueError(f"request id {request.request_id} is in use")
        return leaving

    def add(
        self,
        request: EngineRequest,
        now: float,
        prerequisites: Mapping[str, float] = NO_PREREQUISITES,
        *,
        preparation_id: PreparationId = NO_PREPARATION,
        leaving: Iterable[Family] = (),
    ) -> None:
        """prerequisites  each with the seconds it may take
        preparation_id the number by which `satisfied`, `failed` and `take_ended` name this request
        leaving        the waiting requests whose place it takes, as `check_room` found them: they are refused
        """
        assert request.request_id not in self._families, "check_room was not asked"
        for family in leaving:
            self._refuse(family, QueueFull(DISPLACED), now)
        family = [self._arrivals.make_sequence(request, index, now, prerequisites) for index in request.indices]
        self._families[request.request_id] = family
        if request.priority is PriorityClass.PREMIUM:
            self.last_premium = now
        try:
            for seq in family:
                self._begin_wait(seq)
                self._place(seq)
                self._watch_deadlines(seq, now)
        except Exception:
            self._remove(family)
            raise
        if preparation_id != NO_PREPARATION:
            self._prepared[preparation_id] = family
            for seq in family:
                seq.preparation_id = preparation_id
        self.counters.prompt_tokens += len(request.prompt_ids)

    def _refuse(self, family: list[Sequence], error: HeadraceError, now: float) -> None:
        self._refused.append((family[0].request, error))
        self._end_without_update(family, now)

    def _end_without_update(self, family: list[Sequence], now: float) -> None:
        for seq in list(family):
            self._end(seq, FinishReason.CANCELLED, now, is_emitted=True)

    def _begin_wait(self, seq: Sequence) -> None:
        self.waiting.add(seq, 1 if FORK in seq.missing else len(seq.tokens))

    def _watch_deadlines(self, seq: Sequence, now: float) -> None:
        if seq.request.deadline_at is not None:
            self._deadlines.add(seq.request.deadline_at, seq, Limit.ANSWER)
        for what, timeout_s in seq.missing.items():
            if timeout_s < NO_TIME_LIMIT:
                self._deadlines.add(now + timeout_s, seq, Limit.PREREQUISITE, what)

    def _remove(self, family: list[Sequence]) -> None:
        for seq in family:
            self.queue.remove(seq)
            self._blocked.pop(seq.seq_id, None)
            self.waiting.remove(seq)
            seq.end()
        del self._families[family[0].request.request_id]

    def _place(self, seq: Sequence, *, may_fetch: bool = True) -> None:
        if may_fetch and not seq.missing and self.tier is not None and self.tier.fetch(seq):
            seq.missing[HOST_KV] = NO_TIME_LIMIT
        if seq.missing:
            self._blocked[seq.seq_id] = seq
            return
        seq.wait()
        hits = seq.num_computed or self.kv.num_hit_tokens(seq)
        self._charge_running()
        self.queue.push(seq, seq.num_prompt - min(hits, seq.num_prompt) + seq.limit - seq.num_prompt)

    def _charge_running(self) -> None:
        if self.queue.traits.has_tenants:
            self.queue.charge(self.slots.running)

    def satisfied(self, preparation_id: PreparationId, what: str, adapter_slot: int = 0) -> None:
        """An unknown id is ignored: the request may have been cancelled. adapter_slot: 0 where the prerequisite is no adapter"""
        for seq in self._prepared.get(preparation_id, ()):
            seq.adapter_slot = adapter_slot or seq.adapter_slot
            self._satisfy(seq, what)

    def end_host_waits(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            self._satisfy(seq, HOST_KV)

    def failed(self, preparation_id: PreparationId, what: str, message: str, now: float) -> None:
        for seq in list(self._prepared.get(preparation_id, ())):
            if what in seq.missing:
                self.fail(seq, message, now)

    def _satisfy(self, seq: Sequence, what: str) -> None:
        if what not in seq.missing:
            return
        del seq.missing[what]
        if not seq.missing and self._blocked.pop(seq.seq_id, None) is not None:
            self._place(seq, may_fetch=what != HOST_KV)

    # slots

    def start(self, seq: Sequence, now: float) -> None:
        self.queue.start(seq, now)
        self.waiting.remove(seq)
        self.slots.start(seq, now)

    def preempt(self, seq: Sequence, now: float) -> None:
        self._charge_running()
        self._leave_state(seq)
        self.kv.release(seq)
        seq.preempt(now)
        self._begin_wait(seq)
        self.queue.push(seq, seq.limit)
        self.counters.preemptions += 1

    def drop_waiting_forks(self) -> bool:
        for seq in self.alive():
            if seq.state is WAITING and any(seq.blocks):
                self.kv.release(seq)
                return True
        return False

    # out

    def cancel(self, request_id: RequestId, now: float) -> None:
        for seq in list(self._families.get(request_id, ())):
            self._end(seq, FinishReason.CANCELLED, now)

    def cancel_preparation(self, preparation_id: PreparationId, now: float) -> None:
        for seq in list(self._prepared.get(preparation_id, ())):
            self._end(seq, FinishReason.CANCELLED, now)

    def withdraw(self, preparation_id: PreparationId, now: float) -> EngineRequest | None:
        """End a request without an update. None where one of its sequences waits for nothing."""
        family = list(self._prepared.get(preparation_id, ()))
        if not family or not all(seq.missing for seq in family):
            return None
        self._end_without_update(family, now)
        return family[0].request

    def finish(self, request_id: RequestId, index: int, keep_tokens: int, reason: FinishReason, now: float) -> None:
        """Tokens beyond `keep_tokens` do not count and are not cached."""
        for seq in list(self._families.get(request_id, ())):
            if seq.index == index:
                self._end(seq, reason, now, keep_tokens=keep_tokens)

    def fail(self, seq: Sequence, message: str, now: float) -> None:
        self._end(seq, FinishReason.ERROR, now, error=message)

    def expire(self, now: float) -> None:
        for seq, kind, what in self._deadlines.take_due(now):
            if kind is Limit.ANSWER:
                self._end(seq, FinishReason.DEADLINE, now)
            elif what in seq.missing:
                late = f"what this request needs first ({what}) was not ready within {seq.missing[what]:g} s"
                if (request := self.withdraw(seq.preparation_id, now)) is not None:
                    self._refused.append((request, Unavailable(f"{late}; it can be sent again", retry_after_s=OVERDUE_RETRY_S)))
                else:
                    self.fail(seq, late, now)

    def take_refused(self) -> list[tuple[EngineRequest, HeadraceError]]:
        """Requests that were let in and refused since the last call; there is no update about them."""
        refused, self._refused = self._refused, []
        return refused

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    def _end(
        self,
        seq: Sequence,
        reason: FinishReason,
        now: float,
        *,
        keep_tokens: int | None = None,
        error: str | None = None,
        is_emitted: bool = False,
    ) -> None:
        if seq.state is DONE:
            return
        update = None if is_emitted else sequence_update(seq, NOTHING, 0, now, reason, error=error)
        if seq.state is RUNNING:
            self.queue.charge((seq,))
        num_outputs = seq.num_outputs if keep_tokens is None else min(keep_tokens, seq.num_outputs)
        # Each of these calls may be repeated: if one raises, the caller can end the sequence again.
        self.kv.release(seq, keep_tokens=seq.num_prompt + num_outputs)
        self._leave_state(seq)
        self._forget(seq)
        seq.end()
        if seq.request.params.stop:
            self.counters.generation_tokens += max(0, num_outputs - len(seq.request.output_ids))
        self.counters.note_finished(reason.value)
        if update is not None:
            self._updates.append(update)

    def _leave_state(self, seq: Sequence) -> None:
        if seq.state is RUNNING:
            self.slots.leave(seq)
            return
        self.waiting.remove(seq)
        if seq.state is WAITING:
            self.queue.remove(seq)
        else:
            self._blocked.pop(seq.seq_id, None)

    def _forget(self, seq: Sequence) -> None:
        family = self._families.get(seq.request.request_id, [])
        if seq not in family:
            return
        family.remove(seq)
        if not family:
            del self._families[seq.request.request_id]
            if self._prepared.pop(seq.preparation_id, None) is not None:
                self._ended_preparations.append((self.kv.steps.last_planned, seq.preparation_id))
        if seq.is_first:
            for sibling in list(family):
                self._satisfy(sibling, FORK)

    def take_ended(self) -> list[PreparationId]:
        """Names requests that no uncommitted plan names, so that their masks and adapters are not used any more."""
        ended, committed = [], self.kv.steps.last_committed
        while self._ended_preparations and self._ended_preparations[0][0] <= committed:
            ended.append(self._ended_preparations.popleft()[1])
        return ended

    # updates

    def emit_output(self, seq: Sequence, output: RowOutput, appended: Appended, now: float) -> None:
        kept, reason, stop_token = appended
        if kept:
            seq.end_prefill(now)
            if not seq.request.params.stop:
                self.counters.generation_tokens += kept  # with stop strings, tokens are counted at the end: see `_end`
        update = sequence_update(seq, output, kept, now, reason, stop_token)
        if reason is not None:
            self._end(seq, reason, now, is_emitted=True)
        self._updates.append(update)

    def emit_tokens(self, columns: RunningColumns, token_ids: list[int], needs_full_commit: list[int]) -> None:
        """needs_full_commit: ascending indices of sequences that are left out"""
        updates = token_updates(columns, token_ids)
        for i in reversed(needs_full_commit):
            del updates[i]
        self.counters.generation_tokens += columns.num_counted - sum([columns.counted[i] for i in needs_full_commit])
        self._updates += updates

    def fork_siblings(self, seq: Sequence) -> None:
        if not seq.is_first or seq.request.params.n == 1:
            return
        for sibling in list(self._families.get(seq.request.request_id, ())):
            if FORK in sibling.missing:
                self.kv.fork(seq, sibling)
                self._satisfy(sibling, FORK)

    def take_updates(self) -> list[SequenceUpdate]:
        updates, self._updates = self._updates, []
        return updates

    # invariants

    def check(self) -> None:
        alive = self.alive()
        self.kv.check(alive)
        states = {state: [seq for seq in alive if seq.state is state] for state in SeqState}
        assert not states[DONE], "a done sequence was not forgotten"
        self.slots.check(states[RUNNING])
        assert len(states[WAITING]) == len(self.queue)
        assert len(states[BLOCKED]) == len(self._blocked)
        prepared = {id(family) for family in self._prepared.values()}
        assert prepared <= {id(family) for family in self._families.values()}, "an preparation_id outlived its request"
        assert not any(seq.num_queued for seq in states[RUNNING]), "a running sequence counts as waiting"
        self.waiting.check([*states[WAITING], *states[BLOCKED]])
