"""A sequence as the policy floor sees it: counts, blocks and where it stands.

    known     = len(tokens)            ids whose value is here (prompt, committed outputs)
    planned   >= computed              positions handed to a plan / whose plan is committed
    promised  >= known                 length once every step in flight is committed: the runner has, or will have, ids we do not

`promised - planned` is what could be computed next, for prefill, decode and resume alike.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from headrace.core.hashing import BlockHash
from headrace.core.ids import SeqId
from headrace.core.request import EngineRequest

NO_SLOT = -1


class SeqState(Enum):
    BLOCKED = "blocked"
    """Has unmet prerequisites; takes no budget, sits in no queue."""
    WAITING = "waiting"
    """In the queue: new, or preempted."""
    RUNNING = "running"
    """Holds a slot and blocks."""
    DONE = "done"


@dataclass(slots=True, eq=False)
class Sequence:
    """One token stream. Changed by the scheduler (counts, state) and the KV manager (blocks, hashes) only.

    limit        length at which it ends: prompt + max_tokens, at most max_model_len
    incarnation  raised by every preemption: rows planned by an earlier one do not count as computed any more
    blocks       per KV group, block ids in order; 0 where a window has passed
    hashes       identities of its full blocks, as far as they were needed
    room         positions below it may be written without asking the KV manager; 0 = ask
    run_until    positions below it are planned in bulk: it decodes, has `room` and is not complete; 0 = look at it
    calm_until   computed counts below it bring a token and nothing else: no end, no full block, no window passed; 0 = look at it
    end_ids      tokens that end it, `min_tokens` apart
    registered   per KV group, leading blocks already offered to the prefix cache
    num_prompt_told  prompt log-probabilities delivered so far: a preempted prompt is computed again, not told again
    key          the queue policy's order, smaller first; set when it is pushed
    """

    seq_id: SeqId
    request: EngineRequest
    index: int
    arrival: float
    tokens: array[int]
    num_prompt: int
    limit: int
    state: SeqState = SeqState.BLOCKED
    slot: int = NO_SLOT
    computed: int = 0
    planned: int = 0
    promised: int = 0
    incarnation: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    room: int = 0
    run_until: int = 0
    calm_until: int = 0
    end_ids: frozenset[int] = frozenset()
    registered: list[int] = field(default_factory=list)
    root: BlockHash = field(default_factory=lambda: BlockHash(b""))
    hashes: list[BlockHash] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    key: float = 0.0
    num_cached: int = 0
    first_scheduled: float | None = None
    told_first: bool = False
    num_prompt_told: int = 0

    @property
    def wanted(self) -> int:
        """Tokens that could be computed now."""
        return self.promised - self.planned

    @property
    def pending(self) -> int:
        """Sampled ids still in flight."""
        return self.promised - len(self.tokens)

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_complete(self) -> bool:
        """Everything it may ever produce is sampled already, committed or not."""
        return self.promised >= self.limit

    @property
    def uses_prefix_cache(self) -> bool:
        return self.request.prefix_caching

    @property
    def scores_prompt(self) -> bool:
        return self.request.params.prompt_logprobs is not None
