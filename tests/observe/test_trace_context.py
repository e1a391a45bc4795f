"""Tests that a client's trace is continued where its headers keep W3C's rules, and that anything else begins a new trace."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.observe.trace_context import MAX_STATE_BYTES, TraceContext, trace_context

pytestmark = pytest.mark.pure

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


def read(parent: str | bytes, *states: bytes, has_spans: bool = True) -> TraceContext | None:
    value = parent if isinstance(parent, bytes) else parent.encode()
    return trace_context([(b"traceparent", value), *((b"tracestate", state) for state in states)], has_spans=has_spans)


@pytest.mark.parametrize(
    ("parent", "is_sampled"),
    [
        (PARENT, True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-02", False),
        (f"00-{TRACE}-{SPAN}-ff", True),
        (f"  {PARENT}\t", True),
        (f"01-{TRACE}-{SPAN}-01", True),
        (f"fe-{TRACE}-{SPAN}-01-of a later version", True),
    ],
)
def test_a_trace_is_continued(parent: str, is_sampled: bool) -> None:
    made = read(parent, b"a=1")
    assert made is not None
    assert made == TraceContext(TRACE, made.span_id, SPAN, is_sampled, "a=1")
    assert re.fullmatch("(?!0{16})[0-9a-f]{16}", made.span_id)
    assert made.span_id != SPAN
    assert made.headers() == {"traceparent": f"00-{TRACE}-{made.span_id}-0{is_sampled:d}", "tracestate": "a=1"}


BROKEN = [
    "",
    "00",
    PARENT[:-1],
    PARENT + "0",
    PARENT + "-00",
    PARENT.upper(),
    PARENT.replace("-", "_"),
    f"ff-{TRACE}-{SPAN}-01",
    f"0-{TRACE}-{SPAN}-01",
    f"01-{TRACE}-{SPAN}-01x",
    f"00-{'0' * 32}-{SPAN}-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"00-{TRACE[:-1]}-{SPAN}-01",
    f"00-{TRACE}-{SPAN}g-01",
    f"00-{TRACE}-{SPAN}-0g",
    f"00-{TRACE}\n-{SPAN}-01",
    PARENT + "\x00",
    b"\xff" * 55,
]


@pytest.mark.parametrize("parent", BROKEN)
def test_what_breaks_the_rules_begins_a_new_trace(parent: str | bytes) -> None:
    made = read(parent, b"a=1")
    assert made is not None
    assert (made.parent_id, made.is_sampled, made.state) == ("", True, "")
    assert re.fullmatch("(?!0{32})[0-9a-f]{32}", made.trace_id)
    assert made.trace_id != TRACE
    assert read(parent, b"a=1", has_spans=False) is None


def test_a_header_that_is_sent_twice_names_no_trace() -> None:
    assert trace_context([(b"traceparent", PARENT.encode())] * 2, has_spans=False) is None


@given(st.binary(max_size=80))
def test_no_bytes_break_it(parent: bytes) -> None:
    made = read(parent, parent)
    assert made is not None
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]", made.headers()["traceparent"])


@pytest.mark.parametrize(
    ("states", "kept"),
    [
        ([b"a=1"], "a=1"),
        ([b"a=1", b"b@c=2 3"], "a=1,b@c=2 3"),
        ([b" a=1 ,, b=2 "], "a=1,b=2"),
        ([b"a=" + b"x" * 200 + b",b=" + b"y" * 200], "a=" + "x" * 200 + ",b=" + "y" * 200),
        ([b"a=1,b=" + b"x" * MAX_STATE_BYTES], ""),
        ([b"a=" + b"x" * 250, b"b=" + b"x" * 250, b"c=" + b"x" * 250], ""),
        ([b",".join(b"k%d=1" % number for number in range(33))], ""),
        ([b"a=1,A=2"], ""),
        ([b"a"], ""),
        ([b"a=1=2"], ""),
        ([b"a=\x01"], ""),
        ([b"a=\xe9"], ""),
        ([b"a=1\r\nx-evil: 1"], ""),
        ([], ""),
    ],
)
def test_a_state_is_passed_on_whole_or_not_at_all(states: list[bytes], kept: str) -> None:
    made = read(PARENT, *states)
    assert made is not None
    assert made.state == kept
    assert ("tracestate" in made.headers()) == bool(kept)


def test_without_spans_of_its_own_a_gateway_passes_on_what_came() -> None:
    made = read(PARENT, b"a=1", has_spans=False)
    assert made is not None
    assert made.headers() == {"traceparent": PARENT, "tracestate": "a=1"}
