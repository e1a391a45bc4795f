"""A sequence as the policy floor sees it: counts, blocks and where it stands.

    len(tokens)                     ids whose value is known here: prompt and committed outputs
    num_planned   >= num_computed   positions handed to a plan / whose plan is committed
    num_expected  >= len(tokens)    length once every step in flight is committed: the runner has, or will have, ids unknown here

`num_expected - num_planned` is what could be computed next (`num_uncomputed`), for prefill, decode and resume alike.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple

from headrace.core.finish import FinishReason
from headrace.core.hashing import BlockHash
from headrace.core.ids import AdmissionId, RequestId, SeqId
from headrace.core.request import EngineRequest

NO_SLOT = -1
NO_ADMISSION = AdmissionId(0)
"""Nothing was prepared for its request."""
NO_DRAFTS = array("i")
"""Shared: never appended to."""


class Stage(IntEnum):
    """What its time is spent on: places of `core.update.StageSeconds`."""

    QUEUE = 0
    PREFILL = 1
    DECODE = 2
    PREEMPTED = 3
    STALLED = 4


QUEUE, PREFILL, DECODE, PREEMPTED, STALLED = Stage
"""The same by shorter names, as those of `SeqState` below."""


class RunningFacts(NamedTuple):
    """What does not change about a sequence while it runs, for the columns of a step's rows.

    counted  1 where committed tokens count as generated, 0 where the text side says at the end how many do (stop strings)
    """

    slot: int
    incarnation: int
    request_id: RequestId
    epoch: int
    index: int  # type: ignore[assignment]  # hides a tuple's search, which means nothing here
    counted: int


Appended = tuple[int, FinishReason | None, int | None]
"""What became of a row's tokens: how many were kept, why the last one ends the sequence if it does, and that one if it is an end token."""


class SeqState(Enum):
    BLOCKED = "blocked"
    """Has unmet prerequisites; takes no budget, sits in no queue."""
    WAITING = "waiting"
    """In the queue: new, or preempted."""
    RUNNING = "running"
    """Holds a slot and blocks."""
    DONE = "done"


BLOCKED, WAITING, RUNNING, DONE = SeqState
"""The same by shorter names: to look up an Enum's member takes 0.15 us, and the scheduler asks for states many times per step."""


NO_FACTS = RunningFacts(NO_SLOT, 0, RequestId(""), 0, 0, 0)
"""Of a sequence that never ran."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One token stream. Its counts and states change through the methods below; its blocks and hashes are the KV manager's.

    limit        length at which it ends: prompt + max_tokens, at most max_model_len
    incarnation  raised by every preemption: rows planned by an earlier one do not count as computed any more
    blocks       per KV group, block ids in order; 0 where a window has passed
    hashes       identities of its full blocks, as far as they were needed
    allocated_until    positions below it may be written without asking the KV manager; 0 = ask
    bulk_decode_limit  positions below it are planned in bulk: it decodes, has blocks and is not complete; 0 = check it
    bulk_commit_limit  computed counts below it bring a token and nothing else: no end, no full block, no window passed; 0 = check it
    end_ids      tokens that end it, `min_tokens` apart
    facts        what a step's columns say of it; new when it starts or its rows are disowned
    drafts       ids drafted to follow its last known one; the next row that computes it verifies them
    waits_for_commit  it is planned only while no row of it is in flight: it is drafted for, or one of its rows gave too few tokens
    missing      unmet prerequisites, each with the seconds it may take from arrival
    admission    its request's stay, where something was prepared for it
    registered   per KV group, leading blocks already offered to the prefix cache
    num_prompt_logprobs_emitted  a preempted prompt is computed again, its log-probabilities are not emitted again
    stage, stage_since, stage_seconds  where its time goes: what it does now, since when, and the sums of what is over
    stage_unstalled  what it returns to from STALLED
    key          the queue policy's order, smaller first; set when it is pushed
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
    incarnation: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    allocated_until: int = 0
    bulk_decode_limit: int = 0
    bulk_commit_limit: int = 0
    end_ids: frozenset[int] = frozenset()
    facts: RunningFacts = NO_FACTS
    drafts: array[int] = field(default_factory=lambda: NO_DRAFTS)
    waits_for_commit: bool = False
    registered: list[int] = field(default_factory=list)
    root: BlockHash = field(default_factory=lambda: BlockHash(b""))
    hashes: list[BlockHash] = field(default_factory=list)
    missing: dict[str, float] = field(default_factory=dict)
    admission: AdmissionId = NO_ADMISSION
    key: float = 0.0
    num_cached: int = 0
    stage: Stage = QUEUE
    stage_since: float = 0.0
    stage_seconds: list[float] = field(default_factory=lambda: [0.0] * len(Stage))
    stage_unstalled: Stage = PREFILL
    first_token_emitted: bool = False
    num_prompt_logprobs_emitted: int = 0

    # what changes its counts

    def grant(self, count: int, samples: int) -> None:
        """A plan computes its next `count` positions; `samples` tokens come out of them.

        `Planner._plan_decodes` and `Scheduler._commit_decodes` write the same fields in place for rows that pass in bulk: a method call per
        row there makes a step of 64 rows 7 % dearer (62 us instead of 58, bench/scheduler.py).
        """
        self.num_planned += count
        self.num_expected += samples
        self.drafts = NO_DRAFTS
        self.bulk_decode_limit = min(self.allocated_until, self.limit - 1) if samples == 1 and not self.waits_for_commit else 0

    def ungrant(self, samples: int) -> None:
        """A row that would have given `samples` tokens is over: committed (what it gave is appended next), or rolled back."""
        self.num_expected -= samples

    def roll_back(self, start: int) -> None:
        """Positions from `start` on are not computed by the plans that were to."""
        self.num_planned = start
        self.bulk_decode_limit = 0

    def commit(self, num_computed: int) -> None:
        """The KV of its first `num_computed` positions is in memory. What that brings has yet to be checked."""
        self.num_computed = num_computed

    def append(self, token_ids: array[int]) -> Appended:
        """Sampled tokens are known, as far as they reach before one ends the sequence."""
        kept, reason, stop_token = 0, None, None
        for token in token_ids:
            kept += 1
            self.tokens.append(token)
            if token in self.end_ids and self.num_outputs >= self.request.params.min_tokens:
                reason, stop_token = FinishReason.STOP, token
                break
            if len(self.tokens) >= self.limit:
                reason = FinishReason.LENGTH
                break
        self.num_expected += kept
        return kept, reason, stop_token

    def draft(self, drafts: array[int]) -> None:
        """Its last committed row came with these. They follow its last token, and are of no use when another row is in flight already."""
        self.waits_for_commit = self.waits_for_commit or bool(drafts)
        self.drafts = NO_DRAFTS if self.is_in_flight or self.num_in_flight else drafts
        if self.waits_for_commit:
            self.bulk_decode_limit = self.bulk_commit_limit = 0

    def disown_rows(self) -> None:
        """A row gave fewer tokens than the rows in flight were planned on: these do not count as computed, and come first."""
        self.incarnation += 1
        self.facts = self._facts()
        self.waits_for_commit = True
        self.bulk_commit_limit = 0

    def start_behind(self, num_tokens: int) -> None:
        """Its first `num_tokens` positions are computed already, by another sequence."""
        self.num_computed = self.num_planned = num_tokens

    def allocate(self, end: int) -> None:
        """Its blocks hold positions below `end`, and may be written."""
        self.allocated_until = end

    def reset(self) -> None:
        """It holds no block any more: nothing of it is computed."""
        self.start_behind(0)
        self.drafts, self.waits_for_commit = NO_DRAFTS, False
        self.allocated_until = self.bulk_decode_limit = self.bulk_commit_limit = 0

    # what changes its state

    def start(self, slot: int, now: float) -> None:
        self.slot = slot
        self.state = RUNNING
        self.facts = self._facts()
        self.enter(PREFILL, now)

    def _facts(self) -> RunningFacts:
        request = self.request
        return RunningFacts(self.slot, self.incarnation, request.request_id, request.epoch, self.index, int(not request.params.stop))

    def wait(self) -> None:
        self.state = WAITING

    def preempt(self, now: float) -> None:
        """It runs again later, from what the prefix cache gives back. Rows planned until now do not count as computed any more."""
        self.incarnation += 1
        self.state = WAITING
        self.enter(PREEMPTED, now)

    def end(self) -> None:
        self.state = DONE

    # where its time goes: nothing here runs once per token

    def enter(self, stage: Stage, now: float) -> None:
        """From `now` on its time is spent on `stage`."""
        self.stage_seconds[self.stage] += now - self.stage_since
        self.stage, self.stage_since = stage, now

    def stall(self, now: float) -> None:
        """A step is made without it."""
        if self.stage is not STALLED:
            self.stage_unstalled = self.stage
            self.enter(STALLED, now)

    def unstall(self, now: float) -> None:
        """A step has it again."""
        if self.stage is STALLED:
            self.enter(self.stage_unstalled, now)

    def end_prefill(self, now: float) -> None:
        """A token came: the first one, or the first since it runs again."""
        if self.stage is PREFILL:
            self.enter(DECODE, now)
        elif self.stage is STALLED:
            self.stage_unstalled = DECODE

    # questions

    @property
    def is_in_flight(self) -> bool:
        """A plan that computes some of its positions is not committed yet."""
        return self.num_planned > self.num_computed

    @property
    def num_uncomputed(self) -> int:
        """Tokens that could be computed now, drafted ones apart."""
        if self.waits_for_commit and (self.is_in_flight or self.num_in_flight):
            return 0
        return self.num_expected - self.num_planned

    @property
    def num_in_flight(self) -> int:
        """Sampled ids still in flight."""
        return self.num_expected - len(self.tokens)

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_first(self) -> bool:
        """Of its request: it computes the prompt that the others share, and its updates carry the prompt's log-probabilities."""
        return self.index == self.request.first_index

    @property
    def is_complete(self) -> bool:
        """Everything it may ever produce is sampled already, committed or not."""
        return self.num_expected >= self.limit

    @property
    def uses_prefix_cache(self) -> bool:
        return self.request.prefix_caching

    @property
    def scores_prompt(self) -> bool:
        return self.request.params.prompt_logprobs is not None
