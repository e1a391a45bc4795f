"""Tests reading bytes of a foreign server's answer as events: the forms in which servers write them, cut anywhere."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.upstream.foreign import events as foreign_events
from headrace.gateway.upstream.foreign.events import DONE, MAX_EVENT_BYTES, EventFraming, Frame

pytestmark = pytest.mark.pure

ONE, TWO = b'{"a": [1, {"b": "x"}]}', b'{"a": [2]}'
PRETTY = json.dumps(json.loads(ONE), indent=2).encode()
WANTED = [(b"", ONE), (b"", TWO), (b"", DONE)]

STREAMS = {
    "as the standard has it": b"data: %b\n\ndata: %b\n\ndata: [DONE]\n\n",
    "returns and feeds": b"data: %b\r\n\r\ndata: %b\r\n\r\ndata: [DONE]\r\n\r\n",
    "returns": b"data: %b\r\rdata: %b\r\rdata: [DONE]\r\r",
    "line ends of all kinds": b"data: %b\r\n\ndata: %b\r\rdata: [DONE]\n\r",
    "no space": b"data:%b\n\ndata:%b\n\ndata:[DONE]\n\n",
    "more space": b"data:   %b  \n\n  data: %b\t\n\ndata:  [DONE]  \n\n",
    "no blank lines": b"data: %b\ndata: %b\ndata: [DONE]\n",
    "no last line end": b"data: %b\n\ndata: %b\n\ndata: [DONE]",
    "comments and other fields": b": ping\n\nid: 1\nretry: 5\ndata: %b\n\n:\ndata: %b\nid: 2\n\nfoo: bar\n\ndata: [DONE]\n\n",
    "events that say nothing": b"event: ping\ndata: {}\n\ndata: %b\n\ndata:\n\ndata\n\nevent: Ping\ndata:x\n\ndata: %b\n\ndata: [DONE]\n\n",
    "a name without data": b"event: ping\n\ndata: %b\n\nevent: error\n\ndata: %b\n\ndata: [DONE]\n\n",
    "data that says nothing": b'data: ping\n\ndata: %b\n\ndata: ""\n\ndata: "keep-alive"\n\ndata: %b\n\ndata: : ping\n\ndata: [DONE]\n\n',
    "comments within an event": b":\n:a\ndata: %b\n:\n: b\n\n:c\ndata: %b\n\n\n:\n\n:\n\n\n\ndata: [DONE]\n\n",
    "a byte order mark": b"\xef\xbb\xbfdata: %b\n\ndata: %b\n\ndata: [DONE]\n\n",
    "blank lines first": b"\n\r\n \ndata: %b\n\n\n\ndata: %b\n\n\n\ndata: [DONE]\n\n",
    "upper case": b"DATA: %b\n\nData : %b\n\nDATA: [DONE]\n\n",
    "an end in lower case": b"data: %b\n\ndata: %b\n\ndata: [done]\n\n",
    "an end in quotes": b'data: %b\n\ndata: %b\n\ndata: "[DONE]"\n\n',
    "wrapped twice": b"data: data: %b\n\n\n\ndata: data: %b\n\n\n\ndata: data: [DONE]\n\n\n\n",
    "bare lines": b"%b\n%b\n[DONE]\n",
    "bare lines at the end": b"data: %b\n\n%b\n\ndata: [DONE]\n\n",
}


def frames(*pieces: bytes, is_event_stream: bool = True) -> list[Frame]:
    framing = EventFraming(is_event_stream=is_event_stream)
    found = [frame for piece in pieces for frame in framing.push(piece)] + framing.end()
    assert not framing.fault
    return found


def cut(body: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(place for place in cuts if place < len(body)), len(body)]
    return [body[begin:end] for begin, end in pairwise(places)]


@pytest.mark.parametrize("name", STREAMS)
def test_every_form_of_a_stream_is_the_same_events_byte_by_byte(name: str) -> None:
    body = STREAMS[name] % (ONE, TWO)
    assert frames(*[body[place : place + 1] for place in range(len(body))]) == WANTED


@given(name=st.sampled_from(sorted(STREAMS)), cuts=st.lists(st.integers(0, 160), max_size=12))
def test_every_form_of_a_stream_is_the_same_events_wherever_it_is_cut(name: str, cuts: list[int]) -> None:
    body = STREAMS[name] % (ONE, TWO)
    assert frames(body) == WANTED
    assert frames(*cut(body, cuts)) == WANTED


@pytest.mark.parametrize("name", [name for name in STREAMS if name != "comments and other fields"])
def test_a_body_that_is_not_said_to_be_an_event_stream_is_read_as_one(name: str) -> None:
    assert frames(STREAMS[name] % (ONE, TWO), is_event_stream=False) == WANTED


@given(cuts=st.lists(st.integers(0, 160), max_size=12), end=st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_an_event_of_several_lines_is_one(cuts: list[int], end: bytes) -> None:
    lines = b"".join(b"data: %b%b" % (line, end) for line in PRETTY.split(b"\n"))
    found = frames(*cut(lines + end + b"data: [DONE]" + end + end, cuts))
    assert [json.loads(data) if data != DONE else DONE for _, data in found] == [json.loads(ONE), DONE]


@pytest.mark.parametrize("is_event_stream", [True, False])
@given(cuts=st.lists(st.integers(0, 160), max_size=12))
def test_a_document_over_several_lines_is_one_event(is_event_stream: bool, cuts: list[int]) -> None:
    body = b"\n " + PRETTY.replace(b"{\n", b"{\n\n") + b"\n"
    ((name, data),) = frames(*cut(body, cuts), is_event_stream=is_event_stream)
    assert (name, json.loads(data)) == (b"", json.loads(ONE))


@pytest.mark.parametrize("body", [PRETTY, ONE, b"\n: ping\n\n" + PRETTY.replace(b"\n", b"\n: ping\n") + b"\n"])
def test_a_body_that_is_one_document_is_told_from_lines_and_events(body: bytes) -> None:
    for sent, is_one in ((body, True), (ONE + b"\n" + body, False), (b"data: " + ONE + b"\n\n" + body, False), (b"data: {}\n\n", False)):
        framing = EventFraming(is_event_stream=False)
        found = framing.push(sent) + framing.end()
        assert framing.is_one_document == is_one
        assert json.loads(found[-1][1]) in (json.loads(ONE), {})


def test_an_event_has_its_name() -> None:
    assert frames(b"event: Error\ndata: {}\n\ndata: {}\n\n") == [(b"error", b"{}"), (b"", b"{}")]


def test_what_comes_before_a_fault_counts() -> None:
    framing = EventFraming(is_event_stream=False)
    assert framing.push(b"data: {}\n\n<html>\ndata: {}\n\n") == [(b"", b"{}")]
    assert framing.fault == "it is no event stream"


@pytest.mark.parametrize(
    ("begin", "line"),
    [
        *((begin, b"x" * 1000) for begin in (b"data: ", b": ", b"{", b"x: ")),
        (b"", b"data: x\n" * 1000),
        (b"", b"data: {\n" * 1000),
        (b"", b"data:" * 1000),
        (b"{", b"{\n" * 1000),
        (b"{", b"\n {\n}," * 1000),
    ],
)
def test_no_event_is_longer_than_its_bound(begin: bytes, line: bytes) -> None:
    framing, num_bytes = EventFraming(is_event_stream=True), len(begin)
    framing.push(begin)
    while not framing.fault:
        framing.push(line)
        num_bytes += len(line)
        assert num_bytes < 8 * MAX_EVENT_BYTES


def test_what_says_nothing_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_events, "MAX_EVENT_BYTES", 10_000)
    framing = EventFraming(is_event_stream=True)
    for line in (b": ping\n", b"id: 1\n", b"data:\n\n", b"event: ping\n", b"\n", b"foo\n"):
        assert not framing.push(line * 10_000)
    assert not framing.fault


@pytest.mark.parametrize("silence", [b"\n", b":\n", b": ping\n\n", b"\r\n", b": ping\n:\n\n\n"])
def test_a_run_of_blank_lines_and_comments_is_not_read_line_by_line(silence: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    framing, read_line, num_lines = EventFraming(is_event_stream=True), EventFraming._read_line, 0

    def count(self: EventFraming, line: bytes, found: list[Frame]) -> None:
        nonlocal num_lines
        num_lines += 1
        read_line(self, line, found)

    monkeypatch.setattr(EventFraming, "_read_line", count)
    assert framing.push(b"data: {}\n\n" + silence * 10_000 + b"data: {}\n\n") == [(b"", b"{}")] * 2
    assert num_lines < 10
