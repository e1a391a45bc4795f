"""Tests reading the limits and load of foreign servers: forms that are known, and bytes that mean nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.upstream.foreign.facts import (
    MAX_WAIT_S,
    ListedModel,
    ReportedLoad,
    exhausted_s,
    listed_model,
    reported_load,
    retry_after_s,
)

pytestmark = pytest.mark.pure

NOW = 1_700_000_000.0  # 2023-11-14 22:13:20 UTC


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after": "999999"}, MAX_WAIT_S),
        ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
        ({"retry-after": "Tue, 14 Nov 2023 22:13:50 GMT"}, 30.0),
        ({"retry-after": "Tue, 14 Nov 2023 22:00:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "1e999"}, None),
        ({"retry-after": "\u0667"}, None),
        ({"retry-after": "9" * 5000}, None),
    ],
)
def test_how_long_a_server_asks_to_wait(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers, NOW) == seconds


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0s"}, 360.0),
        ({"x-ratelimit-remaining-requests": "1", "x-ratelimit-reset-requests": "6m0s"}, 0.0),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "20ms"}, 0.02),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "2m59.5s"}, 179.5),
        ({"ratelimit-remaining": "0", "ratelimit-reset": "12"}, 12.0),
        ({"ratelimit-remaining": "0"}, 0.0),
        ({"ratelimit-remaining": "0", "ratelimit-reset": "tomorrow"}, 0.0),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "400d"}, MAX_WAIT_S),
    ],
)
def test_when_a_providers_counters_are_reset(headers: dict[str, str], seconds: float) -> None:
    assert exhausted_s(headers) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ([{"id": "m", "max_model_len": 4096}], ListedModel(True, 4096)),
        ([{"id": "m", "context_length": 8192}], ListedModel(True, 8192)),
        ([{"id": "m", "meta": {"n_ctx": 512, "n_ctx_train": 4096}}], ListedModel(True, 512)),
        ([{"id": "m", "object": "model", "owned_by": "x", "max_model_len": None}], ListedModel(True, None)),
        ([{"id": "other", "max_model_len": 1}], ListedModel(False)),
        ([], ListedModel(False)),
        ([{"id": "m", "max_model_len": -1, "context_length": 4096.0}], ListedModel(True, 4096)),
        ([{"id": "m", "max_model_len": "4096"}], ListedModel(True, 4096)),
        ([{"id": "m", "max_model_len": "long", "meta": None}], ListedModel(True, None)),
        ([{"id": 7}, None, {"id": "m", "meta": {"n_ctx": 0}}], ListedModel(True, None)),
        (["other", "m"], ListedModel(True, None)),
        ([{"name": "m", "context_length": 2048}], ListedModel(True, 2048)),
        (None, ListedModel(False)),
        ("m", None),
    ],
)
def test_lists_of_models(models: Any, expected: ListedModel | None) -> None:
    for body in ({"object": "list", "data": models}, {"models": models}, models if isinstance(models, list) else {"data": models}):
        assert listed_model(json.dumps(body).encode(), "m") == expected


def test_a_list_of_models_that_python_printed_is_read() -> None:
    assert listed_model(b'\xef\xbb\xbf{"data": [{"id": "m", "price": NaN, "max_model_len": 4096}]}', "m") == ListedModel(True, 4096)


VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_running{engine="0",model_name="other"} 50.0
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 7.0
"""
LLAMA_CPP = "llamacpp:requests_processing 1\nllamacpp:requests_deferred 4\n"
HEADRACE = (
    'headrace_requests_running{model="m",replica="a"} 1.0\nheadrace_requests_running{model="m",replica="b"} 2.0\n'
    'headrace_requests_waiting{model="m",replica="b"} 5.0\nheadrace_requests_waiting{model="other",replica="b"} 9.0\n'
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (VLLM, ReportedLoad(5, 7)),
        (LLAMA_CPP, ReportedLoad(1, 4)),
        (HEADRACE, ReportedLoad(3, 5)),
        ('sglang:num_running_reqs{model_name="m",tp_rank="0"} 2.0 1700000000000\n', ReportedLoad(2, 0)),
        ("tgi_batch_current_size 3\ntgi_queue_size 1\n", ReportedLoad(3, 1)),
        ("process_cpu_seconds_total 3\n", None),
        ("llamacpp:requests_processing NaN\n", None),
        ("llamacpp:requests_processing 1e300\n", ReportedLoad(2**31, 0)),
        ("", None),
    ],
)
def test_metrics_pages(text: str, expected: ReportedLoad | None) -> None:
    assert reported_load(text.encode(), "m") == expected


@given(page=st.binary(max_size=300))
def test_bytes_that_mean_nothing_are_not_known(page: bytes) -> None:
    assert listed_model(page, "m") in (None, ListedModel(False))
    assert reported_load(page, "m") is None


@given(
    headers=st.dictionaries(
        st.sampled_from(["retry-after", "retry-after-ms", "ratelimit-remaining", "ratelimit-reset"]), st.text(max_size=20), max_size=4
    )
)
def test_headers_of_any_kind_are_a_bounded_wait(headers: dict[str, str]) -> None:
    asked = retry_after_s(headers, NOW)
    assert asked is None or 0 <= asked <= MAX_WAIT_S
    assert 0 <= exhausted_s(headers) <= MAX_WAIT_S
