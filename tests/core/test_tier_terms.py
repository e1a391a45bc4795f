"""Shares and goals of a tier are checked where a request enters an engine."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.core.errors import InvalidRequest
from headrace.core.request import TierTerms

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight", 0.0),
        ("weight", math.inf),
        ("weight", math.nan),
        ("kv_share", 0.0),
        ("kv_share", 1.5),
        ("ttft_ms", 0.0),
        ("ttft_ms", math.nan),
        ("tpot_ms", -1.0),
        ("tpot_ms", math.inf),
    ],
)
def test_a_number_outside_its_range_is_refused_by_name(field: str, value: float) -> None:
    given: dict[str, Any] = {field: value}
    with pytest.raises(InvalidRequest, match=f"tier.{field}"):
        TierTerms(**given).check()


def test_numbers_inside_their_ranges_pass() -> None:
    TierTerms(name="gold", weight=1e-3, kv_share=1.0, ttft_ms=0.5, tpot_ms=1e6).check()
