"""The engine's output after a commit, alike for the wire and the offline API; and why a sequence ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from headrace.core.ids import RequestId
from headrace.core.plan import TokenLogprobs

MAX_ENTERED = 64


class FinishReason(StrEnum):
    """OpenAI's values where OpenAI has one."""

    STOP = "stop"
    """An end token, a stop token id or (decided in the gateway) a stop string."""
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"

    @property
    def is_answer(self) -> bool:
        """Only these values may be sent as OpenAI's `finish_reason`."""
        return self in (FinishReason.STOP, FinishReason.LENGTH)


FINISH_WORDS = {reason: reason.value for reason in FinishReason}
"""A look-up costs less than an enum's `value`, which is a function call."""


class MissReason(StrEnum):
    """Why no more of a prompt was taken from the prefix cache."""

    NEVER_SEEN = "never_seen"
    """The engine has not computed these tokens after this beginning, or has forgotten that it did."""
    EVICTED = "evicted"
    ANOTHER_SALT = "another_salt"
    """The tenant sent these tokens under another cache salt; said of a prompt's first block alone."""
    LESS_THAN_A_BLOCK = "less_than_a_block"
    """What is left does not fill a block, or is the last token, which is always computed."""
    NOT_USED = "not_used"
    """Caching is off, or the request's log-probabilities of the prompt need every token computed."""


class StageSeconds(NamedTuple):
    """Seconds of a sequence's time in the engine, by stage; the sum is the time from arrival to end.

    queue      until the sequence is first given a slot, prerequisites included
    prefill    from then, or from when it runs again after a preemption, until the next token
    preempted  from the loss of its blocks until it has a slot again
    stalled    while it has a slot, and steps are made without it for want of blocks or budget
    """

    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    preempted: float = 0.0
    stalled: float = 0.0


STAGES = StageSeconds._fields
"""Names of the stages, by index."""


class SequenceUpdate(NamedTuple):
    """New tokens of one sequence, or its end. Create it with keyword arguments.

    A tuple, because one is made per sequence and step, and a frozen dataclass takes five times as long.

    index            sequence within the request
    token_ids        possibly none; an end token that finished the sequence IS included
    logprobs         one per token, or empty; columns (`plan.LogprobColumns`) if it came over the wire
    prompt_logprobs  likewise, for prompt positions 1.. in order, in one or more updates
    finish           set exactly once, on the last update
    stop_token_id    the token that ended it, if one did (an end token's text is not part of the answer)
    error            message beside FinishReason.ERROR
    num_cached_tokens  of the prompt, from the prefix cache; set on the update that carries the first token
    queue_time_s     from arrival at the engine to the first slot; set on the same update
    miss_reason      why the token after the cached ones was not cached; set on the same update, None from an earlier engine
    stages           set on the last update
    entered          beside `stages`: (index of the stage, seconds after arrival at which it was entered), in order, from the end of the
                     queue on; at most MAX_ENTERED, of which the last then stands for all that followed. Empty from an earlier engine
    """

    request_id: RequestId
    epoch: int
    index: int  # type: ignore[assignment]  # hides a tuple's search, which means nothing here
    token_ids: tuple[int, ...] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    num_cached_tokens: int | None = None
    queue_time_s: float | None = None
    stages: StageSeconds | None = None
    entered: tuple[tuple[int, float], ...] = ()
    miss_reason: MissReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A whole request was refused before any of it ran; the gateway may send it elsewhere. error: InvalidRequest or Overloaded."""

    request_id: RequestId
    epoch: int
    error: Exception
