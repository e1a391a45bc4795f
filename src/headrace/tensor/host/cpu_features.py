"""Reads the instruction sets of this CPU, and chooses the kernels of linear layers for them: Headrace's own strips, or oneDNN.

The choice is a table. Nothing is measured at start, so that machines with equal instruction sets compute equal results. The measurements
behind the table are in docs/experiments.md.
"""

from __future__ import annotations

import enum
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """
    machine  "x86_64", "aarch64", ...
    flags    as /proc/cpuinfo names them
    """

    machine: str
    flags: frozenset[str]

    @property
    def family(self) -> str:
        """The instruction set that decides which arithmetic is fast; key of the table of linear paths."""
        if self.flags & {"amx_bf16", "bf16"}:
            return "bf16"
        if "avx512_bf16" in self.flags:
            return "avx512_bf16"
        return "avx512" if "avx512f" in self.flags else "avx2" if "avx2" in self.flags else "generic"

    @property
    def has_bf16(self) -> bool:
        """bfloat16 products in hardware (x86: AVX512-BF16 or AMX; Arm: bf16)."""
        return self.family in ("avx512_bf16", "bf16")


class LinearPath(enum.Enum):
    STRIPS = "strips"  # Headrace's kernel: batch-invariant; float32 arithmetic, bfloat16 storage of exact float32 weights
    BF16_STRIPS = "bfloat16 strips"  # Headrace's kernel: batch-invariant; rows rounded to bfloat16, float32 sums
    ONEDNN = "onednn"  # oneDNN with weights reordered once


_LINEAR_PATHS: dict[tuple[str, torch.dtype], LinearPath] = {
    # One instruction per two inputs: level with oneDNN where arithmetic counts, ahead of it where memory does, and steps are recorded.
    ("avx512_bf16", torch.bfloat16): LinearPath.BF16_STRIPS,
    ("avx512_bf16", torch.float32): LinearPath.STRIPS,
    # Only oneDNN uses AMX tiles and Arm's bfloat16 instructions: its products are several times as fast as strips in float32.
    ("bf16", torch.bfloat16): LinearPath.ONEDNN,
    ("bf16", torch.float32): LinearPath.STRIPS,
    # Without it oneDNN emulates bfloat16: 3-12 times slower than strips at every row count.
    ("avx512", torch.bfloat16): LinearPath.STRIPS,
    # Strips: twice oneDNN's decode (half the bytes), three quarters of its prefill.
    ("avx512", torch.float32): LinearPath.STRIPS,
    ("avx2", torch.bfloat16): LinearPath.STRIPS,
    ("avx2", torch.float32): LinearPath.STRIPS,
}


def parse_cpu_flags(cpuinfo: str) -> frozenset[str]:
    for line in cpuinfo.splitlines():
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(values.split())
    return frozenset()


@cache
def read_cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> CpuFeatures:
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return CpuFeatures(platform.machine(), parse_cpu_flags(text))


def linear_path(features: CpuFeatures, dtype: torch.dtype) -> LinearPath:
    """The family "generic" gets oneDNN, or torch where torch has no oneDNN."""
    return _LINEAR_PATHS.get((features.family, dtype), LinearPath.ONEDNN)
