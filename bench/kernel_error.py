"""Rounding error of every kernel against the same formula in float64, for both implementations.

    python bench/kernel_error.py [--json FILE]

Prints the table of docs/kernels.md: per kernel and element type the largest difference from float64, divided by the largest value.
Inputs are the same rounded numbers for all, so what is shown is arithmetic and the final rounding, not the inputs' own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.tensor.kernels import Kernels, load_kernels
from headrace.tensor.kernels.reference import causal_mask, gather_context

Case = Callable[[Kernels], tuple[Tensor, Tensor]]
"""Runs one operation: (result, float64 result)."""

TOKENS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 64, 2048, 16, 4, 64, 16


def _norm(dtype: torch.dtype) -> Case:
    x, weight = torch.randn(TOKENS, HIDDEN).to(dtype), torch.randn(HIDDEN).to(dtype)
    wide = x.double()
    want = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    return lambda kernels: (kernels.rms_norm(x, weight, 1e-6), want)


def _rotary(dtype: torch.dtype) -> Case:
    query, key = torch.randn(TOKENS, HEADS, HEAD_DIM).to(dtype), torch.randn(TOKENS, KV_HEADS, HEAD_DIM).to(dtype)
    angles, positions = torch.rand(100, HEAD_DIM // 2) * 6, torch.randint(0, 100, (TOKENS,))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    cos, sin = cos_sin[positions].double()[:, None].chunk(2, dim=-1)
    first, second = query.double().chunk(2, dim=-1)
    want = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def run(kernels: Kernels) -> tuple[Tensor, Tensor]:
        turned = query.clone()
        kernels.rotary(turned, key.clone(), cos_sin, positions)
        return turned, want

    return run


def _gate(activation: str) -> Callable[[torch.dtype], Case]:
    def make(dtype: torch.dtype) -> Case:
        gate_up = (2 * torch.randn(TOKENS, 2 * HIDDEN)).to(dtype)
        gate, up = gate_up.double().chunk(2, dim=-1)
        want = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
        return lambda kernels: (kernels.gated_activation(gate_up, activation), want)

    return make


def _linear(exact: bool, rows: int) -> Callable[[torch.dtype], Case]:
    def make(dtype: torch.dtype) -> Case:
        weight, x = torch.randn(512, HIDDEN), torch.randn(rows, HIDDEN).to(dtype)
        weight = (weight.bfloat16() if exact else weight).to(dtype)
        want = x.double() @ weight.double().T
        return lambda kernels: (kernels.pack_linear(weight, None)(x), want)

    return make


def _attention(count: int, context: int, softcap: float | None = None) -> Callable[[torch.dtype], Case]:
    def make(dtype: torch.dtype) -> Case:
        num_blocks = -(-context // BLOCK) + 1
        cache = torch.randn(num_blocks, 2, BLOCK, KV_HEADS, HEAD_DIM).to(dtype)
        table = (torch.randperm(num_blocks - 1) + 1).to(torch.int32)[None]
        query, scale = torch.randn(count, HEADS, HEAD_DIM).to(dtype), HEAD_DIM**-0.5
        starts, lens = torch.tensor([0, count], dtype=torch.int32), torch.tensor([context], dtype=torch.int32)
        key, value = (part.double().repeat_interleave(HEADS // KV_HEADS, 1) for part in gather_context(cache, table[0], 0, context))
        scores = torch.einsum("nhd,shd->hns", query.double(), key) * scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        seen = causal_mask(context - count, 0, context, None, query.device)
        want = torch.einsum("hns,shd->nhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)
        return lambda kernels: (
            kernels.attention(query, cache, table, starts, lens, max_count=count, scale=scale, softcap=softcap),
            want,
        )

    return make


CASES: Mapping[str, Callable[[torch.dtype], Case]] = {
    "rms_norm": _norm,
    "rotary": _rotary,
    "gated_activation silu": _gate("silu"),
    "gated_activation gelu_tanh": _gate("gelu_tanh"),
    "linear, 1 row": _linear(False, 1),
    "linear, 33 rows": _linear(False, 33),
    "linear, 33 rows, bfloat16-exact weight": _linear(True, 33),
    "attention, decode at 3000": _attention(1, 3000),
    "attention, prefill of 200": _attention(200, 200),
    "attention, prefill of 200, softcap 30": _attention(200, 200, 30.0),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def relative_error(result: Tensor, want: Tensor) -> float:
    return float((result.double() - want).abs().max() / want.abs().max())


def measure() -> dict[str, dict[str, float]]:
    """case -> "implementation dtype" -> error."""
    table: dict[str, dict[str, float]] = {}
    for name, make in CASES.items():
        table[name] = {}
        for dtype_name, dtype in DTYPES.items():
            torch.manual_seed(0)
            case = make(dtype)
            for kernels in (load_kernels("reference"), load_kernels("numba")):
                table[name][f"{kernels.name} {dtype_name}"] = relative_error(*case(kernels))
    return table


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    given = parser.parse_args(arguments)
    table = measure()
    columns = list(next(iter(table.values())))
    print("| kernel | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name, errors in table.items():
        print(f"| {name} | " + " | ".join(f"{errors[column]:.1e}" for column in columns) + " |")
    if given.json is not None:
        given.json.write_text(json.dumps({"torch": torch.__version__, "max_relative_error": table}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
