"""Block sizes and warps of the kernels, by format and shape class, as they were measured on one device.

The table is `h100.json`; what it does not cover (float32, head dims above 128, rows of a few tokens) follows from it by the limits of
shared memory and registers, which compilation ahead of time checks. Other devices use the same table, and the log of a start says so.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

import triton

MAX_FLOAT32_ROWS = 64
"""Tiles of more rows do not fit in float32."""


@dataclass(frozen=True, slots=True)
class ProductVariant:
    """How a product of up to `rows` rows is computed.

    block_n         outputs of a program, at most
    block_k         inputs of an iteration, at most
    programs        that a product is split into, about: outputs are shared out first, then inputs
    min_outputs     of a product that is computed so; max_outputs: where it has fewer
    scales_weights  whether weights of INT4, and not sums of each group, are scaled
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
    """block_n: positions of an iteration; programs: that a step's attention is split into, about."""

    block_n: int
    warps: int
    stages: int
    programs: int


@dataclass(frozen=True, slots=True)
class PrefillVariant:
    """block_m: tokens times query heads of a program; block_n: positions of an iteration."""

    block_m: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """A device's table.

    device      on which it was measured
    products    per format, in the order in which they are tried
    experts     the same for a mixture's plain experts
    narrow      decode attention over a cache of one byte per value
    """

    device: str
    products: dict[str, tuple[ProductVariant, ...]]
    experts: tuple[ProductVariant, ...]
    narrow_decode: DecodeVariant
    wide_decode: DecodeVariant
    prefill_tile: PrefillVariant

    def product(self, name: str, rows: int, outputs: int, input_bytes: int) -> ProductVariant | None:
        """The variant for a product of this format, or None where a library's is used instead. input_bytes: of an input's element."""
        if input_bytes == 4 and (name == "plain" or rows > MAX_FLOAT32_ROWS):
            return None
        return _first(self.products[name], rows, outputs)

    def grouped(self, name: str, rows: int, input_bytes: int) -> ProductVariant:
        """The variant for experts of this format. More rows than the last one has are done in several goes."""
        variants = self.experts if name == "plain" else self.products[name]
        if input_bytes == 4:
            variants = tuple(each for each in variants if each.rows <= MAX_FLOAT32_ROWS)
        return _first(variants, rows, 0) or variants[-1]

    def decode(self, value_bytes: int, query_bytes: int, dim: int) -> DecodeVariant:
        """value_bytes: of a cache's element. Tiles of wide heads, and of float32, are smaller."""
        measured = self.narrow_decode if value_bytes == 1 else self.wide_decode
        if query_bytes == 4:
            return replace(measured, block_n=32, warps=8, stages=1)
        return measured if dim <= 128 else replace(measured, block_n=32, stages=3)

    def prefill(self, query_bytes: int, dim: int, group: int, *, is_short: bool) -> PrefillVariant:
        """group: query heads per key/value head, which fit one tile. is_short: rows of few tokens."""
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
    """The one table that there is."""
    table = json.loads(files(__package__).joinpath("h100.json").read_text(encoding="utf-8"))
    return Tuning(
        device=table["device"],
        products={name: tuple(ProductVariant(**each) for each in rows) for name, rows in table["products"].items()},
        experts=tuple(ProductVariant(**each) for each in table["experts"]),
        narrow_decode=DecodeVariant(**table["decode_attention"]["narrow"]),
        wide_decode=DecodeVariant(**table["decode_attention"]["wide"]),
        prefill_tile=PrefillVariant(**table["prefill_attention"]),
    )
