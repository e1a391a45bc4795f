"""What foreign servers say of themselves -> numbers: limits of their models, load, rate limits. What is not understood is not known.

Nothing of their bytes is kept but numbers, each within bounds. `watch` asks a server for its list of models and its load, for as long
as the gateway runs. Nothing that the server answers, or fails to, is fatal.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

import aiohttp

from headrace.core.clock import Clock
from headrace.gateway.upstream.foreign_session import NOT_CONNECTED
from headrace.gateway.upstream.foreign_words import count_of, read_json

if TYPE_CHECKING:
    from headrace.gateway.upstream.foreign_server import ForeignServer

MAX_WAIT_S = 3600.0
"""A server that asks for a longer wait is asked again after this many seconds."""

LOAD_METRICS = (
    ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
    ("llamacpp:requests_processing", "llamacpp:requests_deferred"),
    ("headrace_requests_running", "headrace_requests_waiting"),
    ("tgi_batch_current_size", "tgi_queue_size"),
)
"""Names of the running and of the waiting requests on the metrics pages of servers that have them."""

_LINE_BEGINS = tuple(name for pair in LOAD_METRICS for name in pair)
_MAX_LINE_CHARS = 4096
_SAMPLE = re.compile(r'([a-z_:]+)(?:\{((?:[^"}]|"(?:\\.|[^"\\])*")*)\})? +([0-9.eE+]{1,32})(?: +\d+)?\s*')
_MODEL_LABEL = re.compile(r'(?:^|,)\s*(?:model|model_name)="((?:\\.|[^"\\])*)"')
_PARTS = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

MAX_CONTEXT_TOKENS = 2**40
"""A context that is said to be longer is not believed."""


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model in a server's list. max_model_len: prompt and output together; None where the list does not say (vLLM, SGLang and Headrace
    say it as `max_model_len`, OpenRouter as `context_length`, llama.cpp as `n_ctx` of `meta`)."""

    is_listed: bool
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class ReportedLoad:
    """Requests (sequences, where the server counts these) on a server's metrics page."""

    num_running: int
    num_waiting: int


def listed_model(body: bytes, name: str) -> ListedModel | None:
    """What a `GET /v1/models` says of one model; None for a body that is no list of models.

    The list stands in `data` or `models`, or is the body; it is null at a server without models. An entry may be a name alone.
    """
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
    """The load on a metrics page in Prometheus' text format, summed over its samples; None where the page has none that is known.

    name  of the model there: samples that have a label `model` or `model_name` count where it is this name
    """
    sums: dict[str, float] = {}
    for line in page.decode("utf-8", "replace").splitlines():
        if len(line) > _MAX_LINE_CHARS or not line.startswith(_LINE_BEGINS) or (match := _SAMPLE.fullmatch(line)) is None:
            continue
        metric, labels, value = match.groups()
        model = _MODEL_LABEL.search(labels or "")
        if model is None or model[1] == name:
            sums[metric] = sums.get(metric, 0.0) + _number(value)
    for running, waiting in LOAD_METRICS:
        if running in sums:
            return ReportedLoad(_count(sums[running]), _count(sums.get(waiting, 0.0)))
    return None


def retry_after_s(headers: Mapping[str, str], unix_now: float) -> float | None:
    """Seconds that an answer asks to wait: `retry-after-ms`, or `Retry-After` as seconds or a date. None where it does not say."""
    if (given := headers.get("retry-after-ms", "")) and (milliseconds := _number(given)) >= 0:
        return _bounded(milliseconds / 1000)
    given = headers.get("retry-after", "")
    if (seconds := _number(given)) >= 0:
        return _bounded(seconds)
    try:
        when = parsedate_to_datetime(given)
    except (ValueError, OverflowError):
        return None
    return _bounded((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - unix_now)


def exhausted_s(headers: Mapping[str, str]) -> float:
    """Seconds until a provider takes requests again, where its counters say that none are left; 0 where some are, or nothing is said.

    Read are OpenAI's x-ratelimit-remaining-requests, -tokens and their x-ratelimit-reset-*, and the IETF draft's ratelimit-remaining.
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
    """Seconds in "6m0s", "20ms" or "12.5"; 0 for anything else."""
    text = text.strip()
    parts = _PARTS.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return _bounded(sum(_number(number) * _SECONDS[unit] for number, unit in parts))
    return _bounded(max(0.0, _number(text)))


def _number(text: str) -> float:
    """A finite number; -1 for what is none."""
    text = text.strip()
    if not text.isascii() or len(text) > 32 or not text[:1].isdigit():
        return -1.0
    try:
        number = float(text)
    except ValueError:
        return -1.0
    return number if math.isfinite(number) else -1.0


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.0), MAX_WAIT_S)


def _count(value: float) -> int:
    return int(min(max(value, 0.0), 2**31))


MODELS_S = 60.0
"""Seconds between two lists of models."""

UNREACHABLE_S = 5.0
"""The same for a server that cannot be reached, so that it is used again soon after it came back."""

LOAD_S = 1.0
"""Seconds between two metrics pages."""

NO_ANSWER = (*NOT_CONNECTED, aiohttp.ClientError, OSError, TimeoutError)


async def watch(server: ForeignServer, *, reads_load: bool, clock: Clock) -> None:
    """Ask a server for its list of models and its load, until cancelled.

    reads_load  its metrics are asked for: they decide only among several servers. A server without known ones is asked again with each list
    """
    asked_at, has_load = -math.inf, False
    while True:
        if clock() - asked_at >= (MODELS_S if server.is_reachable else UNREACHABLE_S):
            asked_at = clock()
            await _read_models(server)
            has_load = reads_load
        if has_load:
            has_load = await _read_load(server)
        await asyncio.sleep(LOAD_S)


async def _read_models(server: ForeignServer) -> None:
    """Learn whether it can be reached, whether it lists the model, and the model's limit."""
    try:
        status, body = await server.session.get(server.session.models_url)
    except NOT_CONNECTED as error:
        if server.is_reachable:
            server.log_fault(f"cannot be reached: {type(error).__name__}")
        server.is_reachable = False
        return
    except NO_ANSWER:
        return  # a server that is slow or does not have the list may answer requests all the same
    server.is_reachable = True
    if status in (401, 403) and not server.is_key_refused:
        server.log_fault(f"does not list its models: status {status}; is its key right?")
    server.is_key_refused = status in (401, 403)
    listed = listed_model(body, server.far_name) if status == 200 else None
    if listed is not None and listed != server.listed:
        if listed.is_listed:
            server.log_fact(f"lists the model, with a context of {listed.max_model_len or 'unknown'} tokens")
        else:
            server.log_fault(f"does not list the model {server.far_name!r}")
        server.listed = listed


async def _read_load(server: ForeignServer) -> bool:
    """Note the load on its metrics page. False where it has none that is known."""
    num_sent, url = server.num_sent, server.session.metrics_url
    if url is None:
        return False
    try:
        status, page = await server.session.get(url)
    except NO_ANSWER:
        return True  # the list of models says whether the server can be reached
    load = reported_load(page, server.far_name) if status == 200 else None
    if load is not None:
        server.note_load(load, num_sent=num_sent)
    return load is not None
