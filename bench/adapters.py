"""Measures what adapters cost a decode step: steps of no adapter, of 4 and of 20, in turns, in one process.

    python -m bench.adapters [--rounds 100] [--layers 22] -> bench/results/MACHINE/adapters-llama-1.1b-int8.json

A model of TinyLlama's shape with random weights in int8 takes 32 sequences a step, each with 128 tokens of context. All of them have an
adapter of rank 16 in bfloat16, on q_proj and v_proj or on every linear, and sequences of one adapter stand apart from each other. Each
round runs every variant once, in another order. `ratio` is the median over the rounds of a step's time to that of the same round's step
without adapters, `ratio_low` and `ratio_high` the 95 % interval of this median; `bytes_ratio` is what it would be if only the bytes that a
step reads counted: (weights + the adapters of the step) / weights.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: see headrace.tensor.host.openmp

import torch

from bench.harness import write_portable
from bench.machine import results_file
from bench.tinyllama import CONFIG
from headrace.lab.environment import bandwidth_facts, bandwidth_script, environment, measure_bandwidth
from headrace.tensor.backends import load_backend
from headrace.tensor.batch import ForwardBatch, GroupBatch, KvCache, PackedAdapter, StepAdapters, allocate_kv
from headrace.tensor.device import CPU
from headrace.tensor.kernels import LowRankUpdate
from headrace.tensor.kernels.cpu.jit.launch import thread_limit
from headrace.tensor.layers.adapted import AdaptedPart, ModelAdapters
from headrace.tensor.models import LoadedModel, load_model

ROWS, CONTEXT, BLOCK_SIZE, RANK = 32, 128, 16, 16
WARM_UP_ROUNDS = 3
TARGETS: Mapping[str, tuple[str, ...]] = {"q_proj and v_proj": ("q_proj", "v_proj"), "every linear": ("",)}
"""How the names of the weights end that adapters change."""
COUNTS = (4, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """num_bytes: of the adapters, packed."""

    targets: str
    num_adapters: int
    num_bytes: int
    adapters: StepAdapters | None


def random_adapter(adapters: ModelAdapters, endings: tuple[str, ...], generator: torch.Generator) -> PackedAdapter:
    def drawn(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) / math.sqrt(columns)).bfloat16()

    def update(part: AdaptedPart, in_features: int) -> LowRankUpdate:
        return LowRankUpdate(down=drawn(RANK, in_features), up=drawn(part.rows, RANK), scale=2.0, first_row=part.first_row)

    linears = [
        [update(part, each.in_features) for part in each.parts_of_output if part.name.endswith(endings)] for each in adapters.linears
    ]
    return adapters.kernels.pack(linears)


def make_variants(adapters: ModelAdapters) -> list[Variant]:
    generator, variants = torch.Generator().manual_seed(0), [Variant(targets="none", num_adapters=0, num_bytes=0, adapters=None)]
    for targets, endings in TARGETS.items():
        packed = [random_adapter(adapters, endings, generator) for _ in range(max(COUNTS))]
        for count in COUNTS:
            slots = torch.arange(ROWS, dtype=torch.int32) % count + 1
            step, num_bytes = StepAdapters(slots, (None, *packed[:count])), sum(each.num_bytes for each in packed[:count])
            variants.append(Variant(targets=targets, num_adapters=count, num_bytes=num_bytes, adapters=step))
    return variants


def make_step(loaded: LoadedModel) -> tuple[ForwardBatch, KvCache]:
    width, model = CONTEXT // BLOCK_SIZE, loaded.model
    kv = allocate_kv(model.kv_shapes, model.group_of, (1 + ROWS * width,), BLOCK_SIZE, torch.bfloat16, CPU)
    table = 1 + torch.arange(ROWS * width, dtype=torch.int32).reshape(ROWS, width)
    slot_mapping = table[:, -1].long() * BLOCK_SIZE + BLOCK_SIZE - 1
    starts, lens = torch.arange(ROWS + 1, dtype=torch.int32), torch.full((ROWS,), CONTEXT, dtype=torch.int32)
    return ForwardBatch(torch.full((ROWS,), CONTEXT - 1), starts, lens, 1, (GroupBatch(table, slot_mapping),)), kv


@torch.inference_mode()
def measure(loaded: LoadedModel, variants: list[Variant], rounds: int) -> list[list[float]]:
    """Seconds of every step, by variant. The first rounds compile, record and map memory, and are not kept."""
    batch, kv = make_step(loaded)
    ids, order = torch.randint(3, loaded.vocab_size, (ROWS,)), list(range(len(variants)))
    seconds: list[list[float]] = [[] for _ in variants]
    draw = random.Random(0)
    for _ in range(WARM_UP_ROUNDS + rounds):
        draw.shuffle(order)
        for number in order:
            batch.adapters = variants[number].adapters
            began = time.perf_counter()
            loaded.model.logits(loaded.model.forward(ids, batch, kv))
            seconds[number].append(time.perf_counter() - began)
    return [each[WARM_UP_ROUNDS:] for each in seconds]


def entries_of(variants: list[Variant], seconds: list[list[float]], weight_bytes: int) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = []
    for variant, steps in zip(variants, seconds, strict=True):
        typical, paired = statistics.median(steps), sorted(step / plain for step, plain in zip(steps, seconds[0], strict=True))
        low = max(0, int(len(paired) / 2 - 0.98 * math.sqrt(len(paired))))  # by the signs of the differences from the median
        shown = {"targets": variant.targets, "num_adapters": variant.num_adapters, "adapter_bytes": variant.num_bytes}
        interval = {"ratio_low": paired[low], "ratio_high": paired[-1 - low]}
        ratios = {"ratio": statistics.median(paired), **interval, "bytes_ratio": 1 + variant.num_bytes / weight_bytes}
        entries.append({**shown, "median_s": typical, **ratios, "steps_s": steps})
        print(f"{variant.num_adapters} adapters, {variant.targets}: {typical * 1e3:.2f} ms, {ratios}", flush=True)
    return entries


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    given = parser.parse_args(arguments)
    torch.set_num_threads(thread_limit())
    bandwidth = measure_bandwidth(bandwidth_script())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": given.layers}), encoding="utf-8")
        loaded = load_model(
            Path(folder), backend=load_backend("numba"), dtype=torch.float32, device=CPU, load_format="dummy", seed=0, max_model_len=None,
            quantization="int8", enable_lora=True,
        )  # fmt: skip
    adapters = loaded.model.adapters
    assert adapters is not None
    variants = make_variants(adapters)
    entries = entries_of(variants, measure(loaded, variants, given.rounds), loaded.weight_bytes)
    shape = {"rows": ROWS, "context": CONTEXT, "rank": RANK, "layers": given.layers, "weight_bytes": loaded.weight_bytes}
    file = results_file("adapters-llama-1.1b-int8")
    write_portable(file, {"environment": environment(), **bandwidth_facts(bandwidth), **shape, "entries": entries})


if __name__ == "__main__":
    main()
