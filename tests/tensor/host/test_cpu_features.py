"""Tests choices that follow from the CPU: pure functions of what /proc/cpuinfo says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.tensor.host.cpu_features import CpuFeatures, LinearPath, linear_path, parse_cpu_flags, read_cpu_features

pytestmark = pytest.mark.pure

SKYLAKE = CpuFeatures("x86_64", frozenset({"fma", "avx2", "avx512f"}))
GENOA = CpuFeatures("x86_64", frozenset({"fma", "avx2", "avx512f", "avx512_bf16"}))
SAPPHIRE = CpuFeatures("x86_64", frozenset({"fma", "avx2", "avx512f", "avx512_bf16", "amx_bf16"}))
ZEN2 = CpuFeatures("x86_64", frozenset({"fma", "avx2"}))
GRAVITON = CpuFeatures("aarch64", frozenset({"asimd", "bf16"}))
OLD = CpuFeatures("x86_64", frozenset({"sse4_2"}))


def test_flags_are_read_from_x86_and_arm_files(tmp_path: Path) -> None:
    assert parse_cpu_flags("processor\t: 0\nflags\t\t: fpu avx2 fma\nbugs\t: x\nprocessor\t: 1\nflags\t\t: other") == {"fpu", "avx2", "fma"}
    assert parse_cpu_flags("processor : 0\nFeatures : fp asimd bf16\n") == {"fp", "asimd", "bf16"}
    assert parse_cpu_flags("") == frozenset()
    (tmp_path / "cpuinfo").write_text("flags : avx2\n")
    assert read_cpu_features(tmp_path / "cpuinfo").flags == {"avx2"}
    assert read_cpu_features(tmp_path / "absent").flags == frozenset()


def test_families() -> None:
    families = [cpu.family for cpu in (SKYLAKE, GENOA, SAPPHIRE, ZEN2, GRAVITON, OLD)]
    assert families == ["avx512", "avx512_bf16", "bf16", "avx2", "bf16", "generic"]
    assert [cpu.has_bf16 for cpu in (SKYLAKE, GENOA, SAPPHIRE, ZEN2, GRAVITON, OLD)] == [False, True, True, False, True, False]


def test_linear_paths() -> None:
    for tiled in (SAPPHIRE, GRAVITON):
        assert linear_path(tiled, torch.bfloat16) is LinearPath.ONEDNN
    assert linear_path(GENOA, torch.bfloat16) is LinearPath.BF16_STRIPS
    assert linear_path(GENOA, torch.float32) is LinearPath.STRIPS
    for cpu in (SKYLAKE, ZEN2):
        assert linear_path(cpu, torch.bfloat16) is LinearPath.STRIPS
        assert linear_path(cpu, torch.float32) is LinearPath.STRIPS
    assert linear_path(OLD, torch.float32) is LinearPath.ONEDNN
