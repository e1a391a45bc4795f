"""The cold start of a replica."""

from __future__ import annotations

import pytest

from headrace.lab.plan.catalogue import read_catalogue
from headrace.policy.placement.roofline import START_S, load_seconds
from tools.plan_sizings import shape

pytestmark = pytest.mark.pure


def test_seventy_billion_weights_in_sixteen_bits_load_in_one_and_a_half_minutes() -> None:
    model = shape(read_catalogue(), "llama-70b")
    assert round(load_seconds(model.weights_bytes("fp16")), 1) == 89.0


def test_a_faster_drive_shortens_the_reading_alone() -> None:
    assert load_seconds(100e9, 10e9) == START_S + 10
    assert load_seconds(0.0, 10e9) == START_S
