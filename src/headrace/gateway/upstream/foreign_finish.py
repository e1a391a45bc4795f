"""Words for the end of an output -> a finish reason. Servers have many for the same few ends, in any letter case.

A word of failure breaks the answer, since its text may be cut off. A word that is not known says nothing: the answer counts as complete
where the server shows in another way that it ended regularly (`foreign_answer`), and the client gets the word as `stop_reason`.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.core.finish import FinishReason
from headrace.gateway.upstream.foreign_errors import BrokenStream

MAX_WORD_CHARS = 64
"""Most characters that are shown of a word that is not known."""


def _plain(word: str) -> str:
    """The word without what is neither a letter nor a digit: `max_tokens`, `MAX_TOKENS` and `maxTokens` are one word."""
    return "".join(filter(str.isalnum, word)).lower().removeprefix("finishreason")


def _words(*lines: str) -> frozenset[str]:
    return frozenset([_plain(word) for line in lines for word in line.split()])


RUNNING = _words("null none unspecified not_finished in_progress running generating") | {""}
"""Words that some servers send before the end."""

STOPPED = _words(
    "stop stopped eos eos_token end_of_sequence end_of_turn end_of_text end_turn eot eom end ended",
    "stop_sequence stop_sequences stop_string stop_str stop_word stop_words stop_token stop_tokens stop_criteria_met",
    "normal natural complete completed done finish finished final success succeeded",
)
CALLED = _words("tool_calls tool_call tool_use tool_uses function_call function_calls")
"""With these words a server says that its calls are complete, also where a stop string or a stop token ended the output."""

LENGTH = _words(
    "length max_length length_limit output_limit truncated token_limit token_limit_reached",
    "max_token max_tokens max_tokens_reached max_new_tokens max_output_tokens max_completion_tokens",
    "model_length max_model_length context_length max_context_length context_length_exceeded",
    "context_window_exceeded model_context_window_exceeded",
)
FILTERED = _words(
    "content_filter content_filtered content_filter_stop filter filtered blocked blocklist moderation sensitive refusal",
    "safety image_safety recitation prohibited_content spii guardrail guardrails guardrail_intervened error_toxic",
)
FAILED = _words(
    "error errors internal_error server_error network_error connection_error error_limit fail failed failure exception incomplete",
    "abort aborted cancel canceled cancelled user_cancel user_canceled user_cancelled interrupted disconnect disconnected",
    "timeout timed_out time_limit deadline deadline_exceeded overloaded insufficient_system_resource insufficient_system_resources",
    "malformed_function_call malformed_tool_call",
)


class Ending(NamedTuple):
    """stop_reason, is_filtered: as in `OutputEvent`;  is_known: the word says that the output is complete;  is_called: so are its calls"""

    finish: FinishReason
    stop_reason: int | str | None = None
    is_known: bool = True
    is_called: bool = False
    is_filtered: bool = False


def ending(word: str, stop_reason: int | str | None) -> Ending | None:
    """The end that a finish reason names; None where it names none. stop_reason: what the server has beside it

    Raises BrokenStream for a word of failure.
    """
    plain = _plain(word)
    if plain in RUNNING:
        return None
    if plain in FAILED:
        raise BrokenStream("a sequence ended for a reason that is no end of an answer")
    if plain in LENGTH:
        return Ending(FinishReason.LENGTH)
    if plain in FILTERED:
        return Ending(FinishReason.STOP, is_filtered=True)
    if plain in CALLED:
        return Ending(FinishReason.STOP, stop_reason, is_called=True)
    if plain in STOPPED:
        return Ending(FinishReason.STOP, stop_reason)
    return Ending(FinishReason.STOP, word.strip()[:MAX_WORD_CHARS], is_known=False)
