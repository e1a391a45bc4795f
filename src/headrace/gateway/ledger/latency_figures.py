"""How fast and how well requests were answered, as `usage_query.Figures`: what there is to watch of a model, or of what a tenant gets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.gateway.ledger.usage_query import QUANTILES, Figures, SqlDialect
from headrace.observe.request_log import Outcome

FROM_CACHE = "cache_tier IN ('response', 'idempotency')"
"""Whether a record is of an answer that was there already: it is counted, and its times are those of no model."""

LATENCIES = ("ttft_ms", "tpot_ms", "queue_ms", "total_latency_ms")
"""Fields of records of which rows have QUANTILES."""

COUNTED = {"completed": (Outcome.COMPLETED,), "cancelled": (Outcome.CANCELLED,), "failed": (Outcome.FAILED, Outcome.DEADLINE)}
"""Key of a row -> the outcomes of records that it counts."""


def _statement(dialect: SqlDialect) -> Mapping[str, str]:
    return {
        "requests": dialect.requests,
        **{name: f"sum(CASE WHEN outcome IN ({_words(outcomes)}) THEN 1 ELSE 0 END)" for name, outcomes in COUNTED.items()},
        "from_cache": f"sum(CASE WHEN {FROM_CACHE} THEN 1 ELSE 0 END)",
        **{field: dialect.quantiles(f"CASE WHEN {FROM_CACHE} THEN NULL ELSE {field} END") for field in LATENCIES},
    }


def _words(outcomes: Sequence[Outcome]) -> str:
    return ", ".join(f"'{outcome}'" for outcome in outcomes)


def _values(found: Sequence[Any]) -> Sequence[object]:
    first = 2 + len(COUNTED)
    numbers: list[object] = list(found[:first])
    for quantiles in found[first:]:
        numbers += _numbers(quantiles)
    return numbers


def _numbers(quantiles: str | Sequence[float] | None) -> Sequence[float | None]:
    """The numbers of an array or its JSON, which is null or empty where no record of the group has the field."""
    given = json.loads(quantiles) if isinstance(quantiles, str) else quantiles
    return [round(number, 3) for number in given] if given else [None] * len(QUANTILES)


LATENCY = Figures(
    names=("requests", *COUNTED, "from_cache", *(f"{field}_p{round(100 * level)}" for field in LATENCIES for level in QUANTILES)),
    statement=_statement,
    values=_values,
    are_summed=False,
)
"""Requests by outcome, and those that caches answered; of the others the time to the first token, the time per further token, the time in
the queue and the total time, each in ms at p50 and p99."""
