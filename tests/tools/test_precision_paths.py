"""Tests that the code takes the arithmetic that the table of docs/kernels.md states for each precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("numba")

from bench import precision_paths
from bench.harness import block_of, replace_block
from headrace.tensor.host.cpu_features import read_cpu_features
from headrace.tensor.kernels.cpu import linear
from headrace.tensor.kernels.cpu.integer.simd import HAS_DOTS
from headrace.tensor.kernels.cpu.jit.vector_ir import LANES

pytestmark = pytest.mark.pure

CPUINFO = Path("/proc/cpuinfo")
"""Named: this machine's own, whose instructions they are, whatever else is read as (`support.another_cpu`)."""


def test_page_and_code_agree() -> None:
    assert block_of(precision_paths.PAGE, precision_paths.BLOCK_NAME) == precision_paths.markdown()


@pytest.mark.skipif(LANES not in (8, 16), reason="a CPU without a row in the table")
def test_panels_of_the_table_are_those_of_the_kernels_of_this_machine() -> None:
    features, compiled = read_cpu_features(CPUINFO), cast("Any", linear.panel_rows)
    for rows in range(1, 50):
        left, sizes = rows, []
        while left:
            sizes.append(compiled.py_func(left))
            left -= sizes[-1]
        assert precision_paths.panel_sizes(rows, features) == sizes


@pytest.mark.skipif(LANES not in (8, 16), reason="a CPU without a row in the table")
def test_integer_instructions_of_the_table_are_those_of_this_machine() -> None:
    assert ("vpdpbusd" in precision_paths.integer_arithmetic("int8", read_cpu_features(CPUINFO))) == HAS_DOTS


def test_a_block_is_replaced_between_its_marks_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a -->\nold\n<!-- end a -->\nold\n<!-- b -->\n\n<!-- end b -->\n")
    replace_block(page, "a", "new\nlines")
    assert page.read_text() == "before\n<!-- a -->\nnew\nlines\n<!-- end a -->\nold\n<!-- b -->\n\n<!-- end b -->\n"
    assert block_of(page, "a") == "new\nlines"
    assert block_of(page, "b") == ""
    with pytest.raises(ValueError, match="no block 'c'"):
        block_of(page, "c")
