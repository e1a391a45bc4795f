"""Tests the kernels of other CPUs: with `vpdpbusd` if this CPU lacks it, else without, and without products of bfloat16 pairs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("numba")

from other_cpu_path import run_with

from headrace.tensor.kernels.cpu.jit import vector_ir

pytestmark = pytest.mark.process

HERE = Path(__file__).parent
INTEGERS = [
    "plain_one and True and (65-96 or 448-1088)",
    "test_a_row_does_not_depend_on_its_neighbours",
    "test_the_largest_inputs_and_weights_fit",
]
PAIRS = [
    "test_strips_equal and BFLOAT16 and (68-98 or 96-2144) and (1- or 27-)",
    "same_bits_in_every_batch and BFLOAT16",
    "ties_to_even and 13",
    "plain_twin",
    "test_a_row_of_bfloat16_products_that_is_not_finite",
]


def test_kernels_of_the_other_kinds_of_cpu_have_the_same_results() -> None:
    """Where this CPU has no products of pairs, every test takes the other way already."""
    plugins, tests, files = ["other_integer_dots"], INTEGERS, [HERE / "test_quantized.py"]
    if vector_ir.HAS_BF16_DOTS:
        plugins, tests, files = [*plugins, "without_bf16_dots"], [*tests, *PAIRS], [*files, HERE / "test_linear.py"]
    done = run_with(plugins, tests, *files)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout
