"""Computes the report of a load test from the client's records, as `vllm bench serve` does, but stricter:

- every latency starts at the *intended* send time, so a client that falls behind cannot hide a slow server (coordinated omission);
- a request that failed or timed out counts as +infinity in every percentile instead of being left out.

  TTFT  = first chunk with text - intended send
  E2EL  = last chunk - intended send
  TPOT  = (E2EL - TTFT) / (output tokens - 1), one number per request; requests of one token have none (0 for goodput)
  ITL   = every gap between two chunks, pooled over all requests; a request that failed adds one infinite gap
  stall = the longest gap inside one request
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
Z_95 = 1.959964
MAX_CLIENT_LAG_S = 1e-3
"""A larger p99 of the client's own lag voids a load test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecord:
    """Times on one monotonic clock.

    intended_s     when the schedule wanted it sent
    sendable_s     the later of `intended_s` and the moment one of `max_concurrency` places became free; None: `intended_s`
    due_s          the later of `sendable_s` and the moment the request before it in the same burst was sent; None: `sendable_s`
    chunk_s        of each chunk that carried text, ascending
    sent_s         None if it never was
    output_tokens  as the server says, else the number of chunks
    """

    intended_s: float
    sent_s: float | None
    sendable_s: float | None = None
    due_s: float | None = None
    chunk_s: tuple[float, ...] = ()
    end_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    status: int | None = None
    error: str | None = None
    detail: str = ""
    retry_after_s: float | None = None

    @property
    def is_finished(self) -> bool:
        return self.error is None

    @property
    def was_refused(self) -> bool:
        return self.status in (429, 503)

    @property
    def client_lag_s(self) -> float | None:
        """The client's own delay, from `due_s` to `sent_s`."""
        return None if self.sent_s is None else self.sent_s - _first_known(self.due_s, self.sendable_s, self.intended_s)

    @property
    def send_delay_s(self) -> float | None:
        """`client_lag_s` plus the wait for its turn in a burst, which the latencies include."""
        return None if self.sent_s is None else self.sent_s - _first_known(self.sendable_s, self.intended_s)

    @property
    def ttft_s(self) -> float:
        return (self.chunk_s[0] if self.chunk_s else self.end_s) - self.intended_s if self.is_finished else math.inf

    @property
    def e2el_s(self) -> float:
        return (self.chunk_s[-1] if self.chunk_s else self.end_s) - self.intended_s if self.is_finished else math.inf

    @property
    def tpot_s(self) -> float | None:
        if not self.is_finished:
            return math.inf
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        gaps = [later - earlier for earlier, later in pairwise(self.chunk_s)]
        return gaps if self.is_finished else [*gaps, math.inf]

    @property
    def max_stall_s(self) -> float:
        return max(self.gaps_s, default=0.0)


def _first_known(*values: float | None) -> float:
    return next(value for value in values if value is not None)


@dataclass(frozen=True, slots=True)
class Slo:
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    def is_met_by(self, record: LoadRecord) -> bool:
        """A failed request meets none; a single token has TPOT 0."""
        pairs = ((self.ttft_s, record.ttft_s), (self.tpot_s, record.tpot_s or 0.0), (self.e2el_s, record.e2el_s))
        return record.is_finished and all(limit is None or value <= limit for limit, value in pairs)


def parse_slo(words: Iterable[str]) -> Slo:
    """Milliseconds, as in vLLM's `--goodput`: `("ttft:300", "tpot:50")`. Raises ValueError."""
    limits: dict[str, float] = {}
    for word in words:
        name, colon, value = word.partition(":")
        try:
            limit_ms = float(value)
        except ValueError:
            limit_ms = math.nan
        if name not in ("ttft", "tpot", "e2el") or not colon or not limit_ms > 0:
            raise ValueError(f"{word!r} is not one of ttft:MS, tpot:MS, e2el:MS with MS > 0")
        limits[f"{name}_s"] = limit_ms / 1000
    return Slo(**limits)


def percentile(ordered: Sequence[float], quantile: float) -> float:
    """Linear interpolation (numpy's default), safe with infinities; `ordered` ascending, nan when empty."""
    if not ordered:
        return math.nan
    rank = quantile * (len(ordered) - 1)
    low = int(rank)
    share = rank - low
    if share == 0.0 or ordered[low] == ordered[low + 1]:
        return ordered[low]
    return math.inf if math.isinf(ordered[low + 1]) else ordered[low] + share * (ordered[low + 1] - ordered[low])


def percentile_interval(ordered: Sequence[float], quantile: float) -> tuple[float, float]:
    """95 % interval from order statistics (binomial ranks, normal approximation)."""
    if not ordered:
        return math.nan, math.nan
    count = len(ordered)
    half = Z_95 * math.sqrt(count * quantile * (1 - quantile))
    low = math.floor(count * quantile - half)
    high = math.ceil(count * quantile + half)
    return ordered[min(max(low, 0), count - 1)], ordered[min(max(high, 0), count - 1)]


def needed_samples(quantile: float) -> int:
    """The number of samples of which one is expected above the quantile: 1000 for P99.9."""
    return round(1 / (1 - quantile))


NEEDED_SAMPLES = {f"p{quantile * 100:g}": needed_samples(quantile) for quantile in QUANTILES}


@dataclass(frozen=True, slots=True)
class Distribution:
    """What failed requests decide is infinite; reports print `known` quantiles."""

    count: int
    failed: int
    mean: float
    max: float
    quantiles: Mapping[str, float] = field(default_factory=dict)
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def known(self, name: str) -> float | None:
        return self.quantiles[name] if self.count >= NEEDED_SAMPLES[name] else None


def distribution(samples: Iterable[float]) -> Distribution:
    ordered = sorted(samples)
    names = {quantile: f"p{quantile * 100:g}" for quantile in QUANTILES}
    return Distribution(
        count=len(ordered),
        failed=sum(map(math.isinf, ordered)),
        mean=math.fsum(ordered) / len(ordered) if ordered else math.nan,
        max=ordered[-1] if ordered else math.nan,
        quantiles={name: percentile(ordered, quantile) for quantile, name in names.items()},
        intervals={name: percentile_interval(ordered, quantile) for quantile, name in names.items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Rates are per second from the first intended send to the last end.

    client_lag_s  without waits for a place, or for a turn in a burst
    burst_send_s  which the latencies include
    """

    duration_s: float
    offered: int
    admitted: int
    finished: int
    peak_concurrency: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    request_throughput: float
    output_throughput: float
    total_throughput: float
    goodput: float | None
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    e2el_s: Distribution
    max_stall_s: Distribution
    client_lag_s: Distribution
    burst_send_s: float
    errors: Mapping[str, int]
    first_error: str = ""

    @property
    def is_valid(self) -> bool:
        return self.client_lag_s.quantiles["p99"] < MAX_CLIENT_LAG_S  # nan, when nothing was sent, is not less


def summarize(records: Sequence[LoadRecord], slo: Slo | None = None) -> LoadReport:
    """Raises ValueError without a record."""
    if not records:
        raise ValueError("no request was made")
    finished = [record for record in records if record.is_finished]
    duration_s = max(record.end_s for record in records) - min(record.intended_s for record in records)
    per_second = 1.0 / duration_s if duration_s > 0 else math.nan
    prompt_tokens = sum(record.prompt_tokens for record in finished)
    output_tokens = sum(record.output_tokens for record in finished)
    errors: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            errors[record.error] = errors.get(record.error, 0) + 1
    return LoadReport(
        duration_s=duration_s,
        offered=len(records),
        admitted=sum(not record.was_refused for record in records),
        finished=len(finished),
        peak_concurrency=peak_concurrency(records),
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(record.cached_tokens for record in finished),
        output_tokens=output_tokens,
        request_throughput=len(finished) * per_second,
        output_throughput=output_tokens * per_second,
        total_throughput=(prompt_tokens + output_tokens) * per_second,
        goodput=None if slo is None else sum(slo.is_met_by(record) for record in records) * per_second,
        ttft_s=distribution(record.ttft_s for record in records),
        tpot_s=distribution(tpot for record in records if (tpot := record.tpot_s) is not None),
        itl_s=distribution(gap for record in records for gap in record.gaps_s),
        e2el_s=distribution(record.e2el_s for record in records),
        max_stall_s=distribution(record.max_stall_s for record in records),
        client_lag_s=distribution(lag for record in records if (lag := record.client_lag_s) is not None),
        burst_send_s=burst_send_s(records),
        errors=errors,
        first_error=_first_error(records),
    )


def _first_error(records: Sequence[LoadRecord]) -> str:
    failed = sorted((record for record in records if record.error is not None), key=lambda record: record.intended_s)
    return ": ".join(word for word in (failed[0].error, failed[0].detail) if word) if failed else ""


def burst_send_s(records: Sequence[LoadRecord]) -> float:
    """The longest delay by which the client held back a request of a burst."""
    sizes = Counter(record.intended_s for record in records)
    delays = (record.send_delay_s for record in records if sizes[record.intended_s] > 1)
    return max((delay for delay in delays if delay is not None), default=0.0)


def peak_concurrency(records: Iterable[LoadRecord]) -> int:
    events = [event for r in records if r.sent_s is not None for event in ((r.sent_s, 1), (r.end_s, -1))]
    running = peak = 0
    for _, change in sorted(events):
        running += change
        peak = max(peak, running)
    return peak
