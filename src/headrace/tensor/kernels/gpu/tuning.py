"""Block sizes and numbers of warps of the GPU kernels, by weight format and shape, as measured on one device (`h100.json`).

Values for cases that the table does not have (float32, head dims above 128, rows of a few tokens) are derived by the limits of shared
memory and registers; compiling all kernels ahead of time checks them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

import triton

MAX_FLOAT32_ROWS = 64
"""Most rows of a float32 tile: a larger tile does not fit into shared memory."""


@dataclass(frozen=True, slots=True)
class ProductVariant:
    """Block sizes for products of up to `rows` rows.

    programs        number of programs to aim at: the outputs are divided first, then the inputs
    max_outputs     the variant is used for products of fewer outputs than this
    scales_weights  INT4: whether each weight is scaled, and not the sum of each group
    """

    rows: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    programs: int
    min_outputs: int = 0
    max_outputs: int = sys.maxsize
    scales_weights: bool = False


@dataclass(frozen=True, slots=True)
class DecodeVariant:
    block_n: int
    warps: int
    stages: int
    programs: int


@dataclass(frozen=True, slots=True)
class PrefillVariant:
    """block_m: query tokens times query heads of a program."""

    block_m: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """products: weight format -> variants, in the order in which they are tried. narrow_decode: with a KV cache of one byte per value."""

    device: str
    products: dict[str, tuple[ProductVariant, ...]]
    experts: tuple[ProductVariant, ...]
    narrow_decode: DecodeVariant
    wide_decode: DecodeVariant
    prefill_tile: PrefillVariant

    def product(self, name: str, rows: int, outputs: int, input_bytes: int) -> ProductVariant | None:
        """None where torch's product is used instead."""
        if input_bytes == 4 and (name == "plain" or rows > MAX_FLOAT32_ROWS):
            return None
        return _first(self.products[name], rows, outputs)

    def grouped(self, name: str, rows: int, input_bytes: int) -> ProductVariant:
        """More rows than the last variant has are computed in several launches."""
        variants = self.experts if name == "plain" else self.products[name]
        if input_bytes == 4:
            variants = tuple(each for each in variants if each.rows <= MAX_FLOAT32_ROWS)
        return _first(variants, rows, 0) or variants[-1]

    def decode(self, value_bytes: int, query_bytes: int, dim: int) -> DecodeVariant:
        measured = self.narrow_decode if value_bytes == 1 else self.wide_decode
        if query_bytes == 4:
            return replace(measured, block_n=32, warps=8, stages=1)
        return measured if dim <= 128 else replace(measured, block_n=32, stages=3)

    def prefill(self, query_bytes: int, dim: int, group: int, *, is_short: bool) -> PrefillVariant:
        """group: query heads per KV head, all in one tile."""
        tile = self.prefill_tile
        if query_bytes == 4:
            tile = PrefillVariant(32, 32, 8, 1)
        elif dim > 128:
            tile = replace(tile, block_n=32, stages=2)
        block_m = max(16, tile.block_m // 4) if is_short else tile.block_m
        return replace(tile, block_m=max(block_m, triton.next_power_of_2(group)))


def _first(variants: tuple[ProductVariant, ...], rows: int, outputs: int) -> ProductVariant | None:
    return next((each for each in variants if rows <= each.rows and each.min_outputs <= outputs < each.max_outputs), None)


@cache
def read_tuning() -> Tuning:
    table = json.loads(files(__package__).joinpath("h100.json").read_text(encoding="utf-8"))
    return Tuning(
        device=table["device"],
        products={name: tuple(ProductVariant(**each) for each in rows) for name, rows in table["products"].items()},
        experts=tuple(ProductVariant(**each) for each in table["experts"]),
        narrow_decode=DecodeVariant(**table["decode_attention"]["narrow"]),
        wide_decode=DecodeVariant(**table["decode_attention"]["wide"]),
        prefill_tile=PrefillVariant(**table["prefill_attention"]),
    )
