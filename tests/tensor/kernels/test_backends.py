"""Tests that a backend with the operations alone computes whole models: packing, steps and draw have plain implementations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runner_kit import Planner, make_runner, row_tokens, save_tiny_llama

from headrace.tensor.backends import load_backend
from headrace.tensor.device import CPU
from headrace.tensor.host.cpu_features import CpuFeatures
from headrace.tensor.kernels import Backend, Kernels, reference
from headrace.tensor.kernels.filters import draw
from headrace.tensor.models import load_model

pytestmark = pytest.mark.pure


def operations_of(made: type) -> set[str]:
    return {name for name in vars(made) if not name.startswith("_")}


def test_the_reference_is_operations_and_nothing_else() -> None:
    assert operations_of(reference.ReferenceKernels) == operations_of(Kernels)
    made = load_backend("reference")
    assert made == Backend(name="reference", kernels=reference.KERNELS, packing=reference.PACKING, adapters=reference.ADAPTERS)
    assert (made.executor, made.draw) == (None, draw)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_operations_alone_answer_as_the_compiled_backend_does(quantization: str, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    folder, answers = save_tiny_llama(tmp_path / "tiny"), []
    mine = Backend(name="mine", kernels=reference.ReferenceKernels(), packing=reference.PACKING)
    for backend in (mine, load_backend("numba")):
        loaded = load_model(
            folder, backend=backend, dtype=torch.float32, device=CPU, load_format="auto", seed=0, max_model_len=None,
            quantization=quantization,
        )  # fmt: skip
        runner, planner = make_runner(loaded.model), Planner()
        planner.start(0, [5, 6, 7])
        plans = [planner.plan((0, 0, 3, 1)), *(planner.plan((0, 3 + step, 1, 1)) for step in range(8))]
        answers.append([row_tokens(runner.submit(plan).result()) for plan in plans])
    assert answers[0] == answers[1]


def test_plain_linears_are_not_kept_on_disk() -> None:
    assert reference.BACKEND.packed_format is None


@pytest.mark.parametrize(("is_compiled", "activations"), [(True, torch.float32), (False, torch.bfloat16)])
def test_bfloat16_products_need_the_instruction_on_the_cpu_and_in_the_compiled_code(
    is_compiled: bool, activations: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLVM may know less of a CPU than the system does: the paths, and what the results depend on, follow what was compiled."""
    pytest.importorskip("numba")
    from headrace.tensor.kernels.cpu import backend as cpu
    from headrace.tensor.kernels.cpu.jit import vector_ir

    here = CpuFeatures("x86_64", frozenset({"avx2", "avx512f", "avx512_bf16"}))
    monkeypatch.setattr(cpu, "read_cpu_features", lambda: here)
    monkeypatch.setattr(vector_ir, "HAS_BF16_DOTS", is_compiled)
    made = cpu.make_backend(deterministic=False, features=here)
    assert made.packing.activation_dtype(torch.bfloat16) == activations
    assert ("dot instructions" in made.numerics) == is_compiled
    assert made.numerics.startswith(f"{vector_ir.LANES} lanes")
