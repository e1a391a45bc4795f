"""Reads a foreign server's list of models, with their limits, and its load from its metrics page.

Only numbers are kept, each within bounds. A value that is not understood counts as not known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.gateway.upstream.foreign.values import count_of, number_in, read_json

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

MAX_CONTEXT_TOKENS = 2**40
"""A context that is said to be longer is not believed."""


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model in a server's list.

    max_model_len  most tokens of prompt and output; None: not in the list. vLLM, SGLang and Headrace name it `max_model_len`, OpenRouter
                   `context_length`, llama.cpp `n_ctx` in `meta`
    """

    is_listed: bool
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class ReportedLoad:
    """Requests (sequences, where the server counts these) on a server's metrics page."""

    num_running: int
    num_waiting: int


def listed_model(body: bytes, name: str) -> ListedModel | None:
    """One model's entry in the answer to `GET /v1/models`; None for a body that is no list of models.

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
    """The load on a metrics page in Prometheus' text format, summed over samples; None: the page has no known metric.

    name  the model's name at the server: samples with a label `model` or `model_name` must have this value
    """
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
