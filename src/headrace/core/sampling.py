"""Sampling parameters and their rules, in one place for every front end.

Names, defaults and meaning follow vLLM's `SamplingParams` and OpenAI's API. `checked()` is the only validator: HTTP, gRPC and the
offline API call it, and the engine again with the model's vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any

from headrace.core.errors import InvalidRequest
from headrace.core.structured import StructuredOutputsParams

MAX_LOGPROBS = 20
MAX_N = 64
MAX_STOP = 16
MAX_STOP_BYTES = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_SEED = 2**63 - 1
MAX_OUTPUT_TOKENS = 2**24
GREEDY_EPSILON = 1e-5

FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Their defaults are from the model's generation_config.json, as at vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """temperature          0 means greedy
    top_k, top_p, min_p  filters, applied in this order after temperature; top_k 0 or -1 = off; top_p 0 means greedy
    presence_penalty     subtracted once from logits of tokens already generated
    frequency_penalty    subtracted times their count among the generated tokens
    repetition_penalty   divides positive, multiplies negative logits of tokens in prompt or output (1 = off)
    logit_bias           token id -> added to its logit
    seed                 None: the gateway (or `LLM`) draws one and sends it, so that a replay can repeat the run
    max_tokens           None: as many as the context leaves
    min_tokens           end tokens and stop token ids are masked before this many; stop strings are not matched before
    stop                 strings that end the output; never part of it unless include_stop_str_in_output
    ignore_eos           the model's end tokens are ordinary tokens
    logprobs             None: off; k: the chosen token's log-probability and the k best
    prompt_logprobs      the same for every prompt token but the first (such a request ignores prefix hits)
    skip_special_tokens  control tokens are left out of the text
    detokenize           False: token ids only (offline API)
    structured_outputs   what the output must match, for `LLM` alone: an engine gets it as the grammar beside these parameters
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.stop, tuple):
            object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        if not isinstance(self.stop_token_ids, tuple):
            object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON or self.top_p == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def end_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """May be `eos_token_ids` itself."""
        ends = frozenset() if self.ignore_eos else eos_token_ids
        return ends.union(self.stop_token_ids) if self.stop_token_ids else ends

    def checked(self, *, vocab_size: int | None = None) -> SamplingParams:
        """Raises InvalidRequest naming the first field that breaks a rule."""
        _check_numbers(self)
        _check_structured_outputs(self)
        _check_stops(self)
        _check_token_ids(self, vocab_size)
        return self

    def with_(self, **changes: Any) -> SamplingParams:
        return replace(self, **changes)


def params_from_mapping(given: Mapping[str, Any], *, defaults: SamplingParams | None = None) -> SamplingParams:
    """Raises InvalidRequest for an unknown key."""
    known = {f.name for f in fields(SamplingParams)}
    for key in given:
        if key not in known:
            raise InvalidRequest(key, "a known sampling parameter", key, f"Known: {', '.join(sorted(known))}.")
    return replace(defaults or SamplingParams(), **given)


def with_default_max_tokens(params: SamplingParams, chosen: int | None, room: int) -> SamplingParams:
    """`params` with max_tokens set, for a request that has none. Raises InvalidRequest when min_tokens do not fit.

    chosen  default length from the model's generation_config.json; None: `params` are returned unchanged
    room    tokens that the context leaves for output: an upper bound of the result
    """
    if chosen is None or room < 1:
        return params
    return params.with_(max_tokens=min(max(chosen, params.min_tokens), room)).checked()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """kind: int, or float, which allows ints too."""

    kind: type
    low: float
    high: float
    is_low_outside: bool = False
    remedy: str = ""


def _integers(low: int, high: int, remedy: str = "") -> Bound:
    return Bound(kind=int, low=low, high=high, remedy=remedy)


def _numbers(low: float, high: float, *, is_low_outside: bool = False) -> Bound:
    return Bound(kind=float, low=low, high=high, is_low_outside=is_low_outside)


BOUNDS: Mapping[str, Bound] = {
    "n": _integers(1, MAX_N, "Send several requests for more."),
    "temperature": _numbers(0.0, 2.0),
    "top_p": _numbers(0.0, 1.0),
    "top_k": _integers(-1, 2**31 - 1, "0 or -1 switches it off."),
    "min_p": _numbers(0.0, 1.0),
    "presence_penalty": _numbers(-2.0, 2.0),
    "frequency_penalty": _numbers(-2.0, 2.0),
    "repetition_penalty": _numbers(0.0, 10.0, is_low_outside=True),
    "seed": _integers(-MAX_SEED - 1, MAX_SEED),
    "max_tokens": _integers(1, MAX_OUTPUT_TOKENS),
    "min_tokens": _integers(0, MAX_OUTPUT_TOKENS),
    "logprobs": _integers(0, MAX_LOGPROBS),
    "prompt_logprobs": _integers(0, MAX_LOGPROBS),
}
_OPTIONAL = frozenset({"seed", "max_tokens", "logprobs", "prompt_logprobs"})
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "detokenize")
_numbers_of, _flags_of = attrgetter(*BOUNDS), attrgetter(*_FLAGS)
_DEFAULT_NUMBERS = _numbers_of(SamplingParams())
"""These need no check: most parameters of most requests."""


def check_bound(name: str, value: object) -> None:
    bound = BOUNDS[name]
    if bound.kind is float:
        _check_float(name, value, bound.low, bound.high, above=bound.is_low_outside)
    elif isinstance(value, bool) or not isinstance(value, int) or not bound.low <= value <= bound.high:
        raise InvalidRequest(name, f"an integer with {bound.low} <= {name} <= {bound.high}", value, bound.remedy)


def _check_float(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    """Raises InvalidRequest unless low <= value <= high, or low < value with `above`. NaN and infinities are refused."""
    is_outside = isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not low <= value <= high
    if is_outside or (above and value == low):
        raise InvalidRequest(name, f"a number with {low:g} {'<' if above else '<='} {name} <= {high:g}", value)


def _check_numbers(p: SamplingParams) -> None:
    for name, value, default in zip(BOUNDS, _numbers_of(p), _DEFAULT_NUMBERS, strict=True):
        if value == default and type(value) is type(default):
            continue
        if value is not None or name not in _OPTIONAL:
            check_bound(name, value)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise InvalidRequest("min_tokens", f"min_tokens <= max_tokens ({p.max_tokens})", p.min_tokens)
    for name, flag in zip(_FLAGS, _flags_of(p), strict=True):
        if flag is not True and flag is not False:
            raise InvalidRequest(name, "true or false", flag)
    if not p.spaces_between_special_tokens:
        raise InvalidRequest("spaces_between_special_tokens", "true", False, "The supported tokenizers put no spaces there.")


def _check_structured_outputs(p: SamplingParams) -> None:
    given = p.structured_outputs
    if given is not None and not isinstance(given, StructuredOutputsParams):
        raise InvalidRequest("structured_outputs", "headrace.StructuredOutputsParams", type(given).__name__)
    if given is not None and p.ignore_eos:
        raise InvalidRequest("ignore_eos", "False with structured_outputs", True, "After what matches, only an end token may follow.")


def _check_stops(p: SamplingParams) -> None:
    if len(p.stop) > MAX_STOP:
        raise InvalidRequest("stop", f"at most {MAX_STOP} strings", len(p.stop))
    for text in p.stop:
        if not isinstance(text, str) or not text:
            raise InvalidRequest("stop", "non-empty strings", text)
        if len(text.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
            raise InvalidRequest("stop", f"each string at most {MAX_STOP_BYTES} bytes", text)
    if p.stop and not p.detokenize:
        raise InvalidRequest("stop", "detokenize=True when stop strings are given", list(p.stop), "Use stop_token_ids instead.")


def _check_token_ids(p: SamplingParams, vocab_size: int | None) -> None:
    if len(p.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids", len(p.stop_token_ids))
    if type(p.logit_bias) is not dict and not isinstance(p.logit_bias, Mapping):  # asking Mapping is slow
        raise InvalidRequest("logit_bias", "a map from token id to bias", p.logit_bias)
    if not (p.stop_token_ids or p.logit_bias):
        return
    if len(p.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest("logit_bias", f"at most {MAX_LOGIT_BIAS} entries", len(p.logit_bias))
    for bias in p.logit_bias.values():
        _check_float("logit_bias", bias, -100.0, 100.0)
    check_token_ids("stop_token_ids", p.stop_token_ids, vocab_size)
    check_token_ids("logit_bias", tuple(p.logit_bias), vocab_size)


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int | None) -> None:
    """Raises InvalidRequest unless every id is of the vocabulary. About 40 ns per id."""
    high = (vocab_size or 2**31) - 1
    if set(map(type, token_ids)) <= {int} and (not token_ids or (min(token_ids) >= 0 and max(token_ids) <= high)):
        return
    for token_id in token_ids:  # one of them is wrong: the first is named
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id <= high:
            raise InvalidRequest(name, f"token ids with 0 <= id <= {high}", token_id)
