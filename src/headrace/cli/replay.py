"""`headrace replay FILE` shows the dumped last plans of an engine as a table, or runs them again on a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.exits import CommandExitCode
from headrace.cli.flags.flag import GivenFlags, with_flags
from headrace.cli.flags.rows import engine_flags
from headrace.core.errors import ConfigError
from headrace.core.strict_decode import decode
from headrace.engine.config import EngineConfig

if TYPE_CHECKING:
    from headrace.core.plan import Plan
    from headrace.lab.replay import Replayed


COMPUTED = ("num_kv_blocks", "load_format", "seed", "dtype", "quantization", "kv_cache_dtype", "kernels", "deterministic", "block_size")
"""Options that decide how a plan is computed. What the scheduler decided is in the plan itself."""


@with_flags(*engine_flags(*COMPUTED))
def replay(
    file: Annotated[Path, typer.Argument(help="A dump of the engine's last plans.")],
    rows: Annotated[bool, typer.Option("--rows", help="Show every row of every plan.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per plan.")] = False,
    model: Annotated[str | None, typer.Option("--model", help="Folder of the model to run the plans on again.")] = None,
    *,
    flags: GivenFlags,
) -> None:
    """Show a dumped ring of plans, or run it again on --model.

    Give the engine the options it had when it wrote the dump. By default it gets as many KV blocks as the plans name.
    """
    from headrace.core.plan_codec import load_plans

    try:
        plans = load_plans(file.read_bytes())
    except OSError as error:
        raise ConfigError(str(file), f"cannot be read ({error.strerror})") from error
    if model is None:
        lines = _shown(plans, rows=rows, as_json=as_json)
    else:
        _report_left_out(plans)
        lines = _run(plans, model, dict(flags.values), as_json=as_json)
    for line in lines:
        print(line, flush=True)


def _shown(plans: list[Plan], *, rows: bool, as_json: bool) -> Iterator[str]:
    from headrace.lab.replay import describe_rows, summarize_plan

    names = ("step_id", "prefill_rows", "decode_rows", "tokens", "samples", "started", "ended", "new_blocks", "moves")
    if not as_json:
        yield " ".join(f"{name:>12}" for name in names)
    for plan in plans:
        summary = summarize_plan(plan)
        detail = list(describe_rows(plan)) if rows else []
        if as_json:
            yield json.dumps({**summary, **({"rows": detail} if rows else {})})
        else:
            yield " ".join(f"{summary[name]:>12}" for name in names)
            yield from (f"    {line}" for line in detail)


def _report_left_out(plans: list[Plan]) -> None:
    """Raises typer.Exit when no row can be run again, before a model is loaded for nothing."""
    from headrace.lab.replay import count_rows

    run, left_out = count_rows(plans)
    if left_out:
        why = "their sequences began before the first plan of the dump, and what they had in the KV cache is not in it"
        print(f"{left_out} of {run + left_out} rows are left out: {why}.", file=sys.stderr)
    if not run:
        print("There is no row to run again. Without --model the plans are shown as they are.", file=sys.stderr)
        raise typer.Exit(CommandExitCode.FAILED)


def _run(plans: list[Plan], model: str, options: dict[str, object], *, as_json: bool) -> Iterator[str]:
    from headrace.engine.build import reading_ahead
    from headrace.fleet.weights import resolve_model
    from headrace.lab.replay import replay as run_again

    seqs = 1 + max((max(plan.slots, default=0) for plan in plans), default=0)
    options.setdefault("num_kv_blocks", 1 + max((max(plan.table_blocks, default=0) for plan in plans), default=1))
    options |= {"max_num_seqs": seqs, "max_num_batched_tokens": max(seqs, *(plan.num_tokens for plan in plans))}
    config = decode(EngineConfig, {**options, "model": str(resolve_model(model))}).checked()
    with reading_ahead(config) as packed:
        from headrace.engine.runner.build import build_runner

        runner, _ = build_runner(config, packed)
    try:
        for done in run_again(plans, runner):
            yield _line(done, as_json=as_json)
    finally:
        runner.close()


def _line(done: Replayed, *, as_json: bool) -> str:
    facts = {
        "step_id": done.plan.step_id,
        "rows": done.plan.num_rows,
        "skipped_rows": done.skipped_rows,
        "tokens": done.plan.num_tokens,
        "ms": round(done.seconds * 1000, 3),
        "sampled": list(done.result.token_ids),
        "errors": [message for _, message in done.result.errors],
    }
    return json.dumps(facts) if as_json else "  ".join(f"{name} {value}" for name, value in facts.items())
