"""Measures what `deterministic` costs: the same prompts and streams in an engine with the option and in one without, in turns, in one
process.

    python -m bench.deterministic_cost MODEL [--dtype auto] [--quantization int8] [--streams 32] [--tokens 64] [--rounds 10]
        -> bench/results/MACHINE/deterministic-cost-*.json

The option changes code only where an engine without it leaves products to a library, see docs/models.md#determinism. Both engines' kernels
and linear paths are in the result: where they are equal, a ratio other than one is noise. Both engines hold the whole model in memory.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: see headrace.tensor.host.openmp

from bench.harness import write_portable
from bench.machine import results_file
from bench.pairs import paired_ratio
from headrace import LLM, SamplingParams
from headrace.engine.config import DTYPES, ROUNDINGS
from headrace.lab.environment import bandwidth_facts, bandwidth_script, environment, measure_bandwidth

VARIANTS: Mapping[str, bool] = {"without": False, "with": True}
PROMPT_TOKENS: Mapping[str, int] = {"prefill": 512, "decode": 16}
"""Tokens of a prompt in each workload. Prefill: one prompt after the other and one token out; decode: all streams at once."""
PREFILL_PROMPTS = 4
Values = dict[str, dict[str, float]]
"""Variant -> "prefill_s", "decode_s" (mean seconds of a step by the engine's clock) and "cpu_s" of the process for both."""


def step_seconds(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Mean duration of a step while these prompts are answered together."""
    before = llm.engine.snapshot().counters
    llm.generate(list(prompts), SamplingParams(seed=1, ignore_eos=True, max_tokens=num_tokens), use_tqdm=False)
    after = llm.engine.snapshot().counters
    return (after.step_seconds - before.step_seconds) / (after.steps - before.steps)


def measure(llms: Mapping[str, LLM], num_streams: int, num_tokens: int, rounds: int) -> list[Values]:
    """Each round's figures of both variants, whose order alternates. The first round compiles and is not kept."""
    draw, vocab_size, found = random.Random(0), llms["with"].engine.info.vocab_size, []
    for number in range(-1, rounds):
        counts = {"prefill": PREFILL_PROMPTS, "decode": num_streams}
        prompts = {
            name: [[draw.randrange(3, vocab_size) for _ in range(PROMPT_TOKENS[name])] for _ in range(count)]
            for name, count in counts.items()
        }
        values: Values = {}
        for name in sorted(VARIANTS, reverse=number % 2 == 1):
            cpu = time.process_time()
            prefill = sum(step_seconds(llms[name], [prompt], 1) for prompt in prompts["prefill"]) / PREFILL_PROMPTS
            decode = step_seconds(llms[name], prompts["decode"], num_tokens)
            values[name] = {"prefill_s": prefill, "decode_s": decode, "cpu_s": time.process_time() - cpu}
        print(number, values, flush=True)
        found.append(values)
    return found[1:]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--quantization", choices=("none", *ROUNDINGS), default="none")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args(arguments)
    options = {"dtype": given.dtype, "quantization": given.quantization, "max_num_seqs": given.streams, "enable_prefix_caching": False}
    bandwidth = measure_bandwidth(bandwidth_script())
    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(LLM(str(given.model), deterministic=value, gpu_memory_utilization=0.2, **options))
            for name, value in VARIANTS.items()
        }
        numerics = {name: llm.engine.info.numerics for name, llm in llms.items()}
        found = measure(llms, given.streams, given.tokens, given.rounds)
    ratios = {
        name: asdict(paired_ratio(*([entry[side][name] for entry in found] for side in VARIANTS)))
        for name in ("prefill_s", "decode_s", "cpu_s")
    }
    print(ratios)
    here = environment()
    facts = replace(here, command=tuple("MODEL" if word == str(given.model) else word for word in here.command))
    file = results_file(f"deterministic-cost-{given.model.name}-{numerics['with']['dtype']}-{given.quantization}")
    shape = {"streams": given.streams, "tokens": given.tokens, "prompt_tokens": PROMPT_TOKENS, "numerics": numerics}
    write_portable(file, {"environment": facts, **bandwidth_facts(bandwidth), **shape, "ratios": ratios, "rounds": found})


if __name__ == "__main__":
    main()
