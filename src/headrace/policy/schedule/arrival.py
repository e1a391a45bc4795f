"""Makes sequences of a request that has just arrived, and refuses a request that can never fit. `sequence_table` keeps the sequences."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from headrace.core.errors import RequestTooLarge
from headrace.core.ids import SeqId
from headrace.core.request import EngineRequest
from headrace.policy.config import SchedulerConfig
from headrace.policy.kvcache.manager import KvManager
from headrace.policy.schedule.prerequisites import FORK, NO_TIME_LIMIT
from headrace.policy.sequence import Sequence


class Arrivals:
    """Makes sequences, numbered as they come. All methods run on the loop's thread."""

    def __init__(self, config: SchedulerConfig, kv: KvManager) -> None:
        self._config = config
        self._kv = kv
        self._eos = frozenset(config.eos_token_ids)
        self._num_made = 0

    def refuse_what_never_fits(self, request: EngineRequest) -> None:
        """Raises RequestTooLarge for a request that the KV cache cannot hold even alone."""
        length = self._limit(request)
        if reason := self._kv.shortage(length, self._config.uncommitted_tokens):
            raise RequestTooLarge(
                "max_tokens",
                f"prompt ({len(request.prompt_ids)}) + output tokens that fit the KV cache: {reason}",
                length - len(request.prompt_ids),
                "Shorten the prompt or lower max_tokens.",
            )

    def make_sequence(self, request: EngineRequest, index: int, now: float, prerequisites: Mapping[str, float]) -> Sequence:
        """One of a request's sequences, blocked by its prerequisites; the KV manager knows it."""
        tokens = array("i", request.prompt_ids)
        tokens.extend(request.output_ids)
        self._num_made += 1
        num_prompt, limit = len(request.prompt_ids), self._limit(request)
        seq = Sequence(SeqId(self._num_made), request, index, now, tokens, num_prompt, limit, num_expected=len(tokens))
        seq.stage_since = now
        seq.end_ids = request.params.end_ids(self._eos)
        seq.missing = {**prerequisites} if seq.is_first else {**prerequisites, FORK: NO_TIME_LIMIT}
        self._kv.open(seq)
        return seq

    def _limit(self, request: EngineRequest) -> int:
        """Length at which a sequence of this request ends."""
        if request.params.max_tokens is None:
            return self._config.max_model_len
        return min(self._config.max_model_len, len(request.prompt_ids) + request.params.max_tokens)
