"""Computes rotary position tables (cos and sin of every position), with the frequencies of each method of context extension.

Sources: RoFormer (Su et al. 2021); linear interpolation (kaiokendev, Chen et al. 2023); YaRN (Peng et al. 2023); Llama 3.1's smoothed
interpolation; LongRoPE (Ding et al. 2024). Formulas follow transformers' `modeling_rope_utils`, the oracle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 8192
"""Positions computed at a time, which limits temporary memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions are divided by `factor`. original_positions: context length of pretraining."""

    factor: float
    original_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Frequencies of long wavelengths are divided by `factor`, those of short ones kept, with a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Frequencies that turn more than beta_fast times in the original context are kept, and those that turn less than beta_slow times
    are divided by `factor`, with a ramp between.

    magnitude  factor of cos and sin (the paper's attention temperature)
    truncate   whether the ramp begins and ends at whole dimensions
    """

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    magnitude: float
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """Each frequency is divided by a factor of its own.

    The long factors are used where contexts may exceed the context length of pretraining. A model uses one of the two sets for all
    positions, since cached keys are already rotated.

    short_factors, long_factors  one for each rotated pair
    magnitude                    factor of cos and sin
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_positions: int
    magnitude: float

    def is_long(self, num_positions: int) -> bool:
        return num_positions > self.original_positions


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """rotary_dim: leading elements of a head that are rotated; even."""

    theta: float
    rotary_dim: int
    scaling: Scaling | None = None


def rope_table(spec: RopeSpec, num_positions: int, device: str) -> Tensor:
    """cos | sin, float32 [num_positions, rotary_dim] on `device`, in the form that `Kernels.rotary` takes."""
    half = spec.rotary_dim // 2
    frequencies = _inverse_frequencies(spec, num_positions).to(device)
    magnitude = spec.scaling.magnitude if isinstance(spec.scaling, YarnScaling | LongRopeScaling) else 1.0
    table = torch.empty((num_positions, spec.rotary_dim), dtype=torch.float32, device=device)
    for start in range(0, num_positions, _CHUNK):  # chunked: the temporaries of 131,072 positions would be twice the table
        rows = table[start : start + _CHUNK]
        angles = torch.arange(start, start + rows.shape[0], device=device).float()[:, None] * frequencies
        rows[:, :half] = angles.cos() * magnitude
        rows[:, half:] = angles.sin() * magnitude
    return table


def _inverse_frequencies(spec: RopeSpec, num_positions: int) -> Tensor:
    """Radians per position of each rotated pair, [rotary_dim / 2] float32."""
    plain = 1.0 / (spec.theta ** (torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64).float() / spec.rotary_dim))
    match spec.scaling:
        case None:
            return plain
        case LinearScaling(factor=factor):
            return plain / factor
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(plain, spec, scaling)
        case LongRopeScaling() as scaling:
            return plain / torch.tensor(scaling.long_factors if scaling.is_long(num_positions) else scaling.short_factors)


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    original, low, high = scaling.original_positions, scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / scaling.factor + smooth * plain
    bent = torch.where(wavelength > original / low, plain / scaling.factor, between)
    return torch.where(wavelength < original / high, plain, bent)


def _yarn(plain: Tensor, spec: RopeSpec, scaling: YarnScaling) -> Tensor:
    def dim_turning(turns: float) -> float:
        """The pair of dimensions, as a fraction, that makes this many turns within the original context."""
        return spec.rotary_dim * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dim_turning(scaling.beta_fast), dim_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    width = high - low or 0.001  # a step instead of a division by zero
    ramp = ((torch.arange(spec.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


def longrope_magnitude(factor: float, original_positions: int) -> float:
    """For a configuration without attention_factor. original_positions: at least 2."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_positions))


def yarn_magnitude(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    def grown(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return grown(mscale) / grown(mscale_all_dim) if mscale and mscale_all_dim else grown(1.0)
