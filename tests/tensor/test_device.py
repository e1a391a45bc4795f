"""Tests what is asked of a device: a CPU's answers on any machine, a GPU's as far as no GPU is needed."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.machine.gpus import unusable
from headrace.machine.resources import Available
from headrace.tensor import device
from headrace.tensor.device import CPU, CUDA, DEVICES, META, driver_version
from headrace.tensor.host.cpu_features import CpuFeatures

pytestmark = pytest.mark.pure

SKYLAKE = CpuFeatures("x86_64", frozenset({"fma", "avx2", "avx512f"}))
GENOA = CpuFeatures("x86_64", frozenset({"fma", "avx2", "avx512f", "avx512_bf16"}))
SAPPHIRE = CpuFeatures("x86_64", frozenset({"fma", "avx2", "avx512f", "avx512_bf16", "amx_bf16"}))
GRAVITON = CpuFeatures("aarch64", frozenset({"asimd", "bf16"}))
OLD = CpuFeatures("x86_64", frozenset({"sse4_2"}))


def test_every_device_that_can_be_configured_is_there() -> None:
    [option] = [field.metadata["option"] for field in fields(EngineConfig) if field.name == "device"]
    assert {"auto", *DEVICES} == set(option.one_of)
    assert {name: device.name for name, device in DEVICES.items()} == {name: name for name in DEVICES}


def test_memory_is_taken_on_the_device() -> None:
    weight, pool = CPU.empty_weight((3, 5), torch.bfloat16), CPU.zeroed_bytes((7, 9))
    assert (weight.shape, weight.dtype, weight.device.type) == ((3, 5), torch.bfloat16, "cpu")
    assert (pool.shape, pool.dtype, pool.any().item()) == ((7, 9), torch.uint8, False)
    for tensor in (META.empty_weight((3, 5), torch.bfloat16), META.zeroed_bytes((7, 9))):
        assert tensor.device.type == "meta"
    assert (type(CUDA).empty_weight, type(CUDA).zeroed_bytes) == (type(META).empty_weight, type(META).zeroed_bytes), "as torch does it"


def test_a_gpu_is_what_torch_says_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 << 30, 80 << 30))
    with pytest.raises(ConfigError, match="the GPU does not compute"):  # torch is a build for CPUs here
        CUDA.check()
    for answer in (2, 3):
        monkeypatch.setattr(torch, "ones", lambda count, device, answer=answer: torch.tensor([answer]))
        if answer == 2:
            CUDA.check()
        else:
            with pytest.raises(ConfigError, match="the GPU adds 1 and 1 to 3"):
                CUDA.check()
    assert CUDA.title == "NVIDIA H100"
    assert CUDA.free_memory() == Available(70 << 30, "the GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        CUDA.check()
    monkeypatch.setattr(device, "find_gpus", lambda: unusable("the driver is for CUDA 12.4", "Update the driver"))
    with pytest.raises(ConfigError, match=re.escape("device: the driver is for CUDA 12.4. Update the driver, or use device = cpu.")):
        CUDA.check()


def test_the_driver_of_a_gpu_is_part_of_what_results_are_compared_by(tmp_path: Path) -> None:
    assert driver_version(tmp_path) == "unknown"
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    for line in (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)",
    ):
        (tmp_path / "proc/driver/nvidia/version").write_text(f"{line}\nGCC version:  gcc version 12.3.0\n")
        assert driver_version(tmp_path) in line
        assert "." in driver_version(tmp_path)


def test_a_gpu_takes_memory_beside_a_steps_tensors() -> None:
    assert (CPU.working_bytes(256, 128_256), CPU.step_itemsize(torch.bfloat16)) == (0, 4)
    assert CUDA.working_bytes(256, 128_256) - CUDA.working_bytes(1, 128_256) == 255 * 128_256 * 8
    assert CUDA.step_itemsize(torch.bfloat16) == 2


def test_a_cpu_is_always_there() -> None:
    CPU.check()
    assert CPU.title == "cpu"
    assert CPU.free_memory().num_bytes > 0


def test_a_cache_on_a_gpu_has_the_dtype_that_is_computed_with() -> None:
    for requested in ("auto", "bfloat16"):
        assert CUDA.default_kv_dtype(requested, torch.float32, "bfloat16", SAPPHIRE) == (torch.float32, "as computed")
    assert CPU.default_kv_dtype("auto", torch.float32, "bfloat16", SAPPHIRE)[0] == torch.bfloat16
    assert CPU.default_kv_dtype("float32", torch.float32, "bfloat16", SAPPHIRE)[0] == torch.float32


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
    chosen, reason = CPU.resolve_dtype(requested, stored, cpu)
    assert chosen == dtype
    assert why in reason


def test_what_is_multiplied_as_integers_is_computed_in_float32_unless_asked_otherwise() -> None:
    """Casts between the integer products and bfloat16 would keep decode steps from being recorded."""
    chosen, reason = CPU.resolve_dtype("auto", "bfloat16", SAPPHIRE, is_rounded=True)
    assert chosen == torch.float32
    assert "integers" in reason
    assert CPU.resolve_dtype("bfloat16", "bfloat16", SAPPHIRE, is_rounded=True)[0] == torch.bfloat16
    assert CUDA.resolve_dtype("auto", "bfloat16", SAPPHIRE, is_rounded=True)[0] == torch.bfloat16


def test_float16_is_float32_on_a_cpu_and_taken_on_a_gpu() -> None:
    """vLLM's usual lines for quantized checkpoints say `--dtype half`."""
    chosen, reason = CPU.resolve_dtype("float16", "bfloat16", SAPPHIRE)
    assert chosen == torch.float32
    assert "holds every value" in reason
    assert CUDA.resolve_dtype("float16", "bfloat16", OLD)[0] == torch.float16
    assert CUDA.resolve_dtype("auto", "bfloat16", OLD)[0] == torch.bfloat16


def test_a_gpu_that_fails_is_said_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asked in a process of its own reads the reason as a line."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nCompile with TORCH_USE_CUDA_DSA\n" + 400 * "x")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", fail)
    with pytest.raises(ConfigError, match="illegal memory access Compile with") as caught:
        CUDA.check()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 450
