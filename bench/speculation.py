"""Measures what speculation gives, and what it costs where it gives nothing: the same requests with drafts and without, in turns, in one
process.

    python -m bench.speculation [--drafts planted] [--quantization int8] [--rounds 6] [--tokens 96]
        -> bench/results/MACHINE/speculation-*.json

`planted`: first, the bundled model answers its held-out prompts, and the drafters without a model are asked what follows each token: how
often they draft, and how often a draft is right if those before it were. Then a model of TinyLlama's shape with random weights answers,
whose text has nothing to copy. Its drafter is given the tokens that the engine without speculation gave, with errors planted: at the rate
of the bundled model's copying, at 0.6 and at 0.3. All that decides how many drafts are computed is the product's. All engines are
`deterministic`, so that the text to draft is the same.

A load keeps its streams busy: it has several requests for each, of different lengths. In one batch of equal lengths drafts would let some
answers end early, and the last few rows would take steps of their own: that measures the batch's end, and not its pace.

`bundled`: the bundled model answers its held-out prompts to their own ends, with `ngram`, with the bundled draft model, and without.

ratio      seconds with drafts over seconds without: geometric mean of the rounds and its 95 % interval
right      share of the drafts that were computed and right; drafted: drafts computed for each token given
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: see headrace.tensor.host.openmp

import numpy as np
from transformers import AutoTokenizer

from bench.harness import write_portable
from bench.machine import results_file
from bench.pairs import paired_ratio
from bench.tinyllama import write_tinyllama
from headrace import LLM, SamplingParams
from headrace.bundled import DEFAULT_MODEL
from headrace.bundled import DRAFT_MODEL as BUNDLED_DRAFT
from headrace.core.ids import SlotId
from headrace.core.load import EngineCounters
from headrace.core.plan import Started, int_column
from headrace.core.sampling import SamplingParams as CoreParams
from headrace.core.speculation import DRAFT_MODEL, NGRAM, SUFFIX, SpeculativeConfig
from headrace.engine.runner import build as engine_build
from headrace.engine.runner.drafts.lookup import make_lookup
from headrace.engine.runner.slots import Ints
from headrace.fleet.weights import resolve_model
from headrace.lab.environment import bandwidth_facts, bandwidth_script, environment, measure_bandwidth
from tools.train_tiny.corpus import held_out_examples

MOST = 5
OTHER_RATES = (0.6, 0.3)
COPYING = "copy"
NUM_NAMING = 16


@dataclass(frozen=True, slots=True)
class Load:
    """streams  sequences at once, each of num_waves requests one after another; long_prompts: of LONG_PROMPT tokens, beside the first"""

    streams: int
    num_waves: int
    long_prompts: int = 0

    @property
    def num_short(self) -> int:
        return self.streams * self.num_waves


SHORT_PROMPT, LONG_PROMPT = 32, 768
LOADS: Mapping[str, Load] = {
    "1 stream": Load(1, 2), "8 streams": Load(8, 4), "32 streams": Load(32, 2), "4 streams and long prompts": Load(4, 4, 4),
}  # fmt: skip
BUNDLED_LOADS: Mapping[str, Load] = {"1 stream": Load(1, 20), "8 streams": Load(8, 10)}

Requests = tuple[list[list[int]], list[SamplingParams]]
"""Prompts, and what is asked of each."""


class GivenDrafts:
    """A drafter that is given what to draft, by the first tokens of a prompt, which no two have in common.

    coverage  how often there are drafts; rate: how often a draft is what it was given
    """

    def __init__(self) -> None:
        self.answers: dict[tuple[int, ...], Sequence[int]] = {}
        self.coverage, self.rate, self._rng = 1.0, 0.0, np.random.default_rng(0)
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._num_outputs: Counter[int] = Counter()

    def start(self, started: Started) -> None:
        prompt = started.token_ids[: started.num_prompt_tokens]
        self._prompts[started.slot] = tuple(prompt[:NUM_NAMING])
        self._num_outputs[started.slot] = len(started.token_ids) - len(prompt)

    def end(self, slots: Ints) -> None: ...

    def commit(self, slots: Ints, token_ids: Ints) -> None:
        self._num_outputs.update(slots.tolist())

    def retract(self, slot: int, token_ids: Ints) -> None:
        self._num_outputs[slot] -= len(token_ids)

    def close(self) -> None: ...

    def draft(self, slots: Ints, most: Ints) -> list[Ints]:
        return [self._draft(slot, count) for slot, count in zip(slots.tolist(), most.tolist(), strict=True)]

    def _draft(self, slot: int, most: int) -> Ints:
        begin = self._num_outputs[slot]
        most = most if self._rng.random() < self.coverage else 0
        drafts = np.array(self.answers.get(self._prompts[slot], ())[begin : begin + most], dtype=np.int64)
        is_wrong = self._rng.random(len(drafts)) >= self.rate
        drafts[is_wrong] = 3 + (drafts[is_wrong] - 2) % 2000
        return drafts


def answer(llm: LLM, requests: Requests) -> list[list[int]]:
    prompts, params = requests
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def held_out_prompts(num_per_task: int) -> dict[str, list[list[int]]]:
    tokenizer = AutoTokenizer.from_pretrained(str(resolve_model(DEFAULT_MODEL)))
    found = held_out_examples(num_per_task)
    return {task: [list(tokenizer(one.prompt(), add_special_tokens=False)["input_ids"]) for one in own] for task, own in found.items()}


def copying(prompts: Mapping[str, list[list[int]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Method -> task -> coverage (tokens for which there are drafts) and rate (drafts that are right, of those tried)."""
    with LLM(DEFAULT_MODEL) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=64, detokenize=False)
        answers = {task: answer(llm, (own, [params] * len(own))) for task, own in prompts.items()}
    return {method: {task: _lookup_rate(method, prompts[task], answers[task]) for task in sorted(prompts)} for method in (NGRAM, SUFFIX)}


def _lookup_rate(method: str, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> dict[str, float]:
    num_tokens = num_drafted = num_tried = num_right = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        drafter = make_lookup(SpeculativeConfig(method=method))
        drafter.start(Started(SlotId(0), int_column(prompt), len(prompt), CoreParams(), 0))
        for place, token in enumerate(answer):
            [drafts] = drafter.draft(np.zeros(1, dtype=np.int64), np.array([MOST]))
            follows = answer[place : place + len(drafts)]
            right = next((count for count, (draft, is_) in enumerate(zip(drafts, follows, strict=False)) if draft != is_), len(follows))
            num_tokens, num_drafted = num_tokens + 1, num_drafted + bool(len(drafts))
            num_right, num_tried = num_right + right, num_tried + right + (right < len(follows))
            drafter.commit(np.zeros(1, dtype=np.int64), np.array([token]))
    return {"coverage": num_drafted / max(1, num_tokens), "rate": num_right / max(1, num_tried)}


def random_requests(load: Load, num_tokens: int, seed: int) -> Requests:
    """Long prompts have few tokens to give: their streams are the load beside the others."""
    draw = random.Random(seed)
    lengths = [SHORT_PROMPT] * load.num_short + [LONG_PROMPT] * load.long_prompts
    limits = [num_tokens - number * 7 % (num_tokens // 2) for number in range(load.num_short)] + [4] * load.long_prompts
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=limit, detokenize=False) for limit in limits]
    return [[draw.randrange(3, 2000) for _ in range(length)] for length in lengths], params


def held_out_requests(prompts: Mapping[str, list[list[int]]], load: Load, num_tokens: int, seed: int) -> Requests:
    drawn = random.Random(seed).choices([ids for own in prompts.values() for ids in own], k=load.num_short)
    return drawn, [SamplingParams(temperature=0.0, max_tokens=num_tokens, detokenize=False)] * len(drawn)


def generate(llm: LLM, requests: Requests) -> tuple[float, list[list[int]]]:
    """Seconds, and the tokens of each prompt."""
    began = time.perf_counter()
    answers = answer(llm, requests)
    return time.perf_counter() - began, answers


def measure(
    plain: LLM, drafting: Mapping[str, LLM], make_requests: Callable[[int], Requests], rounds: int, given: GivenDrafts | None = None
) -> dict[str, dict[str, object]]:
    """Method -> ratio, shares and seconds. The first round warms up, and is not kept."""
    seconds: dict[str, dict[str, list[float]]] = {method: {"without": [], "with": []} for method in drafting}
    before = {method: llm.engine.snapshot().counters for method, llm in drafting.items()}
    for number in range(-1, rounds):
        requests = make_requests(number)
        took_without, answers = generate(plain, requests)
        if given is not None:
            given.answers = {tuple(prompt[:NUM_NAMING]): answer for prompt, answer in zip(requests[0], answers, strict=True)}
        took: dict[str, float] = {}
        for method in sorted(drafting, reverse=number % 2 == 1):
            took[method], drafted = generate(drafting[method], requests)
            assert drafted == answers, f"{method}: drafts changed the text"
        if number % 2:  # the other order, with what is known already
            took_without, _ = generate(plain, requests)
        if number >= 0:
            for method, took_with in took.items():
                seconds[method]["without"].append(took_without)
                seconds[method]["with"].append(took_with)
    return {method: _entry(before[method], llm.engine.snapshot().counters, seconds[method]) for method, llm in drafting.items()}


def _entry(before: EngineCounters, after: EngineCounters, seconds: dict[str, list[float]]) -> dict[str, object]:
    computed, right = after.draft_tokens - before.draft_tokens, after.accepted_tokens - before.accepted_tokens
    shares = {"right": right / max(1, computed), "drafted": computed / (after.generation_tokens - before.generation_tokens)}
    return {"ratio": asdict(paired_ratio(seconds["without"], seconds["with"])), **shares, "seconds": seconds}


def options_of(quantization: str, max_num_seqs: int) -> dict[str, Any]:
    return {
        "dtype": "float32" if quantization == "int8" else "bfloat16", "quantization": quantization, "max_num_seqs": max_num_seqs,
        "deterministic": True, "enable_prefix_caching": False, "gpu_memory_utilization": 0.2,
    }  # fmt: skip


def planted(found: dict[str, dict[str, dict[str, float]]], quantization: str, rounds: int, num_tokens: int) -> Iterator[dict[str, object]]:
    """Of each load and rate, on TinyLlama's shape."""
    copied, given = found[NGRAM][COPYING], GivenDrafts()
    rates = [(copied["coverage"], copied["rate"]), *((1.0, rate) for rate in OTHER_RATES)]
    with tempfile.TemporaryDirectory() as folder:
        write_tinyllama(Path(folder))
        for name, load in LOADS.items():
            options = {**options_of(quantization, load.streams + load.long_prompts), "load_format": "dummy"}
            with ExitStack() as stack:
                plain = stack.enter_context(LLM(folder, **options))
                with mock.patch.object(engine_build, "make_lookup", return_value=given):
                    drafting = LLM(folder, speculative_config={"method": NGRAM, "num_speculative_tokens": MOST}, **options)
                stack.enter_context(drafting)
                for given.coverage, given.rate in rates:
                    make = partial(random_requests, load, num_tokens)
                    entry = measure(plain, {NGRAM: drafting}, make, rounds, given)[NGRAM]
                    yield {"load": name, "coverage": given.coverage, "rate": given.rate, **entry}


def bundled(prompts: Mapping[str, list[list[int]]], quantization: str, rounds: int, num_tokens: int) -> Iterator[dict[str, object]]:
    """Of each load and method, on the bundled model and its bundled draft model."""
    for name, load in BUNDLED_LOADS.items():
        options = options_of(quantization, load.streams)
        with ExitStack() as stack:
            plain = stack.enter_context(LLM(DEFAULT_MODEL, **options))
            configs = {NGRAM: {"method": NGRAM}, DRAFT_MODEL: {"method": DRAFT_MODEL, "model": BUNDLED_DRAFT}}
            drafting = {
                method: stack.enter_context(LLM(DEFAULT_MODEL, speculative_config={**config, "num_speculative_tokens": MOST}, **options))
                for method, config in configs.items()
            }
            make = partial(held_out_requests, prompts, load, num_tokens)
            for method, entry in measure(plain, drafting, make, rounds).items():
                yield {"load": name, "method": method, **entry}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafts", choices=("planted", "bundled"), default="planted")
    parser.add_argument("--quantization", choices=("none", "int8"), default="int8")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts-per-task", type=int, default=40)
    asked = parser.parse_args(arguments)
    bandwidth, prompts = measure_bandwidth(bandwidth_script()), held_out_prompts(asked.prompts_per_task)
    here: dict[str, object] = {"environment": environment(), **bandwidth_facts(bandwidth), "tokens": asked.tokens, "most": MOST}
    if asked.drafts == "planted":
        here["lookup"] = found = copying(prompts)
        print(found, flush=True)
        made, model = planted(found, asked.quantization, asked.rounds, asked.tokens), "llama-1.1b"
    else:
        made, model = bundled(prompts, asked.quantization, asked.rounds, asked.tokens), DEFAULT_MODEL
    entries: list[dict[str, object]] = []
    for entry in made:
        print({key: value for key, value in entry.items() if key != "seconds"}, flush=True)
        entries.append(entry)
    name = "bf16" if asked.quantization == "none" else "int8"
    write_portable(results_file(f"speculation-{model}-{name}"), {**here, "entries": entries})


if __name__ == "__main__":
    main()
