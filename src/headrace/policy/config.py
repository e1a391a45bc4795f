"""Holds a scheduler's limits and the waits that admission allows."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """
    max_waiting_bytes        memory that waiting requests may hold
    depth                    most steps in flight: planned, and not committed
    is_pipeline              stages compute the steps in flight at the same time: a sequence whose next token is in flight is in no other
                             step, and those that decode are shared out over `depth` steps
    num_speculative_tokens   most tokens drafted to follow a token; 0: the runner drafts none
    has_free_drafts          drafting takes no time that counts; else it takes that of a draft model
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_waiting: int = 1024
    max_waiting_bytes: int = 256 << 20
    eos_token_ids: tuple[int, ...] = ()
    queue_policy: str = "priority"
    enable_chunked_prefill: bool = True
    depth: int = 1
    is_pipeline: bool = False
    costly_context: int = 0
    num_speculative_tokens: int = 0
    has_free_drafts: bool = True

    @property
    def steps_per_token(self) -> int:
        """From one token of a sequence to its next one."""
        return self.depth if self.is_pipeline else 1

    @property
    def uncommitted_tokens(self) -> int:
        """Tokens that may be planned for one sequence and not yet committed."""
        step = self.max_num_batched_tokens if self.enable_chunked_prefill else self.max_model_len
        return self.depth * step


GOAL_SHARE = 0.5
"""Part of a tier's `ttft_ms` that a request may be predicted to wait."""

SHORT_WAIT_S = 0.5
"""The wait in seconds that is always allowed."""

PEAK_WAIT_S, PEAK_ANSWERS = 10.0, 10.0
"""The wait in seconds that is allowed in a peak, and the number of answers whose time is allowed where that is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRules:
    max_wait_s: float = option(
        60.0,
        "Longest predicted wait in seconds that any request joins; with a longer one it is refused with 429. "
        "The wait that load allows is shorter where answers are quick (docs/tenancy.md, Busy models).",
        above=0.0,
    )

    def short_wait_s(self, answer_s: float) -> float:
        """The wait in seconds that is allowed in an overload. answer_s: predicted seconds of a mean answer by itself"""
        return min(self.max_wait_s, max(SHORT_WAIT_S, answer_s))

    def wait_bound_s(self, answer_s: float, ttft_goal_s: float | None, *, is_overloaded: bool) -> float:
        """Longest predicted wait in seconds that a request of any class may join. ttft_goal_s: the tier's TTFT goal, None: it has none"""
        short_s = self.short_wait_s(answer_s)
        bound_s = short_s if is_overloaded else max(PEAK_WAIT_S, PEAK_ANSWERS * answer_s)
        return min(bound_s, self.longest_s(ttft_goal_s))

    def longest_s(self, ttft_goal_s: float | None) -> float:
        """Whatever the load is."""
        return self.max_wait_s if ttft_goal_s is None else min(self.max_wait_s, GOAL_SHARE * ttft_goal_s)
