"""Memory of one request's tokens and log-probabilities, charged to the request: what is known beforehand, the rest as it comes."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.sampling import SamplingParams
from headrace.gateway.access.budget import RequestHeld
from headrace.gateway.generation.logprob_limits import (
    MAX_INLINE_LOGPROBS,
    OUTPUT_LOGPROB_BYTES,
    check_output_logprobs,
    encoded_prompt_logprob_bytes,
    first_answer_bytes,
    num_prompt_logprobs,
    prompt_logprob_bytes,
    unread_logprob_bytes,
)
from headrace.gateway.generation.parsed_request import ParsedRequest
from headrace.gateway.http.pieces import PIECE_BYTES
from headrace.gateway.upstream.output_events import OutputEvent
from headrace.gateway.upstream.seam import Prepared

PROMPT_TOKEN_BYTES = 36
"""Memory of one prompt token: a reference in a tuple, and the integer object."""

HOLD_STEP_BYTES = 16 << 10
"""An answer that is held, as it is not streamed or will be kept, asks the memory budget each time it has grown by this many bytes."""


class AnswerMemory:
    """
    num_prompt_logprobs   log-probabilities of the prompt that the answer shows, 0 before `reserve`
    unread_logprob_bytes  bytes of log-probabilities that may wait for a streaming client beyond `max_pending_bytes`
    """

    def __init__(self, held: RequestHeld, parsed: ParsedRequest, params: SamplingParams) -> None:
        self._held, self._parsed, self._params = held, parsed, params
        self.num_prompt_logprobs = 0
        self.unread_logprob_bytes = 0
        self._precharged_json_bytes = 0
        self._logprobs_per_token = (params.logprobs or 0) + 1
        self._num_collected = 0
        self._uncharged_bytes = 0  # negative while the advance charge is not used up

    def reserve(self, prepared: Prepared) -> None:
        """Charge the prompt's tokens and what the answer surely takes. Raises RequestTooLarge or Overloaded."""
        parsed, params, answers = self._parsed, self._params, self._held.answers
        num_tokens = prepared.prompt_tokens or 0
        self.num_prompt_logprobs = num_prompt_logprobs(
            parsed.logprobs_field, params.prompt_logprobs, num_tokens=num_tokens, num_shown=parsed.num_shown
        )
        if not parsed.is_streaming and params.max_tokens is not None:
            check_output_logprobs(params.logprobs, num_tokens=prepared.num_sequences * params.max_tokens)
        piece_bytes = 2 * PIECE_BYTES if self.num_prompt_logprobs else 0  # the encoded slice that is being sent
        self.unread_logprob_bytes = piece_bytes + unread_logprob_bytes(params.logprobs, num_tokens=prepared.max_output_tokens or 0)
        first_bytes = 0 if parsed.is_streaming else first_answer_bytes(params.logprobs, num_tokens=prepared.max_output_tokens)
        self._uncharged_bytes = -first_bytes
        self._held.prompts.add(PROMPT_TOKEN_BYTES * num_tokens)
        column_bytes = prompt_logprob_bytes(params.prompt_logprobs, num_tokens=num_tokens)
        self._precharged_json_bytes = encoded_prompt_logprob_bytes(
            params.prompt_logprobs, num_tokens=num_tokens, num_encodings=parsed.num_kept_encodings
        )
        answers.add(column_bytes + self._precharged_json_bytes + piece_bytes + first_bytes)

    def hold_json(self, num_bytes: int) -> None:
        """Count JSON of prompt log-probabilities that the answer keeps. Bytes beyond those charged beforehand are charged now.

        Raises RequestTooLarge or Overloaded.
        """
        self._precharged_json_bytes -= num_bytes
        if self._precharged_json_bytes < 0:
            self._held.answers.add(-self._precharged_json_bytes)
            self._precharged_json_bytes = 0

    def collect(self, events: Sequence[OutputEvent]) -> None:
        """Count events of an answer that is not streamed. Raises RequestTooLarge or Overloaded."""
        num_new = sum([event.num_logprob_tokens for event in events])
        self._num_collected += num_new
        check_output_logprobs(self._params.logprobs, num_tokens=self._num_collected)
        self._uncharged_bytes += sum([event.text_bytes for event in events]) + num_new * self._logprobs_per_token * OUTPUT_LOGPROB_BYTES
        if self._uncharged_bytes >= HOLD_STEP_BYTES:
            self._held.answers.add(self._uncharged_bytes)
            self._uncharged_bytes = 0

    @property
    def is_whole_inline(self) -> bool:
        """Whether the collected answer is small enough to be encoded in one go."""
        return self._is_inline(self._num_collected)

    def is_inline(self, events: Sequence[OutputEvent]) -> bool:
        """Whether `events` of a stream are few enough to be encoded in one go."""
        return self._is_inline(sum([event.num_logprob_tokens for event in events]))

    def _is_inline(self, num_tokens: int) -> bool:
        return self.num_prompt_logprobs + num_tokens * self._logprobs_per_token <= MAX_INLINE_LOGPROBS
