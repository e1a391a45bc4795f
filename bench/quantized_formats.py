"""Measures quantized checkpoints beside weights rounded at load, and beside llama.cpp on the same GGUF file.

    python -m bench.peers.models --to MODELS --shape llama-1.1b
    python -m bench.peers.convert --models MODELS --envs ENVS --shape llama-1.1b
    python -m bench.quantized_formats --models MODELS --envs ENVS

Rows are those of `bench.peers`. Each question is asked of every engine before the next one, in another order every round; all engines stay
loaded but llama.cpp's, which has a process per question. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.harness import write_portable
from bench.machine import results_file
from bench.peers.compressed import pack_nibbles
from bench.peers.engines import launch_of, running
from bench.peers.llama_cpp import LlamaCpp, gguf_file
from bench.peers.rows import Figure, measure
from headrace.lab.environment import environment

SHAPE = "llama-1.1b"
GROUP = 128
ROWS = ("prefill-512", "decode-1", "decode-8")
ROUNDS = 5


def write_gptq(model: Path, target: Path) -> None:
    """The model as GPTQ of version 2, with zero points: rounded to nearest, which takes as long to read and multiply as calibrated weights.

    Tables and the head stay as they are.
    """
    target.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if name.endswith("_proj.weight"):
                tensors.update({f"{name.removesuffix('weight')}{part}": stored for part, stored in _rounded(tensor).items()})
            else:
                tensors[name] = tensor
    for other in (*model.glob("tokenizer*"), *model.glob("*.jinja"), *model.glob("generation_config.json")):
        shutil.copy(other, target)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    section = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False, "checkpoint_format": "gptq_v2"}
    config = json.loads((model / "config.json").read_bytes())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": section}, indent=1))


def _rounded(weight: Tensor) -> dict[str, Tensor]:
    grouped = weight.float().reshape(len(weight), -1, GROUP)
    low, high = grouped.amin(2, keepdim=True), grouped.amax(2, keepdim=True)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(0, 15)
    values = ((grouped / scales).round() + zeros).clamp(0, 15).flatten(1)
    return {
        "qweight": pack_nibbles((values - 8).to(torch.int8)).t().contiguous(),
        "qzeros": pack_nibbles((zeros[:, :, 0].t() - 8).to(torch.int8)),
        "scales": scales[:, :, 0].t().half().contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--envs", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    model = given.models.expanduser() / SHAPE
    gptq, gguf = model.with_name(f"{model.name}.gptq"), gguf_file(model, "Q4_0")
    if not (gptq / "config.json").exists():
        write_gptq(model, gptq)
    figures: dict[str, dict[str, list[Figure]]] = defaultdict(lambda: defaultdict(list))
    with ExitStack() as stack, tempfile.TemporaryDirectory() as logs:

        def headrace(weights: Path, precision: str) -> Callable[[str, int], Figure]:
            launch = launch_of("headrace", weights, precision, given.envs, given.threads)
            worker = stack.enter_context(running(launch, Path(logs) / f"{weights.name}.log"))
            return lambda row, seed: measure(row, worker.ask, seed=seed)

        peer = LlamaCpp(given.envs.expanduser() / "llama.cpp", gguf, given.threads)
        engines: dict[str, Callable[[str, int], Figure]] = {
            "int4 at load": headrace(model, "int4"),
            "GPTQ": headrace(gptq, "bf16"),
            "GGUF Q4_0": headrace(gguf, "bf16"),
            "llama.cpp Q4_0": lambda row, _: peer.figure(row),
        }
        for number in range(ROUNDS + 1):  # the first one warms up
            names = list(engines) if number % 2 else list(engines)[::-1]
            for row in ROWS:
                for name in names:
                    found = engines[name](row, number)
                    if number:
                        figures[row][name].append(replace(found, load={}))
                        print(number, row, name, round(found.value, 1), flush=True)
    medians = {
        row: {name: statistics.median(figure.value for figure in found) for name, found in of.items()} for row, of in figures.items()
    }
    record = {
        "environment": asdict(environment()),
        "shape": SHAPE,
        "gptq": f"4 bits, groups of {GROUP}, zero points, head in bfloat16",
        "medians_tokens_per_s": medians,
        "samples": {row: {name: [figure.value for figure in found] for name, found in of.items()} for row, of in figures.items()},
    }
    write_portable(results_file("quantized-formats"), record)
    print(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
