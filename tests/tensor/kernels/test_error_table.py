"""The error table of docs/kernels.md is made here again, held to stated bounds; and the bandwidth script keeps its promises."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("numba")

from bench import bandwidth, kernel_error

FLOAT32_BOUND = 5e-6
BFLOAT16_BOUND = 1 / 256
"""Half a unit in the last place of 8 bits: one rounding of an exact result."""


def test_every_kernel_stays_within_its_bound_of_float64() -> None:
    table = kernel_error.measure()
    assert set(table) == set(kernel_error.CASES)
    for name, errors in table.items():
        for column, error in errors.items():
            assert error < (FLOAT32_BOUND if column.endswith("float32") else 1.01 * BFLOAT16_BOUND), (name, column)


def test_an_array_that_caches_could_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        bandwidth.measure_read_bandwidth(gib=0.5)
    with pytest.raises(ValueError, match="at least 1"):
        bandwidth.measure_read_bandwidth(rounds=0)


@pytest.mark.slow
def test_bandwidth_is_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    bandwidth.main(["--json", "--rounds", "2"])
    found = json.loads(capsys.readouterr().out)
    assert found["num_bytes"] >= 2**30
    assert len(found["seconds"]) == 2
    assert found["read_bytes_per_s"] == pytest.approx(found["num_bytes"] / min(found["seconds"]))
