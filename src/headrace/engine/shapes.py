"""The shape of a model that is here, as the planner takes it, and the sizes into which it does not divide. Reads no weight.

Imports torch: `engine.layout` asks in a process of its own.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.parallelism import Parallelism
from headrace.core.strict_decode import decode, plain
from headrace.engine.layout import ShapeAsked, ShapeHere
from headrace.policy.placement.model import ModelShape, WeightSizes
from headrace.tensor.checkpoint.config import read_config
from headrace.tensor.kernels.rounding import Precision
from headrace.tensor.layers.mlp import MlpSpec
from headrace.tensor.models import describe, read_spec
from headrace.tensor.models.division import check_division
from headrace.tensor.models.spec import DecoderSpec

STORED = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def shape_of(spec: DecoderSpec, name: str) -> ModelShape:
    attention = spec.layers[0].attention
    dense = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MlpSpec)]
    mixed = [layer.mlp for layer in spec.layers if not isinstance(layer.mlp, MlpSpec)]
    windows = [layer.attention.window for layer in spec.layers if layer.attention.window is not None]
    return ModelShape(
        name=name,
        num_layers=len(spec.layers),
        hidden_size=spec.hidden_size,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        vocab_size=spec.vocab_size,
        max_positions=spec.max_positions,
        mlp_size=dense[0].size if dense else 0,
        is_tied=spec.is_tied,
        num_experts=mixed[0].num_experts if mixed else 0,
        experts_per_token=mixed[0].top_k if mixed else 0,
        expert_size=mixed[0].size if mixed else 0,
        num_dense_layers=len(dense) if mixed else 0,
        window=max(windows, default=0),
        num_window_layers=len(windows),
    )


def read_here(asked: ShapeAsked) -> ShapeHere:
    """Raises ConfigError and CheckpointError, as a start of one rank does."""
    folder = Path(asked.folder)
    alone = describe(folder, quantization=asked.quantization)
    spec = read_spec(read_config(folder))[1]
    shape = shape_of(spec, folder.resolve().name)
    size = alone.resident_bytes / shape.num_params
    dtype = STORED[alone.dtype_name] if alone.held is Precision.NONE else alone.held.value
    refused = {str(tp): reason for tp in range(1, asked.most + 1) if (reason := _why_not(asked, spec, Parallelism(tp, ep=asked.ep)))}
    return ShapeHere(replace(shape, stored=WeightSizes(size, size)), dtype, refused)


def _why_not(asked: ShapeAsked, spec: DecoderSpec, parallelism: Parallelism) -> str:
    """Empty: rank 0 would find its part of every weight. No later rank has other sizes that count."""
    try:
        check_division(spec, parallelism)
        describe(Path(asked.folder), quantization=asked.quantization, place=parallelism.place(0))
    except ConfigError as error:
        return error.reason.removeprefix(f"{parallelism.tp}: ")
    return ""


def print_here(asked: str) -> None:
    """asked: a `ShapeAsked`, as JSON. Prints a `ShapeHere` as JSON, or in words why there is none."""
    try:
        print(json.dumps(plain(read_here(decode(ShapeAsked, json.loads(asked))))))
    except (CheckpointError, ConfigError) as error:
        print(error)
