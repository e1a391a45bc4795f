"""Measures what a precision costs in answers: exact match of the bundled model per task, on its held-out prompts, decoded greedily by the
engine.

    python -m bench.quality [--num-per-task 500] -> bench/results/quality.json, and from then on a table in docs/benchmarks.md

Prompts, expected answers and what "exact" means are those of the model's card (`tools/train_tiny`): the answer, token by token, its end
included. The card's own figures are computed by transformers without generating; these come out of the engine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence

from transformers import AutoTokenizer

from bench.harness import write_portable
from bench.report import QUALITY, newest_results, write_page
from headrace import LLM, SamplingParams
from headrace.bundled import DEFAULT_MODEL
from headrace.fleet.weights import resolve_model
from headrace.lab.environment import environment
from tools.train_tiny.corpus import held_out_examples
from tools.train_tiny.evaluate import END, expected
from tools.train_tiny.tasks import Example

PRECISIONS: Mapping[str, Mapping[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
    "int8 KV": {"dtype": "float32", "kv_cache_dtype": "int8"},
    "int8, int8 KV": {"dtype": "float32", "quantization": "int8", "kv_cache_dtype": "int8"},
}
"""Options of `LLM` by the name of the column."""


def exact_matches(llm: LLM, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[bool]:
    """For each prompt: are the greedy tokens this answer, the end token being its last?"""
    longest = max(len(answer) for answer in answers)
    params = [SamplingParams(temperature=0.0, max_tokens=longest, detokenize=False)] * len(prompts)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) == answer for output, answer in zip(outputs, answers, strict=True)]


def measure(model: str, options: Mapping[str, str], examples: Mapping[str, Sequence[Example]]) -> dict[str, float]:
    """Task -> share of exact answers."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    with LLM(model, **options) as llm:  # type: ignore[arg-type]
        shares = {}
        for task, found in examples.items():
            matches = exact_matches(llm, [ids(one.prompt()) for one in found], [ids(expected(one) + END) for one in found])
            shares[task] = sum(matches) / len(matches)
    return shares


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-per-task", type=int, default=500, help="the card's number is 500")
    parser.add_argument("--precision", choices=PRECISIONS, action="append", help="again for more; default: all")
    given = parser.parse_args(arguments)
    examples = held_out_examples(given.num_per_task)
    model = str(resolve_model(DEFAULT_MODEL))
    table, began = {}, time.monotonic()
    for name in given.precision or PRECISIONS:
        table[name] = measure(model, PRECISIONS[name], examples)
        mean = sum(table[name].values()) / len(table[name])
        print(f"{name}: mean {mean:.1%} ({time.monotonic() - began:.0f} s so far)", flush=True)
    counts = {task: len(found) for task, found in examples.items()}
    options = {name: PRECISIONS[name] for name in table}
    write_portable(QUALITY, {"environment": environment(), "options": options, "n": counts, "exact_match": table})
    write_page(newest_results())


if __name__ == "__main__":
    main()
