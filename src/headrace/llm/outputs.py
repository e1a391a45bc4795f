"""Defines the results of `LLM.generate` and `LLM.chat`, with vLLM's names, and collects them from the engine's updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.core.errors import SequenceFailed
from headrace.core.plan import TokenLogprobs
from headrace.core.update import FinishReason, SequenceUpdate
from headrace.llm.adapters import LoRARequest
from headrace.text.assemble import OutputAssembler, decoded_prompt_logprobs
from headrace.text.logprobs import TokenEntry
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """rank: 1 is the most probable token"""

    logprob: float
    rank: int
    decoded_token: str


TokenLogprobMap = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """token_ids           with the end token
    cumulative_logprob  sum over token_ids; None when no logprobs were asked for
    finish_reason       "stop" | "length" | "error"
    stop_reason         the stop string or stop token id that ended it; None for the model's own end token
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobMap] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Seconds of the monotonic clock; None until the event has happened.

    queue_time_s  from arrival to the first step that computed it
    """

    arrival_time: float
    queue_time_s: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """prompt           None when token ids were given
    prompt_logprobs  None for the first token
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobMap | None] | None = None
    finished: bool = False
    num_cached_tokens: int | None = None
    lora_request: LoRARequest | None = None


class GenerationFailed(SequenceFailed):
    """`outputs` has all answers, failed ones included."""

    def __init__(self, message: str, outputs: list[RequestOutput]) -> None:
        super().__init__(message)
        self.outputs = outputs


class SequenceCollector:
    def __init__(self, assembler: OutputAssembler, index: int, *, has_logprobs: bool) -> None:
        self.assembler = assembler
        self.output = CompletionOutput(index, cumulative_logprob=0.0 if has_logprobs else None, logprobs=[] if has_logprobs else None)
        self.error: str | None = None
        self.keep_tokens: int | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []

    def feed(self, update: SequenceUpdate) -> None:
        """At a stop string, `keep_tokens` is then the number of tokens to keep."""
        delta = self.assembler.feed(update)
        output = self.output
        output.text += delta.text
        output.token_ids += delta.token_ids
        self.prompt_logprobs += delta.prompt_logprobs
        if output.logprobs is not None and output.cumulative_logprob is not None:
            entries = list(delta.logprobs or ())
            output.logprobs += [logprob_map(entry) for entry in entries]
            output.cumulative_logprob += sum(entry.logprob for entry in entries)
        self.keep_tokens = delta.engine_finish.keep_tokens if delta.engine_finish else None
        if delta.finish is not None:
            output.finish_reason = delta.finish.value
            output.stop_reason = delta.stop_reason
            self.error = delta.error if delta.finish is FinishReason.ERROR else None


def logprob_map(entry: TokenEntry) -> TokenLogprobMap:
    best = {top.token_id: Logprob(top.logprob, rank, top.token) for rank, top in enumerate(entry.top, start=1)}
    itself = {entry.token_id: Logprob(entry.logprob, entry.rank, entry.token)}
    return itself | best | itself


def prompt_logprob_maps(tokenizer: Tokenizer, prompt_ids: Sequence[int], items: Sequence[TokenLogprobs]) -> list[TokenLogprobMap | None]:
    return [None, *(logprob_map(entry) for entry in decoded_prompt_logprobs(tokenizer, prompt_ids, items))]
