"""Makes weights of random codes and scales, stored as float8, ModelOpt and compressed-tensors files have them.

What a weight stands for is computed one value at a time, from the bits of its codes, in double precision: products are exact there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Parts = dict[str, Tensor]
Blocks = tuple[int, int]
"""Outputs and inputs of one scale; 0: all."""


def e4m3(byte: int) -> float:
    sign, exponent, fraction = -1.0 if byte >> 7 else 1.0, byte >> 3 & 15, byte & 7
    assert byte & 127 != 127, "NaN"
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


def e2m1(code: int) -> float:
    sign, exponent, fraction = -1.0 if code >> 3 else 1.0, code >> 1 & 3, code & 1
    return sign * (fraction / 2 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1))


def e8m0(byte: int) -> float:
    assert byte != 255, "NaN"
    return 2.0 ** (byte - 127)


def pack_rows(rows: Sequence[Sequence[int]], bits: int) -> Tensor:
    """Each row as one stream of bits, its first integer in the lowest, in as many int32 words as it takes."""
    packed = []
    for row in rows:
        stream = sum(value << place * bits for place, value in enumerate(row))
        words = [stream >> 32 * i & 0xFFFFFFFF for i in range(-(-len(row) * bits // 32))]
        packed.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(packed, dtype=torch.int32)


def pack_padded(rows: Sequence[Sequence[int]], bits: int) -> Tensor:
    """Each row in int32 words that hold whole integers alone, the first in the lowest bits."""
    per_word = 32 // bits
    return torch.cat(
        [pack_rows([row[first : first + per_word] for row in rows], bits) for first in range(0, len(rows[0]), per_word)], dim=1
    )


def float8(bytes_: Tensor) -> Tensor:
    return bytes_.view(torch.float8_e4m3fn)


def grid(shape: tuple[int, int], blocks: Blocks) -> tuple[int, int]:
    rows, columns = blocks[0] or shape[0], blocks[1] or shape[1]
    return -(-shape[0] // rows), -(-shape[1] // columns)


def multiply(
    codes: list[list[int]],
    scales: list[list[float]],
    blocks: Blocks,
    value: Callable[[int], float],
    *,
    zeros: list[list[int]] | None = None,
    order: list[int] | None = None,
    last: Callable[[float], float] | None = None,
) -> Tensor:
    """last((value(code) - zero) * scale) of each weight, float32 [N, K]. order: each input's column of scales, in place of blocks."""
    outputs, inputs = len(codes), len(codes[0])
    span, width = blocks[0] or outputs, blocks[1] or inputs
    columns = order or [k // width for k in range(inputs)]
    meaning = {code: value(code) for code in {code for row in codes for code in row}}
    dense = []
    for n, row in enumerate(codes):
        factors = scales[n // span]
        less = zeros[n // span] if zeros else [0] * len(factors)
        products = [(meaning[code] - less[g]) * factors[g] for code, g in zip(row, columns, strict=True)]
        dense.append(products if last is None else [last(product) for product in products])
    return torch.tensor(dense, dtype=torch.float64).float()


def random_e4m3(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Bytes, NaN left out."""
    drawn = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return torch.where(drawn & 127 == 127, 0x38, drawn)


def random_scales(shape: tuple[int, int], size: float, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    return (size * (0.5 + torch.rand(shape, generator=generator))).to(dtype)


def pairs_of(codes: Tensor) -> Tensor:
    """Codes of four bits, two to a byte, the first in the low half."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


@dataclass
class Fp8:
    """scale: name of the scales. shape: "grid" [rows of blocks, columns of blocks], "row" [N], "one" [1], or "none" []"""

    blocks: Blocks = (0, 0)
    scale: str = "weight_scale"
    shape: str = "grid"
    dtype: torch.dtype = torch.float32
    method: str = "fp8"

    def __str__(self) -> str:
        return f"{self.method}-{self.blocks[0]}x{self.blocks[1]}-{self.scale}-{self.shape}-{self.dtype}"

    @property
    def section(self) -> dict[str, Any]:
        if self.method == "fbgemm_fp8":
            return {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
        block_size = list(self.blocks) if self.blocks[1] else None
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block_size, "ignored_layers": ["lm_head"]}

    def store(self, shape: tuple[int, int], generator: torch.Generator) -> tuple[Parts, Tensor]:
        codes = random_e4m3(shape, generator)
        if self.dtype == torch.float8_e8m0fnu:
            bytes_ = torch.randint(114, 119, grid(shape, self.blocks), generator=generator, dtype=torch.uint8)
            scales = bytes_.view(torch.float8_e8m0fnu)
            factors = [[e8m0(byte) for byte in row] for row in bytes_.tolist()]
        else:
            scales = random_scales(grid(shape, self.blocks), 0.01 * shape[1] ** -0.5, generator, self.dtype)
            factors = scales.double().tolist()
        stored = {"grid": scales, "row": scales[:, 0], "one": scales.flatten()[:1], "none": scales.flatten()[0]}[self.shape]
        return {"weight": float8(codes), self.scale: stored}, multiply(codes.tolist(), factors, self.blocks, e4m3)


@dataclass
class ModelOpt:
    """algorithm: `quant_algo`. blocks: of FP8's scales"""

    algorithm: str = "NVFP4"
    blocks: Blocks = (0, 0)
    is_nested: bool = False

    def __str__(self) -> str:
        return f"{self.algorithm}{'-nested' if self.is_nested else ''}"

    @property
    def section(self) -> dict[str, Any]:
        if self.is_nested:
            fields = {"quant_algo": self.algorithm, "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
            return {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": fields}
        weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        groups = {"group_0": {"input_activations": weights, "weights": weights, "targets": ["Linear"]}}
        return {"config_groups": groups, "ignore": ["lm_head"], "quant_algo": self.algorithm, "quant_method": "modelopt"}

    def store(self, shape: tuple[int, int], generator: torch.Generator) -> tuple[Parts, Tensor]:
        if self.algorithm != "NVFP4":
            parts, dense = Fp8(self.blocks, shape="none" if self.blocks == (0, 0) else "row").store(shape, generator)
            return parts | {"input_scale": torch.tensor(0.5)}, dense
        codes, scales = random_e2m1(shape, generator)
        whole = random_scales((1, 1), 0.01 * shape[1] ** -0.5, generator)[0, 0]
        factors, overall = [[e4m3(byte) for byte in row] for row in scales.tolist()], float(whole)
        dense = multiply(codes.tolist(), factors, (1, 16), e2m1, last=lambda product: product * overall)
        return {"weight": pairs_of(codes), "weight_scale": float8(scales), "weight_scale_2": whole, "input_scale": torch.tensor(0.5)}, dense


def random_e2m1(shape: tuple[int, int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Codes of four bits, and positive E4M3 scales of groups of 16."""
    codes = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    return codes, torch.randint(0x40, 0x70, grid(shape, (1, 16)), generator=generator, dtype=torch.uint8)


@dataclass
class Compressed:
    """compressed-tensors. layout: `format`. blocks: of one scale. is_ordered: inputs of a group lie anywhere. is_padded: in whole words"""

    layout: str = "pack-quantized"
    bits: int = 4
    blocks: Blocks = (1, 32)
    symmetric: bool = True
    is_ordered: bool = False
    dtype: torch.dtype = torch.bfloat16
    is_padded: bool = False

    def __str__(self) -> str:
        marks = ("" if self.symmetric else "-asym") + ("-order" if self.is_ordered else "") + ("-padded" if self.is_padded else "")
        return f"{self.layout}-{self.bits}-{self.blocks[0]}x{self.blocks[1]}{marks}"

    @property
    def weights(self) -> dict[str, Any]:
        kind = "float" if self.layout.startswith(("float", "nvfp", "mxfp")) else "int"
        strategy = {(0, 0): "tensor", (1, 0): "channel"}.get(self.blocks, "group" if self.blocks[0] == 1 else "block")
        return {
            "num_bits": self.bits, "type": kind, "symmetric": self.symmetric, "strategy": strategy, "dynamic": False,
            "group_size": self.blocks[1] if strategy == "group" else None, "observer": "minmax", "observer_kwargs": {},
            "block_structure": list(self.blocks) if strategy == "block" else None, "actorder": "group" if self.is_ordered else None,
        }  # fmt: skip

    @property
    def section(self) -> dict[str, Any]:
        group = {"targets": ["Linear"], "weights": self.weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors", "format": self.layout, "config_groups": {"group_0": group}, "ignore": ["lm_head"],
            "kv_cache_scheme": None, "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {},
            "global_compression_ratio": 1.9,
        }  # fmt: skip

    def store(self, shape: tuple[int, int], generator: torch.Generator) -> tuple[Parts, Tensor]:
        if self.layout == "float-quantized":
            return Fp8(self.blocks, shape="one" if self.blocks == (0, 0) else "grid", dtype=self.dtype).store(shape, generator)
        if self.layout == "nvfp4-pack-quantized":
            return _store_nvfp4(shape, generator)
        return _store_mx(shape, generator, self.bits) if self.layout.startswith("mx") else self._store_integers(shape, generator)

    def _store_integers(self, shape: tuple[int, int], generator: torch.Generator) -> tuple[Parts, Tensor]:
        half, places = 1 << (self.bits - 1), grid(shape, self.blocks)
        values = torch.randint(-half, half, shape, generator=generator)
        scales = random_scales(places, 1.7 / half * shape[1] ** -0.5, generator, self.dtype)
        zeros = torch.randint(-half, half, places, generator=generator) // 2
        order = torch.arange(shape[1])[torch.randperm(shape[1], generator=generator)] // self.blocks[1] if self.is_ordered else None
        pack = pack_padded if self.is_padded else pack_rows
        parts = {"weight_scale": scales.flatten() if self.blocks == (0, 0) else scales}
        if order is not None:
            parts["weight_g_idx"] = order.int()
        if self.layout == "int-quantized":
            parts["weight"] = values.to(torch.int8)
        else:
            parts |= {"weight_packed": pack((values + half).tolist(), self.bits), "weight_shape": torch.tensor(shape)}
        if not self.symmetric:
            is_packed = self.layout == "pack-quantized" and self.blocks[0] == 1
            packed = pack((zeros + half).t().tolist(), self.bits).t() if is_packed else zeros.to(torch.int8)
            parts["weight_zero_point"] = packed.contiguous()
        taken = None if self.symmetric else zeros.tolist()
        columns = None if order is None else order.tolist()
        return parts, multiply(values.tolist(), scales.double().tolist(), self.blocks, float, zeros=taken, order=columns)


def _store_nvfp4(shape: tuple[int, int], generator: torch.Generator) -> tuple[Parts, Tensor]:
    codes, scales = random_e2m1(shape, generator)
    whole = random_scales((1, 1), 100 * shape[1] ** 0.5, generator).flatten()
    factors, divisor = [[e4m3(byte) for byte in row] for row in scales.tolist()], float(whole)
    dense = multiply(codes.tolist(), factors, (1, 16), e2m1, last=lambda product: product / divisor)
    return {"weight_packed": pairs_of(codes), "weight_scale": float8(scales), "weight_global_scale": whole}, dense


def _store_mx(shape: tuple[int, int], generator: torch.Generator, bits: int) -> tuple[Parts, Tensor]:
    lowest = 121 if bits == 4 else 114
    scales = torch.randint(lowest, lowest + 4, grid(shape, (1, 32)), generator=generator, dtype=torch.uint8)
    factors = [[e8m0(byte) for byte in row] for row in scales.tolist()]
    if bits == 8:
        codes = random_e4m3(shape, generator)
        return {"weight": float8(codes), "weight_scale": scales}, multiply(codes.tolist(), factors, (1, 32), e4m3)
    codes = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    return {"weight_packed": pairs_of(codes), "weight_scale": scales}, multiply(codes.tolist(), factors, (1, 32), e2m1)
