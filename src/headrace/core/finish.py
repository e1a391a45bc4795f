"""Why a sequence ended. Values are OpenAI's where OpenAI has one."""

from __future__ import annotations

from enum import StrEnum


class FinishReason(StrEnum):
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
