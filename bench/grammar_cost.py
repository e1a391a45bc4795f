"""Measures what a grammar costs a decode step: the same streams with one and without, in turns, in one process.

    python -m bench.grammar_cost MODEL [--quantization int8] [--streams 32] [--tokens 64] [--rounds 10]
        -> bench/results/MACHINE/grammar-cost-*.json

A step is what the engine measures of it: filling masks beside the forward pass, waiting for them, applying them and drawing. CPU seconds
of the process are kept beside it, since they say something on a busy machine, too. The grammar is a long list of records: names, members,
strings and numbers follow one another, as in a usual document, and no stream ends.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: see headrace.tensor.host.openmp

from bench.harness import write_portable
from bench.machine import results_file
from bench.pairs import paired_ratio
from headrace import LLM, SamplingParams, StructuredOutputsParams
from headrace.engine.config import ROUNDINGS
from headrace.lab.environment import bandwidth_facts, bandwidth_script, environment, measure_bandwidth

PROMPT_TOKENS = 16
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 4, "maxLength": 24},
        "count": {"type": "integer", "minimum": 0, "maximum": 99999},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "note": {"anyOf": [{"type": "string", "maxLength": 40}, {"type": "null"}]},
    },
    "required": ["name", "count", "tags", "note"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": RECORD, "minItems": 1000}
VARIANTS: Mapping[str, SamplingParams] = {
    "without": SamplingParams(seed=1, ignore_eos=True),
    "with": SamplingParams(seed=1, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
}


def seconds_per_step(llm: LLM, params: SamplingParams, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Mean duration of a step of one run, by the engine's clock, and CPU seconds of the process per step."""
    before, cpu = llm.engine.snapshot().counters, time.process_time()
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    after, cpu = llm.engine.snapshot().counters, time.process_time() - cpu
    assert all(len(output.outputs[0].token_ids) == params.max_tokens for output in outputs), "a stream ended early"
    steps = after.steps - before.steps
    return {"step_s": (after.step_seconds - before.step_seconds) / steps, "cpu_s": cpu / steps, "steps": steps}


def measure(llm: LLM, num_streams: int, num_tokens: int, rounds: int) -> list[dict[str, dict[str, float]]]:
    """Each round's figures of both variants, whose order alternates. The first round compiles and is not kept."""
    draw, vocab_size, found = random.Random(0), llm.engine.info.vocab_size, []
    for number in range(-1, rounds):
        prompts = [[draw.randrange(3, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(num_streams)]
        names = sorted(VARIANTS, reverse=number % 2 == 1)
        values = {name: seconds_per_step(llm, VARIANTS[name].with_(max_tokens=num_tokens), prompts) for name in names}
        print(number, values, flush=True)
        found.append(values)
    return found[1:]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantization", choices=("none", *ROUNDINGS), default="none")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args(arguments)
    bandwidth = measure_bandwidth(bandwidth_script())
    with LLM(str(given.model), quantization=given.quantization, max_num_seqs=given.streams, enable_prefix_caching=False) as llm:
        found = measure(llm, given.streams, given.tokens, given.rounds)
    ratios = {name: asdict(paired_ratio(*([entry[side][name] for entry in found] for side in VARIANTS))) for name in ("step_s", "cpu_s")}
    print(ratios)
    here = environment()
    facts = replace(here, command=tuple("MODEL" if word == str(given.model) else word for word in here.command))
    file = results_file(f"grammar-cost-{given.model.name}-{given.quantization}")
    shape = {"streams": given.streams, "tokens": given.tokens, "schema": SCHEMA}
    write_portable(file, {"environment": facts, **bandwidth_facts(bandwidth), **shape, "ratios": ratios, "rounds": found})


if __name__ == "__main__":
    main()
