"""Charges a request for the memory of its tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.errors import RequestTooLarge
from headrace.core.sampling import SamplingParams
from headrace.gateway.access.memory_charges import RequestCharges
from headrace.gateway.generation.parsed_request import ParsedRequest
from headrace.gateway.http.asgi import PIECE_BYTES
from headrace.gateway.upstream.seam import OutputEvent, Prepared

MAX_PROMPT_LOGPROBS = 1 << 20
"""Most log-probabilities of prompt tokens in one answer, some 60 bytes each: tokens x (alternatives + 1) x choices that show them."""

PROMPT_TOKEN_LOGPROB_BYTES = 34
PROMPT_ALTERNATIVE_BYTES = 13
"""Bytes charged for a prompt token's log-probability (id, value, rank, count) and for each of its alternatives (id, value), until the
answer is written. Measured, with the room that arrays leave to grow: 25 bytes and 13, beside 9 for offset and visibility.
"""

ENCODED_PROMPT_LOGPROB_BYTES = 76
"""Charged beforehand for one prompt log-probability as JSON. The average of the bundled model is 71 to 75. JSON of longer tokens is charged
beyond this, as it is encoded.
"""

OUTPUT_LOGPROB_BYTES = 24
"""Bytes for each log-probability of an output token while an answer is collected: the mean of 34 for the token's own and 13 for an
alternative's.
"""

OUTPUT_TOKEN_BYTES = 8
FIRST_TEXT_BYTES = 4 << 10
FIRST_LOGPROB_BYTES = 64 << 10

UNREAD_LOGPROB_BYTES = 24
MAX_UNREAD_LOGPROB_BYTES = 2 << 20
"""They may wait for a slow client."""

MAX_OUTPUT_LOGPROBS = 1 << 18
"""Most log-probabilities of output tokens in one answer that is not streamed."""

MAX_INLINE_LOGPROBS = 4096
"""An answer with more is encoded in slices (`answer_encoder.EncodingTurns`); this many take a few milliseconds."""


def prompt_logprob_bytes(num_top: int | None, *, num_tokens: int) -> int:
    """Choices of one prompt share the columns.

    num_top     alternatives per token; None: no prompt log-probabilities were asked for
    """
    return 0 if num_top is None else num_tokens * (PROMPT_TOKEN_LOGPROB_BYTES + num_top * PROMPT_ALTERNATIVE_BYTES)


def encoded_prompt_logprob_bytes(num_top: int | None, *, num_tokens: int, num_encodings: int) -> int:
    """num_encodings: `ParsedRequest.num_kept_encodings`"""
    return 0 if num_top is None else num_tokens * num_encodings * (num_top + 1) * ENCODED_PROMPT_LOGPROB_BYTES


def check_output_logprobs(num_top: int | None, *, num_tokens: int) -> None:
    """Raises RequestTooLarge for an answer without streaming that would hold too many log-probabilities.

    num_tokens  output tokens of all choices
    """
    if num_top is not None and num_tokens * (num_top + 1) > MAX_OUTPUT_LOGPROBS:
        rule = f"tokens of all choices ({num_tokens}) x (alternatives + 1) <= {MAX_OUTPUT_LOGPROBS} without stream"
        raise RequestTooLarge("logprobs", rule, num_top, "Stream the answer, or lower max_tokens, n or the alternatives.")


def first_answer_bytes(num_top: int | None, *, num_tokens: int | None) -> int:
    """num_tokens: most output tokens of all sequences; None: not known"""
    first = FIRST_TEXT_BYTES + (0 if num_top is None else FIRST_LOGPROB_BYTES)
    token_bytes = OUTPUT_TOKEN_BYTES + (0 if num_top is None else (num_top + 1) * OUTPUT_LOGPROB_BYTES)
    return first if num_tokens is None else min(first, num_tokens * token_bytes)


PROMPT_TOKEN_BYTES = 36
"""A reference in a tuple, and the integer object."""

HOLD_STEP_BYTES = 16 << 10
"""An answer that is held in memory charges its growth in these steps."""


class AnswerMemory:
    """The memory charges of one request's tokens and answer.

    num_prompt_logprobs   log-probabilities of the prompt that the answer shows, 0 before `reserve`
    unread_logprob_bytes  bytes of log-probabilities that may wait for a streaming client beyond `sse.MAX_PENDING_BYTES`
    """

    def __init__(self, charges: RequestCharges, parsed: ParsedRequest, params: SamplingParams) -> None:
        self._charges, self._parsed, self._params = charges, parsed, params
        self.num_prompt_logprobs = 0
        self.unread_logprob_bytes = 0
        self._precharged_json_bytes = 0
        self._logprobs_per_token = (params.logprobs or 0) + 1
        self._num_collected = 0
        self._uncharged_bytes = 0  # negative while the advance charge is not used up

    def reserve(self, prepared: Prepared) -> None:
        """Raises RequestTooLarge or Overloaded."""
        parsed, params, answers = self._parsed, self._params, self._charges.answers
        num_tokens = prepared.prompt_tokens or 0
        self.num_prompt_logprobs = self._checked_prompt_logprobs(num_tokens)
        if not parsed.is_streaming and params.max_tokens is not None:
            check_output_logprobs(params.logprobs, num_tokens=prepared.num_sequences * params.max_tokens)
        piece_bytes = 2 * PIECE_BYTES if self.num_prompt_logprobs else 0  # the encoded slice that is being sent
        self.unread_logprob_bytes = piece_bytes
        if params.logprobs is not None:  # not charged beforehand: most clients read in time
            num_logprobs = (prepared.max_output_tokens or 0) * self._logprobs_per_token
            self.unread_logprob_bytes += min(MAX_UNREAD_LOGPROB_BYTES, num_logprobs * UNREAD_LOGPROB_BYTES)
        first_bytes = 0 if parsed.is_streaming else first_answer_bytes(params.logprobs, num_tokens=prepared.max_output_tokens)
        self._uncharged_bytes = -first_bytes
        self._charges.prompts.add(PROMPT_TOKEN_BYTES * num_tokens)
        column_bytes = prompt_logprob_bytes(params.prompt_logprobs, num_tokens=num_tokens)
        self._precharged_json_bytes = encoded_prompt_logprob_bytes(
            params.prompt_logprobs, num_tokens=num_tokens, num_encodings=parsed.num_kept_encodings
        )
        answers.add(column_bytes + self._precharged_json_bytes + piece_bytes + first_bytes)

    def _checked_prompt_logprobs(self, num_tokens: int) -> int:
        """Raises RequestTooLarge beyond MAX_PROMPT_LOGPROBS."""
        num_top, num_shown, field = self._params.prompt_logprobs, self._parsed.num_shown, self._parsed.logprobs_field
        num_logprobs = 0 if num_top is None else num_tokens * (num_top + 1) * num_shown
        if num_logprobs > MAX_PROMPT_LOGPROBS:
            rule = f"prompt tokens ({num_tokens}) x ({field} + 1) x choices ({num_shown}) <= {MAX_PROMPT_LOGPROBS}"
            raise RequestTooLarge(field, rule, num_top, "Ask for fewer alternatives or choices, or send the prompt in parts.")
        return num_logprobs

    def hold_json(self, num_bytes: int) -> None:
        """Charges the bytes beyond the advance charge. Raises RequestTooLarge or Overloaded."""
        self._precharged_json_bytes -= num_bytes
        if self._precharged_json_bytes < 0:
            self._charges.answers.add(-self._precharged_json_bytes)
            self._precharged_json_bytes = 0

    def collect(self, events: Sequence[OutputEvent]) -> None:
        """Raises RequestTooLarge or Overloaded."""
        num_new = sum([event.num_logprob_tokens for event in events])
        self._num_collected += num_new
        check_output_logprobs(self._params.logprobs, num_tokens=self._num_collected)
        self._uncharged_bytes += sum([event.text_bytes for event in events]) + num_new * self._logprobs_per_token * OUTPUT_LOGPROB_BYTES
        if self._uncharged_bytes >= HOLD_STEP_BYTES:
            self._charges.answers.add(self._uncharged_bytes)
            self._uncharged_bytes = 0

    @property
    def is_whole_inline(self) -> bool:
        return self._is_inline(self._num_collected)

    @property
    def is_plain_inline(self) -> bool:
        """Whether events without log-probabilities are encoded at once."""
        return self._is_inline(0)

    def is_inline(self, events: Sequence[OutputEvent]) -> bool:
        return self._is_inline(sum([event.num_logprob_tokens for event in events]))

    def _is_inline(self, num_tokens: int) -> bool:
        return self.num_prompt_logprobs + num_tokens * self._logprobs_per_token <= MAX_INLINE_LOGPROBS
