"""Tests that the error table of docs/kernels.md stays within its bounds when made again, and that the bandwidth script keeps its
promises.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("numba")

from bench import bandwidth, kernel_error
from bench.harness import block_of

pytestmark = pytest.mark.pure

FLOAT32_BOUND = 5e-6
BFLOAT16_BOUND = 1.01 / 256
"""Half a unit in the last place of 8 bits: one rounding of an exact result."""
COST_BOUNDS = {"linear int8": 0.02, "linear int4": 0.15, "attention": 0.02}
"""Of what a precision costs on normally distributed values; by the beginning of the case's name."""


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, dict[str, kernel_error.Errors]]]:
    """On one thread, since small tensors lose much to threads that wait for each other on a busy machine. Without the most rows, which
    take the same kernels as 64 do, and most of the time."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_error, "ROWS", (1, 8, 64))
        torch.set_num_threads(1)
        try:
            yield kernel_error.measure()
        finally:
            torch.set_num_threads(before)


def errors_of(table: dict[str, dict[str, kernel_error.Errors]], case: str, dtype: str) -> list[float]:
    """Of both implementations at every row count."""
    return [error for errors in table[case][dtype].values() for error in errors.values()]


@pytest.mark.parametrize("case", kernel_error.FLOATS)
def test_every_kernel_stays_within_its_bound_of_float64(case: str, table: dict[str, dict[str, kernel_error.Errors]]) -> None:
    assert all(error < FLOAT32_BOUND for error in errors_of(table, case, "float32"))
    assert all(error < BFLOAT16_BOUND for error in errors_of(table, case, "bfloat16"))


@pytest.mark.parametrize("case", kernel_error.COSTS)
def test_small_integers_cost_something_and_not_too_much(case: str, table: dict[str, dict[str, kernel_error.Errors]]) -> None:
    """The lower end sees to it that they are compared with what was there before: the same integers would agree to the float."""
    bound = next(value for start, value in COST_BOUNDS.items() if case.startswith(start))
    for dtype in kernel_error.DTYPES:
        assert all(1e-4 < error < bound for error in errors_of(table, case, dtype))


def test_the_page_has_a_line_for_every_case(table: dict[str, dict[str, kernel_error.Errors]]) -> None:
    """The figures are of the machine that wrote them; the rows are not."""
    there = [line.split("|")[1].strip() for line in block_of(kernel_error.PAGE, kernel_error.BLOCK_NAME).splitlines()[2:]]
    assert there == [*kernel_error.CASES]
    assert [line.split("|")[1].strip() for line in kernel_error.markdown(table).splitlines()[2:]] == there


def test_an_array_that_caches_could_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        bandwidth.measure_read_bandwidth(gib=0.5)
    with pytest.raises(ValueError, match="at least 1"):
        bandwidth.measure_read_bandwidth(rounds=0)


def test_every_pattern_reads_every_number_once() -> None:
    values = torch.ones(8 * bandwidth.MATRIX_COLUMNS)
    for name, read in bandwidth.patterns(values).items():
        assert float(torch.as_tensor(read()).sum()) == values.numel(), name


@pytest.mark.slow
def test_bandwidth_is_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    bandwidth.main(["--json", "--rounds", "2"])
    found = json.loads(capsys.readouterr().out)
    assert found["num_bytes"] >= 2**30
    assert all(len(times) == 2 for times in found["seconds"].values())
    fastest = min(min(times) for times in found["seconds"].values())
    assert min(found["seconds"][found["pattern"]]) == fastest
    assert found["read_bytes_per_s"] == pytest.approx(found["num_bytes"] / fastest)
