"""Tests a worker's part of the site's limits."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.gateway.config import MAX_WORKERS
from headrace.gateway.http.config import Limits
from headrace.gateway.process import load_part
from headrace.gateway.site import SHARED_LIMITS, GatewayWorker, divided, memory_limits, part_of

pytestmark = pytest.mark.pure

OWN_LIMITS = {
    "max_body_bytes",
    "max_tenant_share",
    "daily_budget",
    "monthly_budget",
    "on_store_failure",
}
"""Limits of one request, connection or answer, shares, and what the store counts for all workers: the same in every worker."""


def test_every_limit_is_either_shared_or_each_workers_own() -> None:
    assert {item.name for item in fields(Limits)} == {*SHARED_LIMITS, *OWN_LIMITS}
    assert not OWN_LIMITS & set(SHARED_LIMITS)


@given(total=st.integers(1, 1 << 40), num_workers=st.integers(1, MAX_WORKERS))
def test_parts_add_up_to_the_sites_limit_and_none_is_zero(total: int, num_workers: int) -> None:
    shared: dict[str, Any] = dict.fromkeys(SHARED_LIMITS, total)
    limits = Limits(**shared)
    part = divided(limits, num_workers)
    for name in SHARED_LIMITS:
        assert getattr(part, name) >= 1
        assert total <= num_workers * getattr(part, name) < total + num_workers
    for name in OWN_LIMITS:
        assert getattr(part, name) == getattr(limits, name)


def test_memory_for_prompts_is_divided_although_no_option_sets_it() -> None:
    whole = memory_limits(Limits(), 64 << 30, lambda: 1.0).prompts.total
    assert memory_limits(part_of(Limits(), 4, 64 << 30), 64 << 30, lambda: 1.0).prompts.total == whole / 4


def test_the_only_gateway_keeps_every_limit() -> None:
    assert replace(part_of(Limits(), 1, 64 << 30), max_prompt_bytes=None) == Limits()


@pytest.mark.parametrize("index", [-1, 2])
def test_a_worker_that_the_file_does_not_have_is_refused(tmp_path: Path, index: int) -> None:
    path = tmp_path / "gateway.json"
    path.write_text(json.dumps({"models": [{"name": "m", "upstreams": [{"url": "http://127.0.0.1:9/v1"}]}], "workers": 2}))
    assert load_part(path, GatewayWorker(1, tmp_path)).limits.max_requests == 2048
    with pytest.raises(ConfigError, match=r"--worker: -?\d is outside 0\.\.1"):
        load_part(path, GatewayWorker(index, tmp_path))


@pytest.mark.parametrize("workers", [0, MAX_WORKERS + 1])
def test_a_number_of_workers_out_of_range_is_refused(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "gateway.json"
    path.write_text(json.dumps({"models": [{"name": "m", "upstreams": [{"url": "http://127.0.0.1:9/v1"}]}], "workers": workers}))
    with pytest.raises(ConfigError, match=rf"^workers: {workers} is outside 1\.\.{MAX_WORKERS}"):
        load_part(path, GatewayWorker(0, tmp_path))
