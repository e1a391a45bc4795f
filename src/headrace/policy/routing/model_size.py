"""Decides whether a request is for a small or a large model."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.core.request import PriorityClass
from headrace.policy.routing.routes import SizeHint

LONG_PROMPT_TOKENS = 4000
"""Above it a request is for the large model whatever it asks: small models lose what stands in the middle of long prompts."""

LEAST_QUESTION: Mapping[PriorityClass, float] = {PriorityClass.PREMIUM: 0.8, PriorityClass.STANDARD: 0.6, PriorityClass.BATCH: 0.4}
"""A small model answers from this probability on that it will do. With prices 8 times apart a wrong small answer costs a second request or
a lost user, and a wrong large one 7 times the price: premium pays rather for the large one, and batch risks the small one.
"""


def size_for(task: str, question: float, *, num_tokens: int, priority: PriorityClass) -> SizeHint:
    """task, question: from `headrace.text.classifier`; num_tokens: an estimate of the whole prompt, with its conversation and tools"""
    if num_tokens > LONG_PROMPT_TOKENS:
        return SizeHint(True, f"the prompt has about {num_tokens} tokens, more than {LONG_PROMPT_TOKENS}")
    least = LEAST_QUESTION[priority]
    is_large = question < least
    compared = "less than" if is_large else "at least"
    reason = f"classified as {task}: a small model will do with probability {question:.2f}"
    return SizeHint(is_large, f"{reason}, {compared} the {least} of {priority.name.lower()}")
