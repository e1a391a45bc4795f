"""Tests that spans say what a finished request says, in OTLP's JSON, and add up."""

from __future__ import annotations

import json
import re
from itertools import accumulate

import pytest
from finished import finished
from hypothesis import given
from hypothesis import strategies as st

from headrace.observe.finished_request import AnswerAttempt, AnswerHandling, Outcome
from headrace.observe.timeline import ADMIT
from headrace.observe.trace_context import TraceContext
from headrace.observe.traces import spans_of

pytestmark = pytest.mark.pure

TRACE = TraceContext("ab" * 16, "cd" * 8, "ef" * 8, state="a=1")
ANSWERED = {
    "outcome": Outcome.COMPLETED,
    "status": 200,
    "model": "tiny",
    "requested_model": "assistant",
    "stream": True,
    "finish_reasons": ("stop", "length"),
    "prompt_tokens": 7,
    "completion_tokens": 0,
    "ttft_s": 0.25,
    "time": 1_800_000_000.5,
    "latency_s": 1.5,
    "tenant": "acme",
    "replica": "r0",
}


def test_a_request_becomes_a_span_of_a_server() -> None:
    (span,) = spans_of(finished(**ANSWERED), TRACE)
    attributes = span.pop("attributes")
    assert span.pop("events") == []
    assert span == {
        "traceId": "ab" * 16,
        "spanId": "cd" * 8,
        "parentSpanId": "ef" * 8,
        "traceState": "a=1",
        "name": "chat tiny",
        "kind": 2,
        "startTimeUnixNano": "1800000000500000000",
        "endTimeUnixNano": "1800000002000000000",
    }
    assert {each["key"]: each["value"] for each in attributes} == {
        "gen_ai.operation.name": {"stringValue": "chat"},
        "gen_ai.provider.name": {"stringValue": "headrace"},
        "gen_ai.request.model": {"stringValue": "assistant"},
        "gen_ai.request.stream": {"boolValue": True},
        "gen_ai.response.finish_reasons": {"arrayValue": {"values": [{"stringValue": "stop"}, {"stringValue": "length"}]}},
        "gen_ai.response.time_to_first_chunk": {"doubleValue": 0.25},
        "gen_ai.usage.input_tokens": {"intValue": "7"},
        "gen_ai.usage.output_tokens": {"intValue": "0"},
        "http.request.method": {"stringValue": "POST"},
        "http.route": {"stringValue": "/v1/chat/completions"},
        "http.response.status_code": {"intValue": "200"},
        "headrace.request_id": {"stringValue": "abc"},
        "headrace.outcome": {"stringValue": "completed"},
        "headrace.tenant": {"stringValue": "acme"},
        "headrace.replica": {"stringValue": "r0"},
    }


@pytest.mark.parametrize(
    ("outcome", "error", "error_type", "is_fault"),
    [
        (Outcome.REFUSED, "invalid_value", "invalid_value", False),
        (Outcome.CANCELLED, None, "cancelled", False),
        (Outcome.DEADLINE, "timeout", "timeout", True),
        (Outcome.FAILED, None, "failed", True),
    ],
)
def test_only_a_fault_of_the_server_is_an_error_of_the_span(outcome: Outcome, error: str | None, error_type: str, is_fault: bool) -> None:
    (span,) = spans_of(finished(outcome=outcome, error=error, path="/v1/completions"), TRACE)
    assert {"key": "error.type", "value": {"stringValue": error_type}} in span["attributes"]
    assert span.get("status") == ({"code": 2} if is_fault else None)
    assert span["name"] == "text_completion"


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, float("inf"), float("nan")])
def test_a_number_that_otlp_cannot_hold_becomes_a_string(value: float) -> None:
    request = finished(**ANSWERED)
    (span,) = spans_of(request._replace(asked=request.asked._replace(seed=value)), TRACE)  # type: ignore[arg-type]
    assert {"key": "gen_ai.request.seed", "value": {"stringValue": str(value)}} in json.loads(json.dumps(span))["attributes"]


def test_an_attempt_is_an_event_at_its_time() -> None:
    request = finished(**ANSWERED)
    attempt = AnswerAttempt("r1", at=12.5, seconds=0.25, reason="it has the prompt's beginning", result="lost", detail="no detail is sent")
    answered = request.answered._replace(handling=AnswerHandling([attempt]))
    (span,) = spans_of(request._replace(arrival=request.arrival._replace(at=12.0), answered=answered), TRACE)
    (event,) = span["events"]
    assert event == {
        "timeUnixNano": "1800000001000000000",
        "name": "attempt",
        "attributes": [
            {"key": "headrace.replica", "value": {"stringValue": "r1"}},
            {"key": "headrace.attempt.result", "value": {"stringValue": "lost"}},
            {"key": "headrace.attempt.reason", "value": {"stringValue": "it has the prompt's beginning"}},
            {"key": "headrace.attempt.seconds", "value": {"doubleValue": 0.25}},
        ],
    }


@given(st.lists(st.floats(1e-4, 50), max_size=12))
def test_the_spans_of_stages_lie_in_the_requests_own_and_take_as_long_as_the_stages(lengths_s: list[float]) -> None:
    moments = list(accumulate(lengths_s, initial=3.0))
    entered = [(f"stage-{number}" if number else ADMIT, at) for number, at in enumerate(moments)]
    request = finished(**{**ANSWERED, "latency_s": moments[-1] - 3.0 + 0.5})._replace(entered=entered)
    root, *spans = spans_of(request, TRACE)
    assert [span["name"] for span in spans] == [stage.name for stage in request.stages]
    assert all((span["traceId"], span["parentSpanId"], span["kind"]) == (root["traceId"], root["spanId"], 1) for span in spans)
    assert len({span["spanId"] for span in spans} | {root["spanId"]}) == len(spans) + 1
    assert all(re.fullmatch("[0-9a-f]{16}", span["spanId"]) for span in spans)
    ends_ns = [int(root["startTimeUnixNano"])]
    for span, (_, _, seconds) in zip(spans, request.stages, strict=True):
        start_ns, end_ns = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
        assert ends_ns[-1] - 2 <= start_ns, "stages do not overlap, but for rounding"
        assert abs(end_ns - start_ns - seconds * 1e9) <= 1
        ends_ns.append(end_ns)
    assert ends_ns[-1] <= int(root["endTimeUnixNano"]) + 2
