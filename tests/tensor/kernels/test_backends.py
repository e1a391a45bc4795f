"""A backend that brings the operations alone computes whole models: packing, steps and draw have plain ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runner_kit import Planner, make_runner, row_tokens, save_tiny_llama

from headrace.tensor.kernels import Backend, Kernels, load_backend, plain_packing, reference
from headrace.tensor.kernels.filters import draw
from headrace.tensor.kernels.rounding import Precision
from headrace.tensor.models import load_model


def operations_of(made: type) -> set[str]:
    return {name for name in vars(made) if not name.startswith("_")}


def test_the_reference_is_operations_and_nothing_else() -> None:
    assert operations_of(reference.ReferenceKernels) == operations_of(Kernels)
    made = load_backend("reference")
    assert made == Backend(name="reference", kernels=reference.KERNELS, packing=plain_packing.PACKING)
    assert (made.executor, made.draw) == (None, draw)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_operations_alone_answer_as_the_compiled_backend_does(quantization: str, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    folder, answers = save_tiny_llama(tmp_path / "tiny"), []
    mine = Backend(name="mine", kernels=reference.ReferenceKernels(), packing=plain_packing.PACKING)
    for backend in (mine, load_backend("numba")):
        loaded = load_model(
            folder, backend=backend, dtype=torch.float32, device="cpu", load_format="auto", seed=0, max_model_len=None,
            quantization=quantization,
        )  # fmt: skip
        runner, planner = make_runner(loaded.model), Planner()
        planner.start(0, [5, 6, 7])
        plans = [planner.plan((0, 0, 3, 1)), *(planner.plan((0, 3 + step, 1, 1)) for step in range(8))]
        answers.append([row_tokens(runner.submit(plan).result()) for plan in plans])
    assert answers[0] == answers[1]


def test_plain_linears_are_not_kept_on_disk() -> None:
    assert {plain_packing.PACKING.packed_layout(precision) for precision in Precision} == {""}
