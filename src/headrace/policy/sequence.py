"""Describes a sequence as the scheduler sees it: its counts, blocks and state.

`num_expected - num_planned` is the number of tokens that could be computed next (`num_uncomputed`), for prefill, decode and resume alike.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple

from headrace.core.hashing import BlockHash
from headrace.core.ids import PreparationId, RequestId, SeqId
from headrace.core.request import EngineRequest
from headrace.core.update import MAX_ENTERED, FinishReason, MissReason
from headrace.policy.speculation import DraftRecord

NO_SLOT = -1
NO_PREPARATION = PreparationId(0)
LEAST_PROGRESS_TOKENS = 64

LONG_PROMPT_SLICE_TOKENS = 16 << 10
"""Each of its turns costs others the time in which all its blocks get free at once, and itself the wait for them: slices are long."""

NO_DRAFTS = array("i")
"""Shared by all sequences: never append to it."""


class Stage(IntEnum):
    QUEUE = 0
    PREFILL = 1
    DECODE = 2
    PREEMPTED = 3
    STALLED = 4


QUEUE, PREFILL, DECODE, PREEMPTED, STALLED = Stage


class RunningFacts(NamedTuple):
    """counted  1 if every committed token counts as generated; 0 with stop strings, where the gateway reports at the end how many count"""

    slot: int
    plan_epoch: int
    request_id: RequestId
    epoch: int
    index: int  # type: ignore[assignment]  # hides a tuple's search, which means nothing here
    counted: int
    mask_slot: int
    adapter_slot: int


Appended = tuple[int, FinishReason | None, int | None]


class SeqState(Enum):
    BLOCKED = "blocked"
    """Has unmet prerequisites; takes no budget, sits in no queue."""
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


BLOCKED, WAITING, RUNNING, DONE = SeqState
"""Looking up an Enum's member takes 0.15 us, and the scheduler asks for states many times per step."""


NO_FACTS = RunningFacts(NO_SLOT, 0, RequestId(""), 0, 0, 0, NO_SLOT, 0)


@dataclass(slots=True, eq=False)
class Sequence:
    """limit        length at which the sequence ends
    plan_epoch  raised by every preemption: rows planned with a lower one do not count as computed any more
    num_reached  most positions that were computed before a preemption
    preemptible_from  computed positions from which on the sequence may be preempted for another one
    blocks       per KV group, block ids in order; 0 where a window has passed
    allocated_until    positions below this may be written into the sequence's blocks; 0 = ask the KV manager
    bulk_decode_limit  below this position each next token is planned in bulk: the sequence decodes, has blocks and is not complete;
                       0 = check the sequence in full
    bulk_commit_limit  below this computed length a commit brings one token and nothing else: no end, no full block, no block before the
                       window; 0 = check the sequence in full
    end_ids      tokens that end the sequence once it has `min_tokens` outputs. With a grammar they end it at any time: an end token is then
                 sampled early only where no other token is allowed
    drafts       that follow its tokens and may stand in its next row
    waits_for_commit  no row is planned while another one is in flight: its next position depends on what that row gives
    num_prompt_logprobs_emitted  prompt positions whose log-probabilities were emitted; a prompt computed again after a preemption does
                                 not emit them again
    stage, stage_since, stage_seconds  the current stage, when it began, and the seconds spent in each stage before it
    stages_entered  as `core.update.SequenceUpdate.entered`
    adapter_slot  place of the request's adapter, known before the sequence may start, until the request ends; 0: the base model
    num_charged  positions that the queue policy has counted as service, or that others computed
    has_aged     the sequence started while a higher class waited, so no sequence of a higher class preempts it
    """

    seq_id: SeqId
    request: EngineRequest
    index: int
    arrival: float
    tokens: array[int]
    num_prompt: int
    limit: int
    state: SeqState = BLOCKED
    slot: int = NO_SLOT
    num_computed: int = 0
    num_planned: int = 0
    num_expected: int = 0
    num_charged: int = 0
    plan_epoch: int = 0
    num_reached: int = 0
    preemptible_from: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    allocated_until: int = 0
    bulk_decode_limit: int = 0
    bulk_commit_limit: int = 0
    end_ids: frozenset[int] = frozenset()
    facts: RunningFacts = NO_FACTS
    drafts: array[int] = field(default_factory=lambda: NO_DRAFTS)
    waits_for_commit: bool = False
    draft_record: DraftRecord = field(default_factory=DraftRecord)
    registered: list[int] = field(default_factory=list)
    root: BlockHash = field(default_factory=lambda: BlockHash(b""))
    hashes: list[BlockHash] = field(default_factory=list)
    missing: dict[str, float] = field(default_factory=dict)
    preparation_id: PreparationId = NO_PREPARATION
    adapter_slot: int = 0
    has_aged: bool = False
    num_queued: int = 0
    num_waiting_bytes: int = 0
    key: float = 0.0
    num_cached: int = 0
    miss_reason: MissReason | None = None
    stage: Stage = QUEUE
    stage_since: float = 0.0
    stage_seconds: list[float] = field(default_factory=lambda: [0.0] * len(Stage))
    stage_unstalled: Stage = PREFILL
    stages_entered: list[tuple[int, float]] = field(default_factory=list)
    first_token_emitted: bool = False
    num_prompt_logprobs_emitted: int = 0

    # what changes its counts

    def grant(self, count: int, samples: int) -> None:
        """For rows that pass in bulk, `Planner._plan_decodes` and `Scheduler._commit_decodes` write the same fields in place: a method
        call per row makes a step of 64 rows 7 % slower.
        """
        self.num_planned += count
        self.num_expected += samples
        self.drafts = NO_DRAFTS
        self.waits_for_commit = self.waits_for_commit or samples > 1
        self.bulk_decode_limit = min(self.allocated_until, self.limit - 1) if samples == 1 and not self.waits_for_commit else 0

    def ungrant(self, samples: int) -> None:
        self.num_expected -= samples

    def roll_back(self, start: int) -> None:
        self.num_planned = start
        self.bulk_decode_limit = 0

    def commit(self, num_computed: int) -> None:
        """The KV of the first `num_computed` positions is in memory."""
        self.num_computed = num_computed

    def append(self, token_ids: array[int]) -> Appended:
        kept, reason, stop_token = 0, None, None
        for token in token_ids:
            kept += 1
            self.tokens.append(token)
            if token in self.end_ids and (self.num_outputs >= self.request.params.min_tokens or self.request.grammar is not None):
                reason, stop_token = FinishReason.STOP, token
                break
            if len(self.tokens) >= self.limit:
                reason = FinishReason.LENGTH
                break
        self.num_expected += kept
        return kept, reason, stop_token

    def draft(self, drafts: array[int]) -> None:
        """The caller asked `follows_all`."""
        self.drafts = drafts
        self.bulk_decode_limit = 0

    def discard_rows(self) -> None:
        self.plan_epoch += 1
        self.facts = self._facts()
        self.waits_for_commit = True
        self.bulk_commit_limit = 0

    def start_after(self, num_tokens: int) -> None:
        self.num_computed = self.num_planned = self.num_charged = num_tokens

    def take_uncharged(self) -> int:
        """Tokens planned since the last call, which the queue policy counts now; negative when rows were rolled back."""
        count, self.num_charged = self.num_planned - self.num_charged, self.num_planned
        return count

    def allocate(self, end: int) -> None:
        self.allocated_until = end

    def reset(self) -> None:
        self.num_reached = max(self.num_reached, self.num_computed)
        self.start_after(0)
        self.drafts, self.waits_for_commit = NO_DRAFTS, False
        self.allocated_until = self.bulk_decode_limit = self.bulk_commit_limit = 0

    # what changes its state

    def start(self, slot: int, now: float) -> None:
        """A preempted sequence can be preempted for others again once it has given as many tokens as it has to compute anew, so that
        preemption for others never doubles its cost; within a long prompt, once it has computed as many new positions, and a slice."""
        if self.plan_epoch:
            length = len(self.tokens)
            reached = length if self.num_reached >= self.num_prompt else self.num_reached
            num_anew = reached - self.num_computed
            self.preemptible_from = min(length + max(LEAST_PROGRESS_TOKENS, num_anew), reached + max(LONG_PROMPT_SLICE_TOKENS, num_anew))
        self.slot = slot
        self.state = RUNNING
        self.facts = self._facts()
        self.enter(PREFILL, now)

    def _facts(self) -> RunningFacts:
        request = self.request
        counted = int(not request.params.stop)
        return RunningFacts(
            self.slot, self.plan_epoch, request.request_id, request.epoch, self.index, counted, self.mask_slot, self.adapter_slot
        )

    @property
    def mask_slot(self) -> int:
        return NO_SLOT if self.request.grammar is None else self.slot

    def wait(self) -> None:
        self.state = WAITING

    def preempt(self, now: float) -> None:
        """Rows planned until now do not count as computed."""
        self.plan_epoch += 1
        self.state = WAITING
        self.enter(PREEMPTED, now)

    def end(self) -> None:
        self.state = DONE

    # where its time goes: nothing here runs once per token

    def enter(self, stage: Stage, now: float) -> None:
        self.stage_seconds[self.stage] += now - self.stage_since
        if stage is not self.stage and len(self.stages_entered) < MAX_ENTERED:
            self.stages_entered.append((int(stage), now - self.arrival))
        self.stage, self.stage_since = stage, now

    def stall(self, now: float) -> None:
        if self.stage is not STALLED:
            self.stage_unstalled = self.stage
            self.enter(STALLED, now)

    def unstall(self, now: float) -> None:
        if self.stage is STALLED:
            self.enter(self.stage_unstalled, now)

    def end_prefill(self, now: float) -> None:
        if self.stage is PREFILL:
            self.enter(DECODE, now)
        elif self.stage is STALLED:
            self.stage_unstalled = DECODE

    # questions

    @property
    def has_rows_in_flight(self) -> bool:
        return self.num_planned > self.num_computed

    @property
    def num_uncomputed(self) -> int:
        """Tokens that could be computed now, drafts not counted."""
        if self.waits_for_commit and not self.follows_all:
            return 0
        return self.num_expected - self.num_planned

    @property
    def follows_all(self) -> bool:
        """Whether what follows its tokens follows all that was planned for it."""
        return not (self.has_rows_in_flight or self.num_in_flight)

    @property
    def num_in_flight(self) -> int:
        """Sampled ids that rows in flight give, and that are not in `tokens` yet."""
        return self.num_expected - len(self.tokens)

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_first(self) -> bool:
        """The first sequence of a request computes the prompt for all and emits the prompt's log-probabilities."""
        return self.index == self.request.first_index

    @property
    def is_complete(self) -> bool:
        return self.num_expected >= self.limit

    @property
    def uses_prefix_cache(self) -> bool:
        return self.request.prefix_caching

    @property
    def needs_prompt_logprobs(self) -> bool:
        return self.request.params.prompt_logprobs is not None
