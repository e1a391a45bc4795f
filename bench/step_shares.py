"""A decode step taken apart: what its products, its other kernels and everything around them take, in one process.

    python -m bench.step_shares MODEL [--quantization int8] [--streams 1,8] [--steps 30] -> bench/results/MACHINE/step-shares-*.json

Two processes in turns are compared over seconds, in which a shared machine changes by more than what is looked for. Here every step is
followed at once by each kernel of its list alone, and the next one by none, so that the same moment meets all of them.

period  from the end of a step's list to the end of the next one's: what a token takes
list    the recorded kernels of the layers
head    the last product, which is not among them
share   (products among the list + head) / period, products being scaled to the step that they are a part of
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: see headrace.tensor.openmp

from torch import Tensor

from bench.harness import write_portable
from bench.machine import results_file
from headrace import LLM, SamplingParams
from headrace.core.errors import ConfigError
from headrace.engine.config import QUANTIZATIONS
from headrace.lab.environment import bandwidth_script, environment, measure_bandwidth
from headrace.tensor.kernels.launch import kernel_names
from headrace.tensor.kernels.together import Recording
from headrace.tensor.models.decoder import Decoder

PROMPT_TOKENS = 128
PRODUCTS = ("linear.", "quantized.")
"""Modules of the kernels that multiply by weights, and of those that round activations for them."""


@dataclass(slots=True)
class Watched:
    """Of every step, in seconds. ends: moments; parts: of steps taken apart, each kernel alone, by its name."""

    ends: list[float] = field(default_factory=list)
    lists: list[float] = field(default_factory=list)
    heads: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)


@contextmanager
def watched(*, is_apart: bool) -> Iterator[Watched]:
    """Recorded steps while the block runs. Where they are taken apart each kernel runs once more, and what comes of a step is nonsense."""
    seen, names = Watched(), kernel_names()
    run, logits = Recording.run, Decoder.logits

    def seconds_of(recording: Recording, kernel: int) -> float:
        began = time.perf_counter()
        run(recording, kernel)
        return time.perf_counter() - began

    def timed_run(recording: Recording) -> None:
        began = time.perf_counter()
        run(recording)
        seen.ends.append(time.perf_counter())
        seen.lists.append(seen.ends[-1] - began)
        if is_apart:
            seen.parts.append({names[kernel]: seconds_of(recording, kernel) for kernel in dict.fromkeys(recording.entries[::3])})

    def timed_logits(model: Decoder, hidden: Tensor) -> Tensor:
        began = time.perf_counter()
        made = logits(model, hidden)
        seen.heads.append(time.perf_counter() - began)
        return made

    with patch.object(Recording, "run", timed_run), patch.object(Decoder, "logits", timed_logits):
        yield seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Medians over steps; parts_s: seconds of each kernel, by its name; products_of_list and share are fractions."""

    period_s: float
    list_s: float
    head_s: float
    parts_s: dict[str, float]
    products_of_list: float
    share: float

    def __str__(self) -> str:
        period, whole, head = (f"{1e3 * seconds:.1f}" for seconds in (self.period_s, self.list_s, self.head_s))
        return f"{period} ms, list {whole}, products {self.products_of_list:.1%} of it, head {head}: {self.share:.1%} of the step"


def shares(whole: Watched, apart: Watched) -> Shares:
    """whole: steps as they are; apart: others, taken apart. Raises ConfigError where no step was recorded."""
    if len(whole.ends) < 2 or not apart.lists:
        raise ConfigError("streams", "steps of so many rows are not recorded on this machine: ask for fewer streams")
    products = [sum(seconds for name, seconds in step.items() if name.startswith(PRODUCTS)) for step in apart.parts]
    of_list = statistics.median(part / full for part, full in zip(products, apart.lists, strict=True))
    parts = {name: statistics.median(step.get(name, 0.0) for step in apart.parts) for name in dict.fromkeys(chain(*apart.parts))}
    period = statistics.median(after - before for before, after in pairwise(whole.ends))
    list_s, head_s = statistics.median(whole.lists), statistics.median(whole.heads)
    share = (of_list * list_s + head_s) / period
    return Shares(period_s=period, list_s=list_s, head_s=head_s, parts_s=parts, products_of_list=of_list, share=share)


def measure(llm: LLM, streams: int, steps: int) -> dict[str, object]:
    draw = random.Random(streams)

    def steps_of(*, is_apart: bool) -> Watched:
        prompts = [{"prompt_token_ids": [draw.randrange(10, 2000) for _ in range(PROMPT_TOKENS)]} for _ in range(streams)]
        params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
        with watched(is_apart=is_apart) as seen:
            llm.generate(prompts, [params] * streams, use_tqdm=False)
        return seen

    steps_of(is_apart=False)  # records
    first, apart, last = steps_of(is_apart=False), steps_of(is_apart=True), steps_of(is_apart=False)
    found = [shares(whole, apart) for whole in (first, last)]
    for each in found:
        print(f"{streams} streams: {each}", flush=True)
    return {
        "streams": streams,
        "read_bandwidth_bytes_per_s": measure_bandwidth(bandwidth_script()),
        "found": [asdict(each) for each in found],
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="none")
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args(arguments)
    llm = LLM(str(given.model), quantization=given.quantization, kv_cache_dtype="bfloat16", enable_prefix_caching=False)
    entries = [measure(llm, int(count), given.steps) for count in given.streams.split(",")]
    file = results_file(f"step-shares-{given.model.name}-{given.quantization}")
    write_portable(file, {"environment": environment(), "steps": given.steps, "entries": entries})


if __name__ == "__main__":
    main()
