"""Choices that follow from the CPU: pure functions over what /proc/cpuinfo says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.core.errors import ConfigError
from headrace.tensor.host.cpu_features import CpuFeatures, LinearPath, linear_path, parse_cpu_flags, read_cpu_features, resolve_dtype

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


@pytest.mark.parametrize(
    ("requested", "stored", "cpu", "dtype", "why"),
    [
        ("auto", "bfloat16", SKYLAKE, torch.float32, "in software"),
        ("auto", "bfloat16", SAPPHIRE, torch.bfloat16, "bfloat16 products"),
        ("auto", "bfloat16", GENOA, torch.bfloat16, "bfloat16 products"),
        ("auto", "bfloat16", GRAVITON, torch.bfloat16, "bfloat16 products"),
        ("auto", "float32", SAPPHIRE, torch.float32, "checkpoint"),
        ("auto", "float16", SAPPHIRE, torch.float32, "float16"),
        ("bfloat16", "float32", SKYLAKE, torch.bfloat16, "configured"),
        ("float32", "bfloat16", SAPPHIRE, torch.float32, "configured"),
    ],
)
def test_dtype_on_a_cpu(requested: str, stored: str, cpu: CpuFeatures, dtype: torch.dtype, why: str) -> None:
    chosen, reason = resolve_dtype(requested, stored, cpu)
    assert chosen == dtype
    assert why in reason


def test_what_is_multiplied_as_integers_is_computed_in_float32_unless_asked_otherwise() -> None:
    """Casts between the integer products and bfloat16 would keep decode steps from being recorded."""
    chosen, reason = resolve_dtype("auto", "bfloat16", SAPPHIRE, is_rounded=True)
    assert chosen == torch.float32
    assert "integers" in reason
    assert resolve_dtype("bfloat16", "bfloat16", SAPPHIRE, is_rounded=True)[0] == torch.bfloat16
    assert resolve_dtype("auto", "bfloat16", SAPPHIRE, device="cuda", is_rounded=True)[0] == torch.bfloat16


def test_float16_is_refused_on_a_cpu_and_taken_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match="float16 is not computed on CPUs") as caught:
        resolve_dtype("float16", "float16", SAPPHIRE)
    assert "float32" in caught.value.remedy
    assert resolve_dtype("float16", "bfloat16", OLD, device="cuda")[0] == torch.float16
    assert resolve_dtype("auto", "bfloat16", OLD, device="cuda")[0] == torch.bfloat16


def test_linear_paths() -> None:
    for tiled in (SAPPHIRE, GRAVITON):
        assert linear_path(tiled, torch.bfloat16) is LinearPath.ONEDNN
    assert linear_path(GENOA, torch.bfloat16) is LinearPath.BF16_STRIPS
    assert linear_path(GENOA, torch.float32) is LinearPath.STRIPS
    for cpu in (SKYLAKE, ZEN2):
        assert linear_path(cpu, torch.bfloat16) is LinearPath.STRIPS
        assert linear_path(cpu, torch.float32) is LinearPath.STRIPS
    assert linear_path(OLD, torch.float32) is LinearPath.ONEDNN
