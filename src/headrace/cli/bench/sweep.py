"""`headrace bench sweep` measures a running server at every point of a grid: batch size x prompt length x concurrency."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.bench.common import (
    Bandwidth,
    Flag,
    RunConditions,
    Seed,
    ServedModel,
    Url,
    find_target,
    make_shape,
    warm_up,
    writable,
)
from headrace.cli.chat.chat import DEFAULT_URL, ClientKey
from headrace.cli.exits import CommandExitCode, ServerFailed, UsageRefused

if TYPE_CHECKING:
    from headrace.lab.datasets import WorkloadShape
    from headrace.lab.loadgen import LoadTarget
    from headrace.lab.sweep import SweepPoint, SweepRow

VOCAB_SIZE = 2000
"""Token ids of prompts are drawn below this, as by `headrace bench serve`."""


def sweep(
    url: Url = DEFAULT_URL,
    model: ServedModel = None,
    batch_size: Annotated[str, Flag("--batch-size", help="Requests handed over at once; several with commas.")] = "1,8,32",
    input_len: Annotated[str, Flag("--random-input-len", "--input-len", help="Prompt tokens; several with commas.")] = "128,512",
    max_concurrency: Annotated[
        str, Flag("--max-concurrency", "--concurrency", help="Most requests of a batch in flight; several with commas.")
    ] = "1,8,32",
    output_len: Annotated[int, Flag("--random-output-len", "--output-len", min=1)] = 64,
    price_per_1m: Annotated[float, Flag("--price-per-1m", min=0, help="Dollars per 1M tokens, of prompts and of outputs.")] = 0.20,
    api_key: ClientKey = None,
    seed: Seed = 0,
    bandwidth: Bandwidth = True,
    output_json: Annotated[
        Path | None, Flag("--json", "--output-json", "--result-filename", callback=writable, help="File for all that was measured.")
    ] = None,
    svg: Annotated[Path | None, Flag("--svg", callback=writable, help="File for a picture of tokens/s, TTFT and TPOT.")] = None,
) -> None:
    """Compare batch sizes, prompt lengths and concurrencies on a running server: time, tokens/s, TTFT, TPOT, price."""
    from headrace.lab.report import write_json
    from headrace.lab.svg import find_matplotlib
    from headrace.lab.sweep import make_grid, write_sweep_chart

    batch_sizes = _counts("--batch-size", batch_size)
    lengths = _counts("--input-len", input_len)
    try:
        points = make_grid(batch_sizes, lengths, _counts("--max-concurrency", max_concurrency), output_tokens=output_len)
        shapes = {length: make_shape("random", length, output_len, 0.0, 0, 1, VOCAB_SIZE) for length in lengths}
    except ValueError as error:
        raise UsageRefused(str(error)) from error
    if svg is not None:
        find_matplotlib("--svg")
    target = find_target(url, model, api_key)
    conditions = RunConditions(bandwidth) if output_json is not None else None
    rows = _measure(target, points, shapes, seed, price_per_1m)
    settings = {"url": target.url, "model": target.model, "output_tokens": output_len, "price_per_1m": price_per_1m, "seed": seed}
    if output_json is not None and conditions is not None:
        write_json(output_json, conditions.result(settings=settings, rows=rows))
    _print_faults(rows)
    if not any(row.report.finished for row in rows):
        print("headrace: no request was answered", file=sys.stderr)
        raise typer.Exit(CommandExitCode.FAILED)
    if svg is not None:
        write_sweep_chart(svg, rows, f"{target.model} at {target.url}, {output_len} output tokens")


def _counts(flag: str, text: str) -> Sequence[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UsageRefused(f"{flag}: {text!r} is no list of whole numbers above 0. Write 8 or 1,8,32.")
    return [int(word) for word in words]


def _measure(
    target: LoadTarget, points: Sequence[SweepPoint], shapes: dict[int, WorkloadShape], seed: int, price_per_1m: float
) -> list[SweepRow]:
    """Prints each row when it is there. Raises ServerFailed."""
    import asyncio

    from headrace.lab.datasets import make_requests
    from headrace.lab.loadgen import run_load
    from headrace.lab.metrics import summarize
    from headrace.lab.sweep import heading, line_of, make_row

    warmed = [record for shape in shapes.values() for record in asyncio.run(run_load(target, warm_up(shape), None))]
    if not any(record.is_finished for record in warmed):
        raise ServerFailed(f"{target.url}: no request of the warm-up was answered: {summarize(warmed).first_error}")
    print(f"{target.model} at {target.url}; means; dollars at {price_per_1m:g} per 1M tokens\n{heading()}", flush=True)
    rows: list[SweepRow] = []
    for number, point in enumerate(points):
        # Fresh prompts at each point: repeated ones would be found in the prefix cache.
        requests = make_requests(point.batch_size, shapes[point.input_tokens], seed=seed * len(points) + number)
        limited = replace(target, max_concurrency=point.concurrency)
        rows.append(make_row(point, asyncio.run(run_load(limited, requests, None)), price_per_1m=price_per_1m))
        print(line_of(rows[-1]), flush=True)
    return rows


def _print_faults(rows: Sequence[SweepRow]) -> None:
    from headrace.lab.report import VOID, failures

    for row in rows:
        if row.report.errors:
            print("\n".join([f"FAILED at {row}:", *failures(row.report)]))
    if not all(row.report.is_valid for row in rows):
        print(VOID)
