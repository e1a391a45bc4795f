"""Measures the numerical error of every CPU kernel against float64, at 1, 8, 64 and 512 rows.

    python -m bench.kernel_error [--no-page] -> bench/results/kernel-error.json and the table in docs/kernels.md

An error is the largest difference divided by the largest value. Inputs are the same rounded numbers for all, so what is shown is the
kernel's arithmetic and its final rounding. Small integers come twice: against the float64 product of the same integers (what remains is
float32 rounding), and against the float64 product of what was there before it was rounded to them (what the precision costs).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.harness import RESULTS, ROOT, replace_block, write_portable
from headrace.lab.environment import environment
from headrace.tensor.backends import load_backend
from headrace.tensor.batch import StepAdapters
from headrace.tensor.kernels import Backend, LowRankUpdate
from headrace.tensor.kernels.reference import gather_context
from headrace.tensor.kernels.rounding import Precision, round_inputs, round_weight

Case = Callable[[Backend], tuple[Tensor, Tensor]]
"""Runs one operation: (result, float64 result)."""
Maker = Callable[[int, torch.dtype], Case]
"""(rows, dtype) -> case."""

ROWS = (1, 8, 64, 512)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
IMPLEMENTATIONS = ("numba", "reference")
MOST_PLAIN_ROWS = 64
"""The plain kernels take row by row: more of them say nothing new and take long."""
PAGE, BLOCK_NAME = ROOT / "docs" / "kernels.md", "errors"
HIDDEN, OUT, HEADS, KV_HEADS, HEAD_DIM, BLOCK, CONTEXT, EARLIER = 2048, 512, 16, 4, 64, 16, 700, 100


def _norm(rows: int, dtype: torch.dtype, *, with_residual: bool = False) -> Case:
    x, weight = torch.randn(rows, HIDDEN).to(dtype), torch.randn(HIDDEN).to(dtype)
    residual = torch.randn(rows, HIDDEN).to(dtype) if with_residual else None
    wide = x.double() if residual is None else (x + residual).double()  # the sum is rounded: it is kept in x's dtype
    want = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    return lambda backend: (
        backend.kernels.rms_norm(x.clone(), weight, 1e-6, residual=None if residual is None else residual.clone()),
        want,
    )


def _rotary(rows: int, dtype: torch.dtype) -> Case:
    query, key = torch.randn(rows, HEADS, HEAD_DIM).to(dtype), torch.randn(rows, KV_HEADS, HEAD_DIM).to(dtype)
    angles, positions = torch.rand(100, HEAD_DIM // 2) * 6, torch.randint(0, 100, (rows,))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    cos, sin = cos_sin[positions].double()[:, None].chunk(2, dim=-1)
    first, second = query.double().chunk(2, dim=-1)
    want = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def run(backend: Backend) -> tuple[Tensor, Tensor]:
        turned = query.clone()
        backend.kernels.rotary(turned, key.clone(), cos_sin, positions)
        return turned, want

    return run


def _gate(rows: int, dtype: torch.dtype, *, activation: str) -> Case:
    gate_up = (2 * torch.randn(rows, 2 * HIDDEN)).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    want = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
    return lambda backend: (backend.kernels.gated_activation(gate_up, activation), want)


def _linear(rows: int, dtype: torch.dtype, *, is_exact: bool = False) -> Case:
    weight, x = torch.randn(OUT, HIDDEN), torch.randn(rows, HIDDEN).to(dtype)
    weight = (weight.bfloat16() if is_exact else weight).to(dtype)
    want = x.double() @ weight.double().T
    return lambda backend: (backend.packing.pack_linear(weight, None)(x), want)


def _integers(rows: int, dtype: torch.dtype, *, precision: Precision, is_same: bool) -> Case:
    """is_same: against the same integers and scales; else against weight and inputs before they were rounded."""
    weight, x = torch.randn(OUT, HIDDEN), torch.randn(rows, HIDDEN).to(dtype)
    rounded = round_weight(weight, precision)
    values, scales = round_inputs(x)
    group = rounded.group or HIDDEN
    stands_for = rounded.values.double().reshape(OUT, -1, group) * rounded.scales.double().reshape(OUT, -1, 1)
    same = (values.double() * scales.double()) @ stands_for.flatten(1).T
    want = same if is_same else x.double() @ weight.double().T
    return lambda backend: (backend.packing.pack_rounded(rounded, None)(x), want)


def _adapters(rows: int, dtype: torch.dtype) -> Case:
    """Tokens of two adapters and of the base model, in turns."""
    x, y, slots = torch.randn(rows, HIDDEN).to(dtype), torch.randn(rows, OUT).to(dtype), (torch.arange(rows, dtype=torch.int32) + 1) % 3
    updates = [LowRankUpdate(down=torch.randn(rank, HIDDEN) / 32, up=torch.randn(OUT, rank), scale=0.5) for rank in (16, 13)]
    want = y.double()
    for place, each in enumerate(updates, 1):
        added = each.scale * (x.double() @ each.down.double().T @ each.up.double().T)
        want += added * (slots == place)[:, None]

    def run(backend: Backend) -> tuple[Tensor, Tensor]:
        assert backend.adapters is not None
        packed = [backend.adapters.pack([[each]]) for each in updates]
        return backend.adapters.apply(y.clone(), x, 0, StepAdapters(slots, (None, *packed))), want

    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention over a paged cache. Decode: `rows` sequences of one token each, of different lengths; prefill: one
    sequence of `rows` tokens after 100 earlier ones.

    cache_dtype  None: x's own. int8: one scale per vector
    is_same      against what the cache holds; else against the keys and values before they were stored
    """

    is_prefill: bool = False
    cache_dtype: torch.dtype | None = None
    is_same: bool = True

    def __call__(self, rows: int, dtype: torch.dtype) -> Case:
        num_blocks = -(-CONTEXT // BLOCK) + 1
        table = (torch.randperm(num_blocks - 1) + 1).to(torch.int32)
        key, value = (torch.randn(CONTEXT, KV_HEADS, HEAD_DIM).to(dtype) for _ in range(2))
        cache, kv_scales = self._store(key, value, table, num_blocks)
        query = torch.randn(rows, HEADS, HEAD_DIM).to(dtype)
        held = gather_context(cache, table, 0, CONTEXT, kv_scales) if self.is_same else (key, value)
        positions = EARLIER + torch.arange(rows) if self.is_prefill else (37 * torch.arange(rows) + CONTEXT - 1) % CONTEXT
        want = self._truth(query, held, positions)
        counts = [rows] if self.is_prefill else [1] * rows
        lens = (positions[-1:] if self.is_prefill else positions).int() + 1
        tables = table[None].expand(len(counts), -1).contiguous()
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return lambda backend: (
            backend.kernels.attention(
                query,
                cache,
                tables,
                starts,
                lens,
                scale=HEAD_DIM**-0.5,
                kv_scales=kv_scales,
            ),
            want,
        )

    def _store(self, key: Tensor, value: Tensor, table: Tensor, num_blocks: int) -> tuple[Tensor, Tensor | None]:
        """The cache as the plain kernels write it, one permutation of blocks for all sequences."""
        shape = (num_blocks, 2, BLOCK, KV_HEADS)
        cache = torch.zeros((*shape, HEAD_DIM), dtype=self.cache_dtype or key.dtype)
        kv_scales = torch.zeros(shape) if cache.dtype == torch.int8 else None
        positions = torch.arange(CONTEXT)
        slots = table.long()[positions // BLOCK] * BLOCK + positions % BLOCK
        load_backend("reference").kernels.scatter_kv(key, value, cache, slots, kv_scales=kv_scales)
        return cache, kv_scales

    def _truth(self, query: Tensor, held: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
        """Each query sees the positions up to its own."""
        key, value = (part.double().repeat_interleave(HEADS // KV_HEADS, 1) for part in held)
        scores = torch.einsum("nhd,shd->hns", query.double(), key) * HEAD_DIM**-0.5
        seen = torch.arange(CONTEXT) <= positions[:, None]
        return torch.einsum("hns,shd->nhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


FLOATS: Mapping[str, Maker] = {
    "rms_norm": _norm,
    "rms_norm with residual": partial(_norm, with_residual=True),
    "rotary": _rotary,
    "gated_activation silu": partial(_gate, activation="silu"),
    "gated_activation gelu_tanh": partial(_gate, activation="gelu_tanh"),
    "linear": _linear,
    "linear, bfloat16-exact weight": partial(_linear, is_exact=True),
    "adapters": _adapters,
    "linear int8, same integers": partial(_integers, precision=Precision.INT8, is_same=True),
    "linear int4, same integers": partial(_integers, precision=Precision.INT4, is_same=True),
    "attention, decode": Attention(),
    "attention, prefill": Attention(is_prefill=True),
    "attention, decode, int8 cache, same integers": Attention(cache_dtype=torch.int8),
    "attention, prefill, int8 cache, same integers": Attention(is_prefill=True, cache_dtype=torch.int8),
}
"""What remains is the rounding of float32 arithmetic (and of a bfloat16 result)."""
COSTS: Mapping[str, Maker] = {
    "linear int8, before rounding": partial(_integers, precision=Precision.INT8, is_same=False),
    "linear int4, before rounding": partial(_integers, precision=Precision.INT4, is_same=False),
    "attention, decode, int8 cache, before rounding": Attention(cache_dtype=torch.int8, is_same=False),
    "attention, prefill, int8 cache, before rounding": Attention(is_prefill=True, cache_dtype=torch.int8, is_same=False),
}
"""What the precision itself costs, on normally distributed values."""
CASES: Mapping[str, Maker] = {**FLOATS, **COSTS}

Errors = dict[str, dict[int, float]]
"""Implementation -> rows -> error."""


def relative_error(result: Tensor, want: Tensor) -> float:
    return float((result.double() - want).abs().max() / want.abs().max())


def measure() -> dict[str, dict[str, Errors]]:
    """case -> dtype -> errors. The same inputs for both implementations."""
    backends = {name: load_backend(name) for name in IMPLEMENTATIONS}
    return {name: {label: _errors(make, dtype, backends) for label, dtype in DTYPES.items()} for name, make in CASES.items()}


def _errors(make: Maker, dtype: torch.dtype, backends: Mapping[str, Backend]) -> Errors:
    found: Errors = {name: {} for name in backends}
    for rows in ROWS:
        torch.manual_seed(rows)
        case = make(rows, dtype)
        for name, implementation in backends.items():
            if name != "reference" or rows <= MOST_PLAIN_ROWS:
                found[name][rows] = relative_error(*case(implementation))
    return found


def markdown(table: Mapping[str, Mapping[str, Errors]]) -> str:
    """One line per case: the worst over the row counts, of each implementation in each dtype."""
    columns = [(name, label) for name in IMPLEMENTATIONS for label in DTYPES]
    lines = ["| kernel | " + " | ".join(f"{name}, {label}" for name, label in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, by_dtype in table.items():
        worst = " | ".join(f"{max(by_dtype[label][implementation].values()):.1e}" for implementation, label in columns)
        lines.append(f"| {name} | {worst} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-page", action="store_true", help="leave docs/kernels.md as it is")
    given = parser.parse_args(arguments)
    table = measure()
    print(markdown(table))
    write_portable(RESULTS / "kernel-error.json", {"environment": environment(), "max_relative_error": table})
    if not given.no_page:
        replace_block(PAGE, BLOCK_NAME, markdown(table))


if __name__ == "__main__":
    main()
