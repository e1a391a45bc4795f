"""Measures the shares of a decode step: its products, its other kernels, and everything around them, in one process.

    python -m bench.step_shares MODEL [--quantization int8] [--streams 1,8] [--steps 60] -> bench/results/MACHINE/step-shares-*.json

To compare two processes in turns takes seconds, in which a shared machine changes by more than the difference that is looked for. Here,
after every other step, each kernel of the step's list runs once more, alone. So whole steps and single kernels meet the same moments. The
figures are medians over the steps:

period  of a step that no single kernels follow, which is what a token takes: from the moment the step before left the layers, after its
        kernels ran alone, until this one does
list    the recorded kernels of its layers
head    the last product, which is not among them
parts   each kernel alone, of the steps taken apart. They sum to more than their list, since a region is begun for each, though what the
        list has just read may still be in the caches
share   (list x products' part of all parts + head) / period
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: see headrace.tensor.host.openmp

from torch import Tensor

from bench.engine_options import add_engine_options
from bench.harness import write_portable
from bench.machine import results_file
from headrace import LLM, SamplingParams
from headrace.core.errors import ConfigError
from headrace.lab.environment import bandwidth_facts, bandwidth_script, environment, measure_bandwidth
from headrace.tensor.kernels.cpu.jit.launch import kernel_names
from headrace.tensor.kernels.cpu.launch_list import RecordedLaunches, run_list
from headrace.tensor.models.decoder import DecoderModel

PROMPT_TOKENS = 128
PRODUCTS = ("linear.", "quantized.")
"""Modules of the kernels that multiply by weights, rounding of activations included."""


@dataclass(slots=True)
class Watched:
    """Recorded steps, one by one, in seconds. left: moments, parts included; parts: by kernel's address, none of a whole step."""

    lists: list[float] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    parts: list[dict[int, float]] = field(default_factory=list)
    heads: list[float] = field(default_factory=list)


@contextmanager
def watched() -> Iterator[Watched]:
    """Every other recorded step is taken apart while the block runs; its results are nonsense."""
    seen, run, logits = Watched(), RecordedLaunches.replay_as_is, DecoderModel.logits

    def seconds_of(recording: RecordedLaunches, kernel: int) -> float:
        entries = recording.entries_of(kernel)
        recording.reset_counters()
        began = time.perf_counter()
        run_list(entries, recording.workers)
        return time.perf_counter() - began

    def timed_run(recording: RecordedLaunches) -> None:
        began = time.perf_counter()
        run(recording)
        seen.lists.append(time.perf_counter() - began)
        kernels = dict.fromkeys(recording.entries[::3]) if len(seen.lists) % 2 else ()
        seen.parts.append({kernel: seconds_of(recording, kernel) for kernel in kernels})
        seen.left.append(time.perf_counter())

    def timed_logits(model: DecoderModel, hidden: Tensor) -> Tensor:
        began = time.perf_counter()
        made = logits(model, hidden)
        if seen.lists:  # or it is the prompts'
            seen.heads.append(time.perf_counter() - began)
        return made

    with patch.object(RecordedLaunches, "replay_as_is", timed_run), patch.object(DecoderModel, "logits", timed_logits):
        yield seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Medians over steps. parts_s: by the kernel's name; parts_of_list, products_of_parts and share are fractions."""

    period_s: float
    list_s: float
    head_s: float
    parts_s: dict[str, float]
    parts_of_list: float
    products_of_parts: float
    share: float

    def __str__(self) -> str:
        period, whole, head = (f"{1e3 * seconds:.1f}" for seconds in (self.period_s, self.list_s, self.head_s))
        return f"{period} ms, list {whole}, products {self.products_of_parts:.1%} of it, head {head}: {self.share:.1%} of the step"


def shares(seen: Watched, names: Mapping[int, str]) -> Shares:
    """Raises ConfigError where too few steps were recorded."""
    whole = [step for step, parts in enumerate(seen.parts) if step and not parts]
    apart = [step for step, parts in enumerate(seen.parts) if parts]
    if not whole:
        raise ConfigError(
            "streams", "steps with this number of rows are not recorded here, or too few were: ask for fewer streams or more steps"
        )
    named = [{names[kernel]: seconds for kernel, seconds in seen.parts[step].items()} for step in apart]
    sums = [sum(parts.values()) for parts in named]
    products = [sum(seconds for name, seconds in parts.items() if name.startswith(PRODUCTS)) for parts in named]
    of_parts = statistics.median(part / full for part, full in zip(products, sums, strict=True))
    period = statistics.median(seen.left[step] - seen.left[step - 1] for step in whole)
    list_s, head_s = statistics.median(seen.lists[step] for step in whole), statistics.median(seen.heads)
    return Shares(
        period_s=period,
        list_s=list_s,
        head_s=head_s,
        parts_s={name: statistics.median(parts.get(name, 0.0) for parts in named) for name in dict.fromkeys(chain(*named))},
        parts_of_list=statistics.median(sums[i] / seen.lists[step] for i, step in enumerate(apart)),
        products_of_parts=of_parts,
        share=(of_parts * list_s + head_s) / period,
    )


def watch(llm: LLM, streams: int, steps: int, seed: int) -> Watched:
    draw = random.Random(seed)
    prompts = [{"prompt_token_ids": [draw.randrange(10, 2000) for _ in range(PROMPT_TOKENS)]} for _ in range(streams)]
    params = SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True)
    with watched() as seen:
        llm.generate(prompts, [params] * streams, use_tqdm=False)
    return seen


def measure(llm: LLM, streams: int, steps: int) -> list[Shares]:
    """Twice, one after the other; the first time, which records, is not kept."""
    found = [shares(watch(llm, streams, steps, seed), kernel_names()) for seed in range(3)][1:]
    for each in found:
        print(f"{streams} streams: {each}", flush=True)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    add_engine_options(parser, "quantization")
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args(arguments)
    llm = LLM(str(given.model), quantization=given.quantization, kv_cache_dtype="bfloat16", enable_prefix_caching=False)
    bandwidth = measure_bandwidth(bandwidth_script())
    found = {count: measure(llm, int(count), given.steps) for count in given.streams.split(",")}
    entries = [{"streams": int(count), "found": [asdict(each) for each in twice]} for count, twice in found.items()]
    here = environment()
    facts = replace(here, command=tuple("MODEL" if word == str(given.model) else word for word in here.command))
    file = results_file(f"step-shares-{given.model.name}-{given.quantization}")
    write_portable(file, {"environment": facts, **bandwidth_facts(bandwidth), "steps": given.steps, "entries": entries})


if __name__ == "__main__":
    main()
