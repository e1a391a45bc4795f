"""Reads what a foreign server says of itself.

Only numbers are kept, each within bounds. A value that is not understood counts as not known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime

from headrace.gateway.upstream.foreign.values import count_of, number_in, number_of, read_json

LOAD_METRICS = (
    ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
    ("llamacpp:requests_processing", "llamacpp:requests_deferred"),
    ("headrace_requests_running", "headrace_requests_waiting"),
    ("tgi_batch_current_size", "tgi_queue_size"),
)

_LINE_BEGINS = tuple(name for pair in LOAD_METRICS for name in pair)
_MAX_LINE_CHARS = 4096
_SAMPLE = re.compile(r'([a-z_:]+)(?:\{((?:[^"}]|"(?:\\.|[^"\\])*")*)\})? +([0-9.eE+]{1,32})(?: +\d+)?\s*')
_MODEL_LABEL = re.compile(r'(?:^|,)\s*(?:model|model_name)="((?:\\.|[^"\\])*)"')

MAX_CONTEXT_TOKENS = 2**40


@dataclass(frozen=True, slots=True)
class ListedModel:
    """max_model_len  vLLM, SGLang and Headrace name it `max_model_len`, OpenRouter
    `context_length`, llama.cpp `n_ctx` in `meta`
    """

    is_listed: bool
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class ReportedLoad:
    num_running: int
    num_waiting: int


def listed_model(body: bytes, name: str) -> ListedModel | None:
    """The list stands in `data` or `models`, or is the body. An entry may be a name alone."""
    try:
        models = read_json(body)
    except ValueError:
        return None
    if isinstance(models, dict):
        place = next((place for place in ("data", "models") if place in models), None)
        models = (models[place] or []) if place else None
    if not isinstance(models, list):
        return None
    for model in models:
        if model == name:
            return ListedModel(True)
        if isinstance(model, dict) and name in (model.get("id"), model.get("name") if "id" not in model else None):
            return ListedModel(True, _context_tokens(model))
    return ListedModel(False)


def _context_tokens(model: Mapping[str, object]) -> int | None:
    meta = model.get("meta")
    limits = [model.get("max_model_len"), model.get("context_length"), meta.get("n_ctx") if isinstance(meta, dict) else None]
    counts = [count for count in map(count_of, limits) if count is not None and 1 <= count <= MAX_CONTEXT_TOKENS]
    return counts[0] if counts else None


def reported_load(page: bytes, name: str) -> ReportedLoad | None:
    sums: dict[str, float] = {}
    for line in page.decode("utf-8", "replace").splitlines():
        if len(line) > _MAX_LINE_CHARS or not line.startswith(_LINE_BEGINS) or (match := _SAMPLE.fullmatch(line)) is None:
            continue
        metric, labels, value = match.groups()
        model = _MODEL_LABEL.search(labels or "")
        if model is None or model[1] == name:
            sums[metric] = sums.get(metric, 0.0) + number_in(value)
    for running, waiting in LOAD_METRICS:
        if running in sums:
            return ReportedLoad(_count(sums[running]), _count(sums.get(waiting, 0.0)))
    return None


def _count(value: float) -> int:
    return int(min(max(value, 0.0), 2**31))


MAX_WAIT_S = 3600.0

_PARTS = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


_STATED = re.compile(r"(?:again|retry|wait)\D{0,40}?((?:\d{1,9}(?:\.\d{1,9})? ?(?:ms|milli|h|m|s)[a-z]* ?)+)")
_SPOKEN = re.compile(r"(\d+(?:\.\d+)?) ?(ms|milli|h|m|s)")
_SPOKEN_S = {"ms": 0.001, "milli": 0.001, "h": 3600.0, "m": 60.0, "s": 1.0}


def stated_wait_s(words: str) -> float | None:
    """As in "please try again in 1m30.5s" or "retry after 26 seconds"."""
    if (stated := _STATED.search(words)) is None:
        return None
    return _bounded(sum(float(number) * _SPOKEN_S[unit] for number, unit in _SPOKEN.findall(stated[1])))


def duration_s(value: object, unit_s: float) -> float | None:
    number = number_of(value)
    if number is None:
        return _duration_s(value) or None if isinstance(value, str) else None
    return _bounded(number * unit_s)


def retry_after_s(headers: Mapping[str, str], unix_now: float) -> float | None:
    if (given := headers.get("retry-after-ms", "")) and (milliseconds := number_in(given)) >= 0:
        return _bounded(milliseconds / 1000)
    given = headers.get("retry-after", "")
    if (seconds := number_in(given)) >= 0:
        return _bounded(seconds)
    try:
        when = parsedate_to_datetime(given)
    except (ValueError, OverflowError):
        return None
    return _bounded((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - unix_now)


def exhausted_s(headers: Mapping[str, str]) -> float:
    """By headers that count no requests or tokens left; 0: some are left. OpenAI's x-ratelimit-remaining-requests and -tokens with their
    x-ratelimit-reset-*, and the IETF draft's ratelimit-remaining.
    """
    wait_s = 0.0
    for remaining, reset in (
        ("x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
        ("x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"),
        ("ratelimit-remaining", "ratelimit-reset"),
    ):
        if remaining in headers and headers[remaining].strip() == "0":
            wait_s = max(wait_s, _duration_s(headers.get(reset, "")))
    return wait_s


def _duration_s(text: str) -> float:
    text = text.strip()
    parts = _PARTS.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return _bounded(sum(number_in(number) * _SECONDS[unit] for number, unit in parts))
    return _bounded(max(0.0, number_in(text)))


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.0), MAX_WAIT_S)
