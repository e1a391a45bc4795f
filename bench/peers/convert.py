"""Converts weights for the peers that do not read safetensors, by the peers' own tools. The converted files lie beside the models.

    python -m bench.peers.convert --models FOLDER --envs FOLDER --shape llama-1.1b

llama.cpp: MODEL.gguf/{bf16,f16,q8_0,q4_0}.gguf, of the first two what this CPU is faster with. OpenVINO: MODEL.openvino/{bf16,int8,int4}.
vLLM reads the plain model; its integer weights are in MODEL.compressed/{int8,int4}. What is there is left alone.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

from bench.peers.cells import SHAPES
from bench.peers.compressed import write_compressed
from bench.peers.llama_cpp import KINDS, gguf_file, gguf_kinds
from headrace.tensor.kernels.rounding import Precision

SCRIPT = Path(__file__).parent / "workers" / "to_gguf.py"
OPENVINO_FORMATS = {"bf16": "fp16", "int8": "int8", "int4": "int4"}
"""16 bits are 16 bits: OpenVINO computes in the precision its CPU plugin chooses."""


def run(*command: object) -> None:
    print("$", *command, flush=True)
    subprocess.run(list(map(str, command)), check=True)


def to_gguf(model: Path, envs: Path) -> None:
    plain = gguf_file(model, KINDS["bf16"])
    plain.parent.mkdir(exist_ok=True)
    if not plain.exists():
        run(envs / "vllm" / "bin" / "python", SCRIPT, model, plain)
    for kind in gguf_kinds().values():
        target = gguf_file(model, kind)
        if not target.exists():
            run(envs / "llama.cpp" / "llama-quantize", plain, target, kind)


def to_openvino(model: Path, envs: Path) -> None:
    python = envs / "openvino" / "bin" / "python"
    for precision, name in OPENVINO_FORMATS.items():
        target = model.with_name(f"{model.name}.openvino") / precision
        if not (target / "openvino_model.bin").exists():
            command = [python, "-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", model]
            run(*command, "--task", "text-generation-with-past", "--weight-format", name, target)


def to_compressed(model: Path) -> None:
    for precision in (Precision.INT8, Precision.INT4):
        target = model.with_name(f"{model.name}.compressed") / precision.value
        if not (target / "config.json").exists():
            print("$ write", target, flush=True)
            write_compressed(model, target, precision)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--envs", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="again for more; default: all")
    given = parser.parse_args(arguments)
    for shape in given.shape or SHAPES:
        model = given.models.expanduser() / shape
        to_gguf(model, given.envs.expanduser())
        to_openvino(model, given.envs.expanduser())
        to_compressed(model)


if __name__ == "__main__":
    main()
