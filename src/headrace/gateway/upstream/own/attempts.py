"""Submits the sequences of one call to a replica, to another one after a rejection, and continues them elsewhere after a loss.

docs/failover.md has the rules.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from headrace.core.errors import HeadraceError, Overloaded, RequestTooLarge, Unavailable
from headrace.core.ids import RequestId
from headrace.core.model_info import Numerics, numerics_digest, why_not_resume
from headrace.core.request import EngineRequest
from headrace.core.tasks import end_tasks
from headrace.core.update import FinishReason, Rejected, SequenceUpdate
from headrace.gateway.upstream.own.moves import Moved
from headrace.gateway.upstream.own.output_parsing import EarlierCallOutput, OutputParsing
from headrace.gateway.upstream.own.replica_health import ConnectionKey, Replica, ReplicaInstance
from headrace.gateway.upstream.own.replicas import ReplicaPool
from headrace.gateway.upstream.own.submissions import Submission, SubmissionResult, Submissions
from headrace.gateway.upstream.seam import ReplicaLost
from headrace.policy.admission import UnsentRequest
from headrace.policy.holding import HeldTerms
from headrace.policy.routing.choice import ReplicaChoice
from headrace.wire.stream import NO_NUMERICS, PlainRowHandler, ReplicaStream

LOST = "The engine that worked on this request was lost; it can be sent again."

TIMER_EARLY_S = 1e-6
"""An event loop's timer may come this much early."""

CAME = "it became ready while the request waited at another one"

MAX_TRIES = 2
"""Under overload more tries only add load."""

MAX_FRUITLESS_LOSSES = 3
"""A call fails at this many losses in a row without a new token in between, so that a request which ends its engine does not end all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCall:
    """max_output_tokens  most output tokens of a sequence, by the parameters or by the rest of the context
    answer_id          id of the earlier stream's request, from which ids of tool calls are made; None: `request_id` is used
    """

    request: EngineRequest
    max_output_tokens: int
    parsing: OutputParsing | None = None
    earlier: EarlierCallOutput | None = None
    answer_id: RequestId | None = None
    session: str = ""
    unsent: UnsentRequest | None = None
    has_fallback: bool = False


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """Sequences of a call that are submitted together: at first all of them, after a loss one per group.

    numerics    of the part of the answer that was read already: it goes on only at a replica of equal ones
    wait_until  after a loss or a move, the time on the pool's clock at which waiting for a replica ends; None: neither
    num_read    output ids of the whole call that were read before the group was submitted
    num_prompt_logprobs  prompt positions whose log-probabilities this submission has sent
    is_earlier  the output ids come from an earlier stream of the client, not from a loss
    is_first    no attempt of it was lost, so that its cached tokens and queue time are the answer's
    is_moved    it was sent again since it waited elsewhere when another replica became ready
    target      that replica, until it was asked
    """

    indices: tuple[int, ...]
    numerics: Numerics | None = None
    wait_until: float | None = None
    tried: set[ReplicaInstance] = field(default_factory=set)
    request_id: RequestId | None = None
    replica: Replica | None = None
    submission: Submission | None = None
    updates: ReplicaStream | None = None
    epoch: int = -1
    num_read: int = 0
    num_prompt_logprobs: int = 0
    is_earlier: bool = False
    is_first: bool = True
    is_moved: bool = False
    target: Replica | None = None


class CallAttempts:
    """output_ids: per sequence, every id that was read, also if its text is held back. The reader adds them by `keep`"""

    def __init__(self, pool: ReplicaPool, call: PromptCall) -> None:
        num_sequences = call.request.params.n
        self._pool = pool
        self._call = call
        self._max_output_tokens = call.max_output_tokens
        self._open = set(range(num_sequences))
        self._groups = [SequenceGroup(tuple(range(num_sequences)))]
        self._reads: dict[asyncio.Task[list[SequenceUpdate]], SequenceGroup] = {}
        self._waits: set[asyncio.Task[Any]] = set()
        self._held_until: float | None = None
        self._handler: PlainRowHandler | None = None
        self.submissions = Submissions(num_sequences, pool.clock)
        self.replicas: list[str | None] = [None] * num_sequences
        self._numerics: Numerics = NO_NUMERICS
        self._num_read = 0
        self._num_prompt_logprobs = 0
        self._num_fruitless = 0
        self._last_loss: tuple[ConnectionKey | None, int] = (None, -1)
        self.output_ids = [array("i") for _ in range(num_sequences)]
        self.epoch = -1
        self.num_resumes = 0
        pool.resume_budget.deposit()

    # -- what the reader does ------------------------------------------------------------------------------------------------------

    async def batch(self) -> list[SequenceUpdate]:
        """Raises Unavailable when no replica takes the call, ReplicaLost when a call cannot be continued after a loss, and the error of a
        final rejection.
        """
        while self._groups:
            group, updates = await self._next()
            if updates:
                return updates
            self._drop(group)
        return []

    def keep(self, index: int, token_ids: Sequence[int]) -> int:
        kept = self.output_ids[index]
        room = self._max_output_tokens - len(kept)
        kept.extend(token_ids if len(token_ids) <= room else token_ids[:room])
        self._num_read += len(token_ids)
        return len(kept)

    def continue_earlier(self, numerics: Numerics) -> None:
        """Continue an earlier stream, before the first `batch` and after `keep` of its output ids."""
        self._numerics = numerics
        wait_until = self._pool.clock() + self._pool.failover_s
        required = numerics if any(self.output_ids) else None
        self._groups = [SequenceGroup((index,), required, wait_until, is_earlier=True, is_first=False) for index in sorted(self._open)]

    def end(self, index: int, finish: FinishReason | None) -> None:
        self._open.discard(index)
        self.submissions.end_sequence(index, finish)

    def finish(self, index: int, keep_tokens: int, reason: FinishReason) -> None:
        for group in self._groups:
            if index in group.indices and group.replica is not None and group.request_id is not None:
                group.replica.connection.finish(group.request_id, index, keep_tokens, reason)

    def handle_plain_rows(self, handler: PlainRowHandler | None) -> None:
        self._handler = handler
        for group in self._groups:
            if group.updates is not None:
                group.updates.plain_row_handler = handler

    def cancel(self) -> None:
        self._drop_all()
        for wait in self._waits:
            wait.cancel()

    async def close(self) -> None:
        self.cancel()
        tasks = list(self._reads)
        self._reads.clear()
        await end_tasks(tasks)

    @property
    def unread_bytes(self) -> int:
        return sum([group.updates.unread_bytes for group in self._groups if group.updates is not None])

    @property
    def numerics(self) -> Numerics:
        """Also after it is lost."""
        for group in self._groups:
            if group.updates is not None:
                return group.updates.numerics
        return self._numerics

    # -- reading -------------------------------------------------------------------------------------------------------------------

    async def _next(self) -> tuple[SequenceGroup, list[SequenceUpdate]]:
        if len(self._groups) == 1 and not self._reads:
            return self._groups[0], await self._read(self._groups[0])
        for group in self._groups:
            if group not in self._reads.values():
                self._reads[asyncio.create_task(self._read(group))] = group
        done, _ = await asyncio.wait(self._reads, return_when=asyncio.FIRST_COMPLETED)
        task = min(done, key=lambda read: read.cancelled() or read.exception() is None)  # an error drops the other groups, which then end
        return self._reads.pop(task), task.result()

    async def _read(self, group: SequenceGroup) -> list[SequenceUpdate]:
        while group in self._groups:
            if group.updates is None:
                await self._place(group)
                continue
            try:
                updates = await group.updates.batch()
            except Moved as moved:
                self._move(group, moved.replica)
                continue
            except Unavailable as error:  # clients get LOST; this error names sockets, and is its cause for the log
                self._lose(group, error)
                continue
            if updates and isinstance(updates[0], Rejected):
                await self._reroute(group, updates[0].error)
                continue
            read = [update for update in updates if isinstance(update, SequenceUpdate)]
            if group.submission is not None:
                group.submission.read(read, self._pool.clock)
            return [self._trimmed(group, update) for update in read]
        return []

    def _trimmed(self, group: SequenceGroup, update: SequenceUpdate) -> SequenceUpdate:
        if update.prompt_logprobs:
            begin = group.num_prompt_logprobs
            group.num_prompt_logprobs += len(update.prompt_logprobs)
            num_known = self._num_prompt_logprobs
            self._num_prompt_logprobs = max(num_known, group.num_prompt_logprobs)
            if num_known > begin:
                update = update._replace(prompt_logprobs=update.prompt_logprobs[num_known - begin :])
        if not group.is_first:
            update = update._replace(num_cached_tokens=None, queue_time_s=None, miss_reason=None)
        return update

    def _drop(self, group: SequenceGroup) -> None:
        if group.updates is not None:
            self._numerics = group.updates.numerics
        if group in self._groups:
            self._groups.remove(group)
            if group.submission is not None:
                is_open = self._open.intersection(group.indices)
                result = SubmissionResult.CANCELLED if is_open else self.submissions.result_of(group.indices)
                group.submission.end(self._pool.clock(), result)

    def _drop_all(self) -> None:
        self.submissions.close()
        for group in list(self._groups):
            self._drop(group)
            if group.replica is not None and group.request_id is not None:
                group.replica.connection.cancel(group.request_id)

    # -- submitting ----------------------------------------------------------------------------------------------------------------

    async def _place(self, group: SequenceGroup) -> None:
        """Raises Unavailable where no replica comes that takes it, ReplicaLost after a loss."""
        self.submissions.begin()
        while group in self._groups:
            try:
                self._submit(group)
                return
            except Unavailable as error:
                if group.wait_until is not None:
                    await self._wait(group, error)
                else:
                    await self._hold(group, error)

    def _submit(self, group: SequenceGroup) -> None:
        """Raises Unavailable."""
        whole = replace(self._call.request, epoch=self.epoch + 1)
        num_output, chunks = max(len(self.output_ids[index]) for index in group.indices), self._pool.chunks(whole)
        while True:
            replica, choice = self._chosen(group, whole, num_output, chunks)
            group.tried.add(replica.instance)
            request = whole if group.wait_until is None else self._resumed(group, whole)
            try:
                group.updates = replica.connection.submit(request)
            except Unavailable:
                continue
            group.submission = self.submissions.add(Submission(group.indices, choice, self._pool.note_sent(replica, chunks)))
            if self._call.unsent is not None:
                self._call.unsent.uncount()
            self.epoch += 1
            self.num_resumes += not (group.is_first or group.is_moved or group.is_earlier)
            group.replica, group.request_id, group.num_read = replica, request.request_id, self._num_read
            group.epoch = self.epoch
            group.num_prompt_logprobs = 0
            group.updates.plain_row_handler = self._handler
            group.updates.required_numerics = group.numerics
            for index in group.indices:
                self.replicas[index] = str(replica.name)
            return

    def _chosen(self, group: SequenceGroup, whole: EngineRequest, num_output: int, chunks: Sequence[int]) -> tuple[Replica, ReplicaChoice]:
        target, group.target = group.target, None
        if target is not None and (group.numerics is None or not why_not_resume(group.numerics, target.numerics)):
            return target, ReplicaChoice(target.name, CAME)
        return self._pool.pick(
            whole, num_output=num_output, tried=group.tried, numerics=group.numerics, session=self._call.session, chunks=chunks
        )

    def _resumed(self, group: SequenceGroup, whole: EngineRequest) -> EngineRequest:
        if whole.params.prompt_logprobs is not None and self._num_prompt_logprobs >= len(whole.prompt_ids) - 1:
            whole = replace(whole, params=whole.params.with_(prompt_logprobs=None))
        if len(group.indices) == len(self.output_ids):
            output_ids = tuple(self.output_ids[0])
            return whole if not output_ids else whole.resumed(0, output_ids, numerics_digest(group.numerics or {}))
        (index,) = group.indices
        if index != 0 and whole.params.prompt_logprobs is not None:
            whole = replace(whole, params=whole.params.with_(prompt_logprobs=None))
        request = replace(whole, request_id=RequestId(f"{whole.request_id}.{index}"))
        return request.resumed(index, self.output_ids[index], numerics_digest(group.numerics or {}))

    async def _reroute(self, group: SequenceGroup, error: Exception) -> None:
        """Raises the rejection's error where the group is not sent again."""
        group.updates = None
        if group.submission is not None:
            group.submission.end(self._pool.clock(), SubmissionResult.REJECTED, error)
        if not isinstance(error, Overloaded | Unavailable | RequestTooLarge):
            self._drop_all()
            raise error if isinstance(error, HeadraceError) else Unavailable(LOST)
        if (group.wait_until is None or group.is_moved) and len(group.tried) < MAX_TRIES:
            with suppress(Unavailable):
                self._submit(group)
                return
        if group.wait_until is not None:
            await self._wait(group, error)
        elif isinstance(error, Unavailable):
            await self._hold(group, error)
        else:
            self._drop_all()
            raise error

    async def _hold(self, group: SequenceGroup, error: Unavailable) -> None:
        """No replica took it: it waits again where all fell asleep, were retired or were lost since it was held. Raises Unavailable."""
        call, now = self._call, self._pool.clock()
        terms, hold = HeldTerms.of(call.request, call.max_output_tokens), None
        try:
            hold = None if call.has_fallback else self._pool.hold_again(terms, call.unsent)
            if hold is None:
                raise error
            self._held_until = self._held_until or now + hold.limit_s
            group.tried.clear()
            await self._wait_for(asyncio.create_task(asyncio.wait((hold.released,))), self._held_until - now)
            if hold.released.done():
                hold.released.result()
            elif group in self._groups:
                raise error
        except Unavailable:
            self._drop_all()
            raise
        finally:
            if hold is not None:
                hold.leave()

    def _move(self, group: SequenceGroup, target: Replica) -> None:
        """Nothing of these sequences was read: they are sent again as they were."""
        assert group.submission is not None
        group.submission.end(self._pool.clock(), SubmissionResult.MOVED)
        self._drop(group)
        wait_until = self._pool.clock() + self._pool.failover_s
        moved = SequenceGroup(group.indices, group.numerics, wait_until, is_first=group.is_first, is_moved=True, target=target)
        self._groups.append(moved)

    # -- after a loss --------------------------------------------------------------------------------------------------------------

    def _lose(self, group: SequenceGroup, error: Unavailable) -> None:
        """Raises ReplicaLost if they must not wait."""
        assert group.updates is not None
        assert group.submission is not None
        group.submission.end(self._pool.clock(), SubmissionResult.LOST)
        self._numerics = numerics = group.updates.numerics
        self._drop(group)
        indices = [index for index in group.indices if index in self._open]
        if not indices:
            return
        wait_s = self._pool.failover_s
        has_output = any(self.output_ids)
        required = numerics if has_output or self._num_prompt_logprobs else None  # all of an answer is of one model
        if not wait_s or not self._may_resume_again(group):
            self._give_up(required, error)
        wait_until = self._pool.clock() + wait_s
        if len(indices) == len(self.output_ids) and not has_output:
            self._groups.append(SequenceGroup(group.indices, required, wait_until, is_first=False))
            return
        self._groups += [SequenceGroup((index,), required, wait_until, is_first=False) for index in indices]

    def _may_resume_again(self, group: SequenceGroup) -> bool:
        """Several groups at one lost connection count as one loss."""
        assert group.submission is not None
        lost, (connection, last_epoch) = group.submission.attempt.connection, self._last_loss
        if lost == connection and group.epoch <= last_epoch:
            return True
        self._last_loss = lost, self.epoch
        self._num_fruitless = 0 if self._num_read > group.num_read else self._num_fruitless + 1
        if self._num_fruitless < 2:
            return True
        return self._num_fruitless < MAX_FRUITLESS_LOSSES and self._pool.resume_budget.withdraw()

    async def _wait(self, group: SequenceGroup, error: Exception) -> None:
        assert group.wait_until is not None
        remaining_s = group.wait_until - self._pool.clock()
        is_vain = self._pool.is_closed or (self._call.has_fallback and not self._num_read)
        if remaining_s <= TIMER_EARLY_S or is_vain:
            self._give_up(group.numerics, error)
        group.tried.clear()
        await self._wait_for(asyncio.create_task(self._pool.wait_for_change()), remaining_s)

    async def _wait_for(self, wait: asyncio.Task[Any], timeout_s: float) -> None:
        self._waits.add(wait)
        try:
            await asyncio.wait((wait,), timeout=timeout_s)
        finally:
            self._waits.discard(wait)
            wait.cancel()

    def _give_up(self, numerics: Numerics | None, error: Exception) -> NoReturn:
        self._drop_all()
        request = self._call.request
        why_not = self._pool.why_not_resume(numerics, request.adapter, request.adapter_digest)
        raise ReplicaLost(LOST, why_not_resume=why_not) from error
