"""Prints a load report as text, in the order of `vllm bench serve`, and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path

from headrace.core.errors import counted
from headrace.lab.metrics import NEEDED_SAMPLES, Distribution, LoadReport

WIDTH = 58
VOID = """\
VOID: p99 of the client's own lag is 1 ms or more, and the latencies above include it.
Use a faster or less busy client machine."""
MAX_BURST_SHARE = 0.05
"""Share of the median TTFT: with more, a note mentions the time to send a burst."""
MAX_CACHED_SHARE = 0.1
"""Share of the prompt tokens: with more, a note mentions cached ones."""


def to_plain(value: object) -> object:
    """Data for strict JSON. Null: what failed requests decide, and a quantile of too few samples."""
    if is_dataclass(value) and not isinstance(value, type):
        plain = {item.name: getattr(value, item.name) for item in fields(value)}
        if isinstance(value, Distribution):
            known = {name: value.known(name) for name in value.quantiles}
            intervals = {name: None if known[name] is None else interval for name, interval in value.intervals.items()}
            plain |= {"quantiles": known, "intervals": intervals}
        return to_plain(plain)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def write_json(file: Path, value: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(json.dumps(to_plain(value), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(file)


def lines(report: LoadReport) -> Iterator[str]:
    """For a run in which at least one request was answered."""
    yield _title("Serving benchmark result", "=")
    yield _row("Requests offered / admitted / finished", f"{report.offered} / {report.admitted} / {report.finished}")
    yield _row("Duration (s)", report.duration_s)
    yield _row("Prompt / cached / output tokens", f"{report.prompt_tokens} / {report.cached_tokens} / {report.output_tokens}")
    yield _row("Request throughput (req/s)", report.request_throughput)
    if report.goodput is not None:
        yield _row("Request goodput (req/s)", report.goodput if report.goodput else "no request met the goals")
    yield _row("Output token throughput (tok/s)", report.output_throughput)
    yield _row("Total token throughput (tok/s)", report.total_throughput)
    yield _row("Peak concurrent requests", str(report.peak_concurrency))
    yield "In brackets: 95 % confidence interval of that percentile over"
    yield "the samples of this run, from order statistics."
    for title, name, samples in (
        ("Time to first token", "TTFT", report.ttft_s),
        ("Time per output token (excl. first)", "TPOT", report.tpot_s),
        ("Inter-token latency", "ITL", report.itl_s),
        ("End-to-end latency", "E2EL", report.e2el_s),
        ("Longest stall of a request", "stall", report.max_stall_s),
    ):
        yield from _section(title, name, samples)
    if report.errors:
        yield from failures(report)
    yield _row("Client's own lag p99 (ms)", report.client_lag_s.quantiles["p99"] * 1000)
    yield _row("Time to send a burst (ms)", report.burst_send_s * 1000)
    if not report.is_valid:
        yield VOID
    yield "=" * WIDTH


def notes(report: LoadReport, *, has_shared_prefix: bool) -> Iterator[str]:
    """Says why the figures mean less than they seem to."""
    ttft_s = report.ttft_s.quantiles["p50"]
    if report.finished and report.burst_send_s > MAX_BURST_SHARE * ttft_s:
        yield (
            f"The client took {report.burst_send_s * 1000:.0f} ms to send a burst, more than {MAX_BURST_SHARE:.0%} of the median TTFT. "
            "The latencies include it; give --request-rate to spread the requests."
        )
    if not has_shared_prefix and report.cached_tokens > MAX_CACHED_SHARE * report.prompt_tokens:
        yield (
            f"{report.cached_tokens} of {report.prompt_tokens} prompt tokens were cached, though the prompts share no prefix: "
            "the server has seen them before. Give another --seed."
        )


def failures(report: LoadReport) -> Iterator[str]:
    yield f"{report.offered - report.finished} of {counted(report.offered, 'request')} failed:"
    yield from (f"  {count} x {error}" for error, count in sorted(report.errors.items(), key=lambda each: -each[1]))
    yield f"  The first one: {report.first_error}"


def _section(title: str, name: str, samples: Distribution) -> Iterator[str]:
    yield _title(f"{title}, {samples.count} samples", "-")
    yield _row(f"Mean {name} (ms)", _ms(samples.mean, name, samples))
    for quantile in samples.quantiles:
        value = samples.known(quantile)
        if value is None:
            yield _row(f"{quantile.upper()} {name} (ms)", f"-  ({NEEDED_SAMPLES[quantile]} samples needed)")
            continue
        low, high = (f"{end * 1000:.2f}" if math.isfinite(end) else "failed" for end in samples.intervals[quantile])
        shown = f"{_ms(value, name, samples)}  [{low}, {high}]" if math.isfinite(value) else _ms(value, name, samples)
        yield _row(f"{quantile.upper()} {name} (ms)", shown)


def _ms(value: float, name: str, samples: Distribution) -> str:
    """Samples of ITL are gaps: no count of requests is a share of them."""
    if math.isinf(value) and name == "ITL":
        return f"-  ({counted(samples.failed, 'request')} failed)"
    if math.isinf(value):
        return f"-  ({samples.failed} of {samples.count} failed)"
    return "-" if math.isnan(value) else f"{value * 1000:.2f}"


def _title(text: str, fill: str) -> str:
    return f" {text} ".center(WIDTH, fill)


def _row(name: str, value: float | str) -> str:
    shown = value if isinstance(value, str) else "-" if math.isnan(value) else f"{value:.2f}"
    return f"{name + ':':<40} {shown}"
