"""Tests that pieces of a foreign server's answer become calls, text, reasoning and ends, and that malformed fields are left out."""

from __future__ import annotations

import json
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.update import FinishReason
from headrace.gateway.upstream.foreign.answer import ForeignAnswer
from headrace.gateway.upstream.foreign.chunk import TokenDetails, UsageCounts
from headrace.gateway.upstream.foreign.errors import BrokenStream, ErrorKind, sent_error
from headrace.gateway.upstream.foreign.tool_calls import MAX_CALLS
from headrace.gateway.upstream.seam import OutputEvent, TokenUsage, ToolCall
from headrace.policy.limits.price import MAX_PRICE, Price

pytestmark = pytest.mark.pure

Chunk = dict[str, Any]

DONE = None
"""Stands for [DONE] among chunks."""


class Read(NamedTuple):
    """All that an answer of one sequence said."""

    events: list[OutputEvent]
    usage: TokenUsage
    left_out: dict[str, int]

    @property
    def whole(self) -> OutputEvent:
        return OutputEvent.joined(self.events)

    @property
    def pieces(self) -> list[ToolCall]:
        return [call for event in self.events for call in event.tool_calls]

    @property
    def calls(self) -> list[tuple[str | None, str | None, str]]:
        """Id, name and arguments of each call, in order."""
        pieces = sorted(self.pieces, key=lambda call: call.number)
        joined = [ToolCall.joined(list(found)) for _, found in groupby(pieces, key=lambda call: call.number)]
        return [(call.call_id, call.name, call.arguments) for call in joined]

    @property
    def functions(self) -> list[tuple[str | None, str]]:
        return [(name, arguments) for _, name, arguments in self.calls]


def read(*chunks: Chunk | bytes | None, num_sequences: int = 1, is_document: bool = False) -> Read:
    """is_document: the body was one JSON text. Raises BrokenStream."""
    answer, events = ForeignAnswer(range(num_sequences), "key"), list[OutputEvent]()
    for chunk in chunks:
        if chunk is None:
            answer.end(events, is_marked=True)
            break
        answer.read(chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode("utf-8", "surrogatepass"), events)
    else:
        answer.end(events, is_marked=False, is_document=is_document)
    return Read(events, answer.usage, {field.value: count for field, count in answer.left_out.items()})


def delta(finish: Any = None, **fields: Any) -> Chunk:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def call(name: Any = None, arguments: Any = None, **fields: Any) -> Chunk:
    """A piece of a call, without what is not given."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {"type": "function", "function": function, **fields}


def calls(*pieces: Any, finish: Any = None) -> Chunk:
    return delta(finish, tool_calls=list(pieces))


def counted(prompt: Any = 7, completion: Any = 3, **more: Any) -> Chunk:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **more}}


STOP = delta("stop")
CALLED = delta("tool_calls")
OSLO, BERGEN = '{"city": "Oslo"}', '{"city": "Bergen"}'

# -- calls ---------------------------------------------------------------------------------------------------------------------------

TWO = [("weather", OSLO), ("weather", BERGEN)]
PARALLEL: dict[str, list[Chunk]] = {
    "one index, empty ids": [calls(call("weather", OSLO, index=0, id="")), calls(call("weather", BERGEN, index=0, id=""))],
    "one index, null ids": [calls(call("weather", OSLO, index=0, id=None)), calls(call("weather", BERGEN, index=0, id=None))],
    "no index, no id, one list": [calls(call("weather", OSLO), call("weather", BERGEN))],
    "no index, no id, two lists": [calls(call("weather", OSLO)), calls(call("weather", BERGEN))],
    "no index, no id, in pieces": [
        *(calls(call("weather", "")), calls(call(None, OSLO[:5])), calls(call(None, OSLO[5:]))),
        *(calls(call("weather", "")), calls(call(None, BERGEN[:9])), calls(call(None, BERGEN[9:]))),
    ],
    "negative indices": [calls(call("weather", OSLO, index=-1), call("weather", BERGEN, index=-1))],
    "indices as texts": [calls(call("weather", OSLO, index="0"), call("weather", BERGEN, index="1"))],
    "indices as fractions": [calls(call("weather", OSLO, index=0.0)), calls(call("weather", BERGEN, index=1.0))],
    "huge indices": [calls(call("weather", OSLO, index=10**30)), calls(call("weather", BERGEN, index=10**30 + 1))],
    "indices that are none": [calls(call("weather", OSLO, index="first"), call("weather", BERGEN, index={}))],
    "one id for all": [calls(call("weather", OSLO, index=0, id="c")), calls(call("weather", BERGEN, index=1, id="c"))],
    "one id and one index for all": [calls(call("weather", OSLO, index=0, id="c"), call("weather", BERGEN, index=0, id="c"))],
    "one index, pieces in turn by id": [
        *(calls(call("weather", OSLO[:4], index=0, id="a")), calls(call("weather", BERGEN[:4], index=0, id="b"))),
        *(calls(call(None, OSLO[4:], index=0, id="a")), calls(call(None, BERGEN[4:], index=0, id="b"))),
    ],
    "one index, pieces in turn by id, each with its name": [
        *(calls(call("weather", OSLO[:4], index=0, id="a")), calls(call("weather", BERGEN[:4], index=0, id="b"))),
        *(calls(call("weather", OSLO[4:], index=0, id="a")), calls(call("weather", BERGEN[4:], index=0, id="b"))),
    ],
    "again in the last piece, without ids": [
        *(calls(call("weather", OSLO[:4], index=0)), calls(call(None, OSLO[4:], index=0)), calls(call("weather", BERGEN, index=1))),
        calls(call("weather", OSLO, index=0), call("weather", BERGEN, index=1)),
    ],
    "ids alone, pieces in turn": [
        *(calls(call("weather", OSLO[:4], id="a")), calls(call("weather", BERGEN[:4], id="b"))),
        *(calls(call(None, OSLO[4:], id="a")), calls(call(None, BERGEN[4:], id="b"))),
    ],
    "in a message": [{"choices": [{"message": {"tool_calls": [call("weather", OSLO), call("weather", BERGEN)]}}]}],
    "numbered in an object": [delta(tool_calls={"1": call("weather", OSLO), "2": call("weather", BERGEN)})],
    "in parts of the content": [
        delta(content=[{"type": "tool_use", "id": each, "name": "weather", "input": {"city": each}} for each in ("Oslo", "Bergen")]),
    ],
    "arguments under other names": [calls({"name": "weather", "input": {"city": "Oslo"}}, call("weather") | {"parameters": BERGEN})],
    "arguments under another name in the function": [
        calls({"function": {"name": "weather", "parameters": json.loads(each)}}) for each in (OSLO, BERGEN)
    ],
    "arguments as objects": [calls(call("weather", {"city": "Oslo"}), call("weather", {"city": "Bergen"}))],
    "name and arguments beside the function": [calls({"name": "weather", "arguments": OSLO}, {"name": "weather", "arguments": BERGEN})],
}


@pytest.mark.parametrize("name", PARALLEL)
def test_parallel_calls_stay_apart_and_each_has_an_id_of_its_own(name: str) -> None:
    found = read(*PARALLEL[name], CALLED, counted(), DONE)
    assert found.functions == TWO
    ids = [call_id for call_id, _, _ in found.calls]
    assert all(ids)
    assert len(set(ids)) == 2


SINGLE: dict[str, list[Chunk]] = {
    "name and id in every piece": [calls(call("weather", part, index=0, id="c")) for part in ("", OSLO[:3], OSLO[3:], "")],
    "name in every piece": [calls(call("weather", part)) for part in (OSLO[:3], OSLO[3:8], OSLO[8:], "")],
    "a further id in every piece": [
        calls(call("weather" if number == 0 else None, part, index=0, id=f"c{number}")) for number, part in enumerate((OSLO[:3], OSLO[3:]))
    ],
    "the id comes later": [calls(call("weather", OSLO[:3], index=0)), calls(call("weather", OSLO[3:], index=0, id="c"))],
    "the name comes later": [calls(call(None, OSLO[:3], index=0, id="c")), calls(call("weather", OSLO[3:], index=0))],
    "the index comes in the first piece alone": [calls(call("weather", OSLO[:3], index=0, id="c")), calls(call(None, OSLO[3:]))],
    "a further index for each piece": [calls(call("weather", OSLO[:3], index=0)), calls(call(None, OSLO[3:], index=1))],
    "the older form": [delta(function_call={"name": "weather", "arguments": OSLO[:3]}), delta(function_call={"arguments": OSLO[3:]})],
    "both forms": [delta(function_call={"name": "weather", "arguments": OSLO}, tool_calls=[call("weather", OSLO, index=0)])],
    "no list": [delta(tool_calls=call("weather", OSLO, index=None))],
    "an empty piece at the end": [calls(call("weather", OSLO, index=0, id="c")), calls({}), calls(call("", "", index=0, id=""))],
    "the whole call twice": [calls(call("weather", OSLO, index=0, id="c"))] * 2,
    "in pieces, and the whole call once more": [
        *(calls(call("weather", OSLO[:4], index=0, id="c")), calls(call(None, OSLO[4:], index=0))),
        calls(call("weather", OSLO, index=0, id="c")),
    ],
    "a name in pieces": [
        *(calls(call("wea", "", index=0, id="c")), calls(call("th", index=0)), calls(call("er", "", index=0, id="c"))),
        *(calls(call(None, OSLO[:4], index=0)), calls(call(None, OSLO[4:], index=0))),
    ],
    "a name that grows": [calls(call(name, "", index=0, id="c")) for name in ("wea", "weath", "weather", "weather")]
    + [calls(call(None, OSLO, index=0))],
    "JSON text in a string": [calls(call("weather", json.dumps(OSLO), index=0, id="c"))],
    "JSON text in a string, in pieces": [
        calls(call(None if at else "weather", json.dumps(OSLO)[at : at + 3], index=0)) for at in range(0, len(json.dumps(OSLO)), 3)
    ],
    "again in a part of the content": [
        delta(content=[{"type": "tool_use", "name": "weather", "input": {}}], tool_calls=[call("weather", OSLO, index=0, id="c")]),
    ],
    "again in a message": [
        calls(call("weather", OSLO, id="c")),
        {"choices": [{"message": {"tool_calls": [call("weather", OSLO, id="c")]}}]},
    ],
    "no arguments, then the real ones": [
        *(calls(call("weather", "{}", index=0, id="c")), calls(call(None, OSLO[:3], index=0)), calls(call(None, OSLO[3:], index=0))),
    ],
    "an id that is a number": [calls(call("weather", OSLO, index=0, id=17))],
}


@pytest.mark.parametrize("name", SINGLE)
def test_pieces_of_one_call_stay_together_and_name_it_once(name: str) -> None:
    found = read(*SINGLE[name], CALLED, DONE)
    assert found.functions == [("weather", OSLO)]
    assert len([piece for piece in found.pieces if piece.call_id]) == 1, "clients may join the ids of pieces"
    assert len([piece for piece in found.pieces if piece.name]) == 1, "and their names"
    assert found.pieces[0].call_id, "the id comes first"


ARGUMENTS = st.dictionaries(st.text(max_size=4), st.text('a"\\{}[],: ', max_size=8) | st.lists(st.integers(), max_size=2), max_size=3).map(
    json.dumps
)


@given(first=ARGUMENTS, second=ARGUMENTS, cuts=st.lists(st.integers(0, 30), max_size=6), is_named=st.booleans())
def test_calls_without_index_and_id_are_told_apart_by_their_arguments_alone(
    first: str, second: str, cuts: list[int], is_named: bool
) -> None:
    chunks = []
    for arguments in (first, second):
        places = [0, *sorted(cut for cut in cuts if cut < len(arguments)), len(arguments)]
        parts = [arguments[begin:end] for begin, end in pairwise(places)]
        chunks += [calls(call("weather" if is_named or number == 0 else None, part)) for number, part in enumerate(parts)]
    assert read(*chunks, CALLED, DONE).functions == [("weather", first), ("weather", second)]


@pytest.mark.parametrize("arguments", [None, "", " ", {}, [], "{}", "null", " null", "None", '""', '"{}"'])
def test_a_call_without_arguments_has_an_empty_object(arguments: Any) -> None:
    ((_, name, found),) = read(calls(call("now", arguments, index=0, id="c")), CALLED, DONE).calls
    assert (name, found.strip()) == ("now", "{}")


@pytest.mark.parametrize(("finish", "stop_reason"), [("length", None), ("stop", "</s>")])
def test_a_call_that_was_cut_off_is_given_as_it_is(finish: str, stop_reason: str | None) -> None:
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": finish, "stop_reason": stop_reason}]}
    for arguments in ("", OSLO[:5]):
        found = read(calls(call("weather", arguments, index=0, id="c")), end, DONE)
        assert found.functions == [("weather", arguments)]
        assert found.whole.is_call_cut == (finish == "stop")
    found = read(calls(call("weather", OSLO, index=0, id="c")), end, DONE)
    assert not found.whole.is_call_cut, "its arguments are complete"


def test_calls_that_share_an_index_and_say_the_same_without_ids_are_two_calls() -> None:
    found = read(calls(call("roll", '{"sides": 6}', index=0)), calls(call("roll", '{"sides": 6}', index=0)), CALLED, DONE)
    assert found.functions == [("roll", '{"sides": 6}')] * 2


def test_names_of_calls_without_arguments_are_joined_only_where_ids_show_that_they_are_one() -> None:
    now, today = call("now", "", index=0), call("today", "", index=0)
    assert read(calls(now), calls(today), CALLED, DONE).functions == [("now", "{}"), ("today", "{}")]
    assert read(calls(now | {"id": "a"}), calls(today | {"id": "b"}), CALLED, DONE).functions == [("now", "{}"), ("today", "{}")]
    assert read(calls(now | {"id": "a"}, today), CALLED, DONE).functions == [("now", "{}"), ("today", "{}")]


def test_a_call_whose_name_waits_counts_as_output() -> None:
    with pytest.raises(BrokenStream, match="after its end"):
        read(STOP, counted(), calls(call("now", "", index=0, id="a")), DONE)
    assert read(calls(call("now", "", index=0, id="a")), CALLED, DONE).usage.completion_tokens == 1


@given(text=ARGUMENTS, cuts=st.lists(st.integers(0, 60), max_size=6))
def test_json_text_in_a_string_is_its_text_wherever_it_is_cut(text: str, cuts: list[int]) -> None:
    quoted = json.dumps(text)
    places = [0, *sorted(cut for cut in cuts if cut < len(quoted)), len(quoted)]
    chunks = [calls(call("weather", quoted[begin:end], index=0, id="c")) for begin, end in pairwise(places)]
    ((_, found),) = read(*chunks, CALLED, DONE).functions
    assert json.loads(found) == json.loads(text)


@pytest.mark.parametrize("arguments", ['"Oslo"', '"{Oslo}"', "nothing", '"' + "x" * 9000 + '"', '"  ', '"{\\"a', '"[1]"', "5"])
def test_arguments_that_hold_no_object_are_given_as_they_are(arguments: str) -> None:
    for size in (1, 7, len(arguments)):
        chunks = [calls(call(None if at else "weather", arguments[at : at + size], index=0)) for at in range(0, len(arguments), size)]
        ((_, found),) = read(*chunks, delta("length"), DONE).functions
        assert found == ('{"a' if arguments == '"{\\"a' else arguments)


def test_ids_differ_between_the_sequences_of_an_answer() -> None:
    choices = [{"index": index, "delta": {"tool_calls": [call("weather", OSLO)]}, "finish_reason": "tool_calls"} for index in range(3)]
    found = read({"choices": choices}, DONE, num_sequences=3)
    assert len({piece.call_id for piece in found.pieces if piece.call_id}) == 3


@pytest.mark.parametrize(
    "piece",
    [call(None, OSLO, id="c"), call(7, OSLO), call("weather", 7), call("weather", True), {"function": "weather"}, "weather", [7]],
)
def test_a_call_that_cannot_be_read_breaks_the_answer(piece: Any) -> None:
    with pytest.raises(BrokenStream):
        read(calls(piece), CALLED, counted(), DONE)


def test_calls_are_bounded() -> None:
    with pytest.raises(BrokenStream, match=str(MAX_CALLS)):
        read(*[calls(call("weather", OSLO, index=number)) for number in range(MAX_CALLS + 1)], CALLED, DONE)
    with pytest.raises(BrokenStream, match=str(MAX_CALLS)):
        read(*[calls(call("weather" if not number else None, "{", index=number)) for number in range(MAX_CALLS + 1)], CALLED, DONE)


# -- text and reasoning --------------------------------------------------------------------------------------------------------------

THOUGHT = [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}]
TEXTS: dict[str, tuple[list[Chunk], str, str]] = {
    "text parts": ([delta(content=[{"type": "text", "text": "Hel"}]), delta(content=[{"type": "output_text", "text": "lo"}])], "Hello", ""),
    "strings": ([delta(content=["Hel", "lo"])], "Hello", ""),
    "one part": ([delta(content={"type": "text", "text": "Hello"})], "Hello", ""),
    "a part without a type": ([delta(content=[{"text": "Hello"}])], "Hello", ""),
    "a part without text": ([delta(content=[{"type": "text", "text": None}, {"type": "text"}, None]), delta(content="Hello")], "Hello", ""),
    "a part in a part": ([delta(content=[{"type": "text", "text": {"value": "Hello", "annotations": []}}])], "Hello", ""),
    "an unknown part": ([delta(content=[{"type": "reference", "reference_ids": [1]}, "Hello"])], "Hello", ""),
    "thinking, then text": ([delta(content=THOUGHT), delta(content="Hello")], "Hello", "Hm."),
    "thinking and text": ([delta(content=[*THOUGHT, {"type": "text", "text": "Hello"}])], "Hello", "Hm."),
    "thinking as text": ([delta(content=[{"type": "thinking", "thinking": "Hm."}, "Hello"])], "Hello", "Hm."),
    "reasoning part": (
        [delta(content=[{"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}, "Hello"])],
        "Hello",
        "Hm.",
    ),
    "a refusal part": ([delta(content=[{"type": "refusal", "refusal": "Hello"}])], "Hello", ""),
    "a refusal": ([delta(content=None, refusal="Hello")], "Hello", ""),
    "no refusal": ([delta(content="Hello", refusal=False)], "Hello", ""),
    "null": ([delta(content=None), delta(content="Hello")], "Hello", ""),
    "a completion": ([{"choices": [{"text": "Hello", "index": 0}]}], "Hello", ""),
    "a whole answer": ([{"choices": [{"message": {"role": "assistant", "content": "Hello", "reasoning": "Hm."}}]}], "Hello", "Hm."),
    "one choice without a list": ([{"choices": {"delta": {"content": "Hello"}}}], "Hello", ""),
    "choices that are null": ([{"choices": None}, {"choices": [None]}, delta(content="Hello")], "Hello", ""),
    "messages in place of deltas": ([{"choices": [{"message": {"content": part}}]} for part in ("Hel", "lo")], "Hello", ""),
    "messages that repeat deltas": (
        [
            {"choices": [{"delta": {"content": part}, "message": {"content": all}}]}
            for part, all in (("Hel", "Hel"), ("lo", "Hello"), ("", "Hello"))
        ],
        "Hello",
        "",
    ),
    "a last message that repeats deltas": (
        [delta(content="Hel"), delta(content="lo"), {"choices": [{"message": {"content": "Hello"}}]}],
        "Hello",
        "",
    ),
    "a message beside an empty delta": ([{"choices": [{"delta": {}, "message": {"content": "Hello"}}]}], "Hello", ""),
    "both names of reasoning": ([delta(reasoning="Hm.", reasoning_content="Hm."), delta(content="Hello")], "Hello", "Hm."),
    "thinking beside the content": ([delta(thinking="Hm."), delta(content="Hello")], "Hello", "Hm."),
    "reasoning as parts": ([delta(reasoning=[{"type": "text", "text": "Hm."}]), delta(content="Hello")], "Hello", "Hm."),
    "reasoning as an object": ([delta(reasoning={"content": "Hm."}), delta(content="Hello")], "Hello", "Hm."),
    "details alone": (
        [delta(content="", reasoning_details=[{"type": "reasoning.text", "text": "Hm."}]), delta(content="Hello")],
        "Hello",
        "Hm.",
    ),
    "reasoning and its details": (
        [delta(reasoning="Hm.", reasoning_details=[{"type": "reasoning.text", "text": "Hm."}]), delta(content="Hello")],
        "Hello",
        "Hm.",
    ),
    "encrypted reasoning": ([delta(reasoning_details=[{"type": "reasoning.encrypted", "data": "x"}]), delta(content="Hello")], "Hello", ""),
    "false": ([delta(content=False), delta(content="Hello")], "Hello", ""),
    "a part of an unknown type with a text": (
        [delta(content=[{"type": "markdown", "text": "Hel"}, {"type": "lo", "text": "lo"}])],
        "Hello",
        "",
    ),
    "a part of Gemini's that is a thought": ([delta(content=[{"text": "Hm.", "thought": True}, {"text": "Hello"}])], "Hello", "Hm."),
    "a part that is a piece of reasoning": ([delta(content=[{"type": "reasoning_delta", "text": "Hm."}, "Hello"])], "Hello", "Hm."),
    "a thinking part without a type": ([delta(content=[{"thinking": "Hm."}, {"content": "Hello"}])], "Hello", "Hm."),
    "a content of the choice itself": ([{"choices": [{"content": "Hello"}]}], "Hello", ""),
    "a last message that says more": ([delta(content="Hel"), {"choices": [{"message": {"content": "Hello"}}]}], "Hello", ""),
    "a last message that says more, twice": (
        [delta(content="Hel", reasoning="H"), *[{"choices": [{"message": {"content": "Hello", "reasoning": "Hm."}}]}] * 2],
        "Hello",
        "Hm.",
    ),
    "a last message that says something else": ([delta(content="Hello"), {"choices": [{"message": {"content": "Bye-bye"}}]}], "Hello", ""),
    "a list of several chunks": ([[delta(content="Hel"), None, delta(content="lo")]], "Hello", ""),  # type: ignore[list-item]
    "several chunks on one line": ([json.dumps(delta(content=part)).encode() * 2 for part in "ab"], "aabb", ""),  # type: ignore[misc]
    "a list of one chunk": ([delta(content="Hel"), [delta(content="lo")]], "Hello", ""),  # type: ignore[list-item]
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_and_reasoning_are_read_in_every_form_that_has_one_reading(name: str) -> None:
    chunks, text, reasoning = TEXTS[name]
    found = read(*chunks, STOP, counted(), DONE).whole
    assert (found.text, found.reasoning, found.finish) == (text, reasoning, FinishReason.STOP)


@pytest.mark.parametrize(
    "content",
    [
        *(5, 1.5, True, [5], [[]], {"type": "text", "text": 5}, [{"type": "text", "text": ["a", 5, {}], "x": 1}, 7]),
        *({"answer": 42}, {"summary": "x", "title": "y"}, {"type": "invoice", "total": 5}, [{"answer": 42}], {"type": 5, "x": 1}),
    ],
)
def test_a_content_that_is_no_text_breaks_the_answer(content: Any) -> None:
    with pytest.raises(BrokenStream, match="content"):
        read(delta(content=content), STOP, counted(), DONE)


@pytest.mark.parametrize("choices", ["x", 5, [5], ["x"], [[]], [{"delta": "x"}], [{"delta": 5}], [{"message": 5}]])
def test_choices_that_cannot_be_read_break_the_answer(choices: Any) -> None:
    with pytest.raises(BrokenStream):
        read({"choices": choices}, STOP, counted(), DONE)


GRIN = "\U0001f600"
SPLIT: dict[str, tuple[str, str]] = {"surrogates": ("a\ud83d", "\ude00b"), "bytes": ("a\udcf0\udc9f", "\udc98\udc80b")}


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("field", ["content", "reasoning_content", "arguments"])
def test_a_character_that_was_split_over_two_pieces_is_joined(name: str, field: str) -> None:
    def written(part: str) -> bytes:
        """The chunk with its text as a server of this kind writes it."""
        chunk = calls(call("weather" if part[0] == "a" else None, part, index=0)) if field == "arguments" else delta(**{field: part})
        return json.dumps(chunk, ensure_ascii=name == "surrogates").encode("utf-8", "surrogateescape")

    found = read(*map(written, SPLIT[name]), STOP, DONE)
    event = found.whole
    text = found.functions[0][1] if field == "arguments" else event.text or event.reasoning
    assert text == f"a{GRIN}b"


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        (b'{"choices": [{"delta": {"content": "caf\xe9"}}]}', "caf\ufffd"),
        (b'{"choices": [{"delta": {"content": "a\\ud83d b"}}]}', "a\ufffd b"),
        (b'{"choices": [{"delta": {"content": "a\\ude00"}}]}', "a\ufffd"),
        (b'{"choices": [{"delta": {"content": "a\\ud83d"}}]}', "a\ufffd"),
        (b'{"choices": [{"delta": {"content": "a\tb"}}]}', "a\tb"),
        (b'{"choices": [{"delta": {"content": "a", "content": "b"}}]}', "b"),
        (b'{"model": "\xff", "created": NaN, "choices": [{"delta": {"content": "a"}}]}', "a"),
        (b'{"id": "\\ud83d", "choices": [{"delta": {"content": "a"}}]}', "a"),
        (b'{"created": %b, "choices": [{"delta": {"content": "a"}}]}' % (b"9" * 6000), "a"),
        (b'{"usage": {"prompt_tokens": %b}, "choices": [{"delta": {"content": "a"}}]}' % (b"9" * 6000), "a"),
    ],
)
def test_json_that_is_not_quite_json_is_read(sent: bytes, shown: str) -> None:
    found = read(sent, STOP, DONE).whole
    assert found.text == shown
    found.text.encode()


# -- ends ----------------------------------------------------------------------------------------------------------------------------

STOP_WORDS = (
    "stop eos eos_token stop_sequence end end_turn normal completed complete done finish STOP FinishReason.STOP FINISH_REASON_STOP endTurn"
)
LENGTH_WORDS = (
    "length max_tokens MAX_TOKENS maxTokens model_length max_length token_limit max_output_tokens Length model_context_window_exceeded"
)
FILTER_WORDS = "content_filter SAFETY RECITATION blocked PROHIBITED_CONTENT refusal content-filter sensitive"
FAILURE_WORDS = (
    "error abort aborted cancelled canceled network_error timeout failed ERROR insufficient_system_resource MALFORMED_FUNCTION_CALL"
)
LENGTH_VARIANTS = (
    "limit max_output maxPredictedTokensReached contextLengthReached max_time context_exceeded output_length MAX_TOKEN_REACHED"
    " exceeded_max_tokens length_exceeded truncation max_new_token token_limit_exceeded ResponseTruncated budget_exceeded"
)
FILTER_VARIANTS = "content_filter_triggered CONTENT-FILTERED-BY-POLICY blocked_by_safety prohibited recitation_check refused MODERATED"
FAILURE_VARIANTS = (
    "model_error malformed_model_output malformed_tool_use unexpected_tool_call rejected killed preempted userStopped modelUnloaded"
    " timed-out rate_limit rate_limit_exceeded invalid_request bad_request service_unavailable upstream_error generation_error"
    " request_aborted client_disconnect unfinished quota_exceeded unload ERROR_UNKNOWN server_overload abort:client engine_error"
    " insufficient_quota terminated interruption cancellation expired content_filter_error incomplete_response FinishReason.REQUEST_TIMEOUT"
)
CALL_WORDS = "tool_calls function_call tool_use tool_call TOOL_CALLS tool-calls"


@pytest.mark.parametrize(
    ("word", "finish", "is_filtered"),
    [
        *((word, FinishReason.STOP, False) for word in (STOP_WORDS + " " + CALL_WORDS).split()),
        *((word, FinishReason.LENGTH, False) for word in (LENGTH_WORDS + " " + LENGTH_VARIANTS).split()),
        *((word, FinishReason.STOP, True) for word in (FILTER_WORDS + " " + FILTER_VARIANTS).split()),
        ({"type": "stop", "matched": 2}, FinishReason.STOP, False),
        ({"type": "length", "length": 5}, FinishReason.LENGTH, False),
        (["stop"], FinishReason.STOP, False),
    ],
)
def test_known_words_for_an_end_are_one_of_ours_without_any_other_sign(word: Any, finish: FinishReason, is_filtered: bool) -> None:
    found = read(delta(content="Hello"), delta(word)).whole
    assert (found.text, found.finish, found.stop_reason, found.is_filtered) == ("Hello", finish, None, is_filtered)


@pytest.mark.parametrize("word", (FAILURE_WORDS + " " + FAILURE_VARIANTS).split())
def test_a_word_of_failure_breaks_the_answer_whatever_follows(word: str) -> None:
    with pytest.raises(BrokenStream):
        read(delta(content="Hello"), delta(word), counted(), DONE)


@pytest.mark.parametrize("word", ["no-such-word", "OTHER", "unknown", 7, True, "x" * 1000, "\u505c\u6b62"])
@pytest.mark.parametrize("sign", ["done", "usage", "usage beside it", "usage beside output", "a whole answer", "nothing"])
def test_an_unknown_word_is_an_end_where_the_server_shows_in_another_way_that_it_ended_regularly(word: Any, sign: str) -> None:
    chunks: list[Chunk | None] = [delta(content="Hello"), delta(word)]
    match sign:
        case "done":
            chunks += [DONE]
        case "usage":
            chunks += [counted()]
        case "usage beside it":
            chunks = [delta(content="Hello"), delta(word) | {"usage": {"prompt_tokens": 7}}]
        case "a whole answer":
            chunks = [{"choices": [{"message": {"content": "Hello"}, "finish_reason": word}]}]
            with pytest.raises(BrokenStream):
                read(*chunks)  # it may be the first line of several
        case "usage beside output":
            chunks = [delta(word, content=part) | {"usage": {"prompt_tokens": 7}} for part in ("Hel", "lo")]
            with pytest.raises(BrokenStream):
                read(*chunks)  # each piece says so
            return
        case _:
            with pytest.raises(BrokenStream):
                read(*chunks)
            return
    found = read(*chunks, is_document=sign == "a whole answer").whole
    shown = word if isinstance(word, str) else json.dumps(word)
    assert (found.text, found.finish, found.stop_reason) == ("Hello", FinishReason.STOP, shown[:64])


@pytest.mark.parametrize("word", [None, "", "null", "None", "FINISH_REASON_UNSPECIFIED", False, "in_progress"])
def test_an_end_that_is_never_named_is_none_whatever_follows(word: Any) -> None:
    """Gateways between a server and us count tokens and write [DONE] where that server broke off."""
    chunks = [delta(word, content="Hel"), delta(word, content="lo"), delta(word)]
    for rest in ([counted(), DONE], [counted()], [DONE], []):
        with pytest.raises(BrokenStream):
            read(*chunks, *rest)
    with pytest.raises(BrokenStream):
        read(*[chunk | {"usage": {"prompt_tokens": 7}} for chunk in chunks], DONE)
    with pytest.raises(BrokenStream):
        read({"choices": [{"message": {"content": "Hel"}, "finish_reason": word}], "usage": {"prompt_tokens": 7}}, is_document=True)


@pytest.mark.parametrize("finish", ["stop", "length", "no-such-word"])
def test_an_end_is_read_wherever_it_stands(finish: str) -> None:
    expected = read(delta(content="Hello"), delta(finish), DONE).whole
    for chunk in (
        {"choices": [{"delta": {"finish_reason": finish}}]},
        {"choices": [{"delta": {}, "message": {"content": "Hello", "finish_reason": finish}}]},
        {"choices": [{"delta": {}}], "finish_reason": finish},
        {"choices": [], "finish_reason": finish},
    ):
        found = read(delta(content="Hello"), chunk, DONE).whole
        assert (found.text, found.finish, found.stop_reason) == ("Hello", expected.finish, expected.stop_reason)


def test_a_server_that_names_an_end_in_every_piece_has_ended_where_it_says_so_otherwise() -> None:
    chunks = [delta("stop", content=part) | {"usage": {"prompt_tokens": 7}} for part in ("one ", "two ", "three")]
    assert read(*chunks, DONE).whole.text == "one two three"
    assert read(*chunks, counted()).whole.text == "one two three"
    with pytest.raises(BrokenStream):
        read(*chunks)


def test_output_behind_an_end_that_was_given_is_never_lost_silently() -> None:
    with pytest.raises(BrokenStream):
        read(delta(content="one"), STOP, counted(), delta(content="two"), DONE)


@pytest.mark.parametrize(
    ("words", "finish", "stop_reason"),
    [
        (("stop", "stop"), FinishReason.STOP, None),
        (("stop", "strange"), FinishReason.STOP, None),
        (("strange", "length"), FinishReason.LENGTH, None),
    ],
)
def test_an_end_named_twice_is_one_end(words: tuple[str, str], finish: FinishReason, stop_reason: str | None) -> None:
    found = read(delta(content="Hello"), *[delta(word) for word in words], DONE)
    assert [(event.finish, event.stop_reason) for event in found.events if event.finish] == [(finish, stop_reason)]


@pytest.mark.parametrize("word", ["stop", "STOP", "tool_calls", "function_call", "end_turn", "strange"])
def test_calls_with_any_word_for_an_end_are_complete_calls(word: str) -> None:
    found = read(calls(call("weather", OSLO)), delta(word), DONE).whole
    assert (found.finish, found.is_call_cut) == (FinishReason.STOP, False)


def test_each_of_several_sequences_ends_by_itself() -> None:
    both = {"choices": [{"delta": {"content": "one"}}, {"delta": {"content": "two"}}]}
    first = {"choices": [{"index": 0, "finish_reason": "stop"}]}
    second = {"choices": [{"index": 1, "finish_reason": "length"}]}
    events = read(both, first, second, DONE, num_sequences=2).events
    assert [(event.index, event.text) for event in events if event.text] == [(0, "one"), (1, "two")]
    assert [(event.index, event.finish) for event in events if event.finish] == [(0, FinishReason.STOP), (1, FinishReason.LENGTH)]
    with pytest.raises(BrokenStream):
        read(both, first, DONE, num_sequences=2)


@pytest.mark.parametrize("index", [2, -1, "2", 2.0])
def test_a_choice_that_was_not_asked_for_breaks_an_answer_of_several(index: Any) -> None:
    with pytest.raises(BrokenStream):
        read({"choices": [{"index": index, "delta": {"content": "x"}}]}, num_sequences=2)


@pytest.mark.parametrize("index", [None, "0", 0.0, -1, "first", {}, True, float("nan")])
def test_the_only_choice_needs_no_index(index: Any) -> None:
    assert read({"choices": [{"index": index, "delta": {"content": "Hello"}, "finish_reason": "stop"}]}, DONE).whole.text == "Hello"


@pytest.mark.parametrize("index", [1, 2, 7, "1"])
def test_the_only_choice_may_have_any_one_number(index: Any) -> None:
    pieces = [{"choices": [{"index": index, "delta": {"content": part}}]} for part in ("Hel", "lo")]
    found = read(*pieces, {"choices": [{"index": index, "finish_reason": "stop"}]}, DONE)
    assert (found.whole.text, found.left_out) == ("Hello", {"index": 1})
    with pytest.raises(BrokenStream, match="not asked for"):
        read(*pieces, STOP, DONE)


def test_choices_of_a_piece_and_chunks_of_an_event_are_bounded() -> None:
    with pytest.raises(BrokenStream, match="too many choices"):
        read({"choices": [{"text": "x"}] * 11}, STOP, DONE)
    with pytest.raises(BrokenStream):
        read([delta(content="x")] * 65, STOP, DONE)  # type: ignore[arg-type]
    with pytest.raises(BrokenStream):
        read(b"{}" * 65, STOP, DONE)


# -- beside the answer ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usage", "expected", "num_left_out"),
    [
        ({"prompt_tokens": 12.0, "completion_tokens": "3"}, (12, 3, 0, 0), 0),
        ({"input_tokens": 12, "output_tokens": 3}, (12, 3, 0, 0), 0),
        ({"prompt_tokens": 12, "completion_tokens": -1}, (12, 2, 0, 0), 1),
        ({"prompt_tokens": 12, "completion_tokens": None}, (12, 2, 0, 0), 0),
        ({"prompt_tokens": 12, "completion_tokens": 0}, (12, 2, 0, 0), 0),
        ({"prompt_tokens": None, "completion_tokens": 5}, (0, 5, 0, 0), 0),
        ({"prompt_tokens": 2**60, "completion_tokens": 1.5}, (0, 2, 0, 0), 2),
        ({"prompt_tokens": True, "completion_tokens": float("inf")}, (0, 2, 0, 0), 2),
        ({"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": "8"}}, (9, 4, 8, 0), 0),
        ({"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": [8]}, (9, 4, 0, 0), 1),
        ({"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": None}, (9, 4, 0, 0), 0),
        ({"prompt_tokens": 9, "completion_tokens": 4, "completion_tokens_details": {"reasoning_tokens": 2.0}}, (9, 4, 0, 2), 0),
        ("many", (0, 2, 0, 0), 1),
        ([], (0, 2, 0, 0), 0),
    ],
)
def test_counts_are_used_where_they_are_well_formed(usage: Any, expected: tuple[int, ...], num_left_out: int) -> None:
    chunks = delta(content="Hel"), delta(content="lo"), STOP
    for place in ({"choices": [], "usage": usage}, {"choices": [], "x_groq": {"usage": usage}}, {"choices": [{"usage": usage}]}):
        found = read(*chunks, place, DONE)
        assert found.usage[:4] == expected
        assert found.left_out.get("usage", 0) == num_left_out


def test_counts_of_each_piece_are_those_so_far() -> None:
    chunks = [delta(content="x") | {"usage": {"prompt_tokens": 7, "completion_tokens": number}} for number in (1, 2, 3)]
    assert read(*chunks, STOP, DONE).usage[:2] == (7, 3)
    assert read(delta(content="x"), STOP, {"choices": [], "prompt_eval_count": 7, "eval_count": 3}, DONE).usage[:2] == (7, 3)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "content", "tokens", "usage"]) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


# usage -> prompt, completion, cached and reasoning tokens of an answer of two received tokens
USAGES: dict[str, tuple[Chunk, tuple[int, int, int, int]]] = {
    "OpenAI": (
        {
            "prompt_tokens": 1000,
            "completion_tokens": 50,
            "total_tokens": 1050,
            "prompt_tokens_details": {"cached_tokens": 900},
            "completion_tokens_details": {"reasoning_tokens": 40},
        },
        (1000, 50, 900, 40),
    ),
    "OpenAI, newer interface": (
        {"input_tokens": 1000, "output_tokens": 50, "total_tokens": 1050, "input_tokens_details": {"cached_tokens": 900}},
        (1000, 50, 900, 0),
    ),
    "reasoning of the newer interface": (
        {"input_tokens": 10, "output_tokens": 50, "output_tokens_details": {"reasoning_tokens": 40}},
        (10, 50, 0, 40),
    ),
    "DeepSeek": (
        {
            "prompt_tokens": 1000,
            "completion_tokens": 3,
            "total_tokens": 1003,
            "prompt_cache_hit_tokens": 900,
            "prompt_cache_miss_tokens": 100,
        },
        (1000, 3, 900, 0),
    ),
    "hits and misses alone": ({"completion_tokens": 3, "prompt_cache_hit_tokens": 900, "prompt_cache_miss_tokens": 100}, (1000, 3, 900, 0)),
    "Moonshot, Together": ({"prompt_tokens": 1000, "completion_tokens": 3, "total_tokens": 1003, "cached_tokens": 900}, (1000, 3, 900, 0)),
    "Mistral": ({"prompt_tokens": 1000, "completion_tokens": 3, "total_tokens": 1003, "num_cached_tokens": 900}, (1000, 3, 900, 0)),
    "Anthropic": (
        {"input_tokens": 10, "output_tokens": 3, "cache_read_input_tokens": 900, "cache_creation_input_tokens": 90},
        (1000, 3, 900, 0),
    ),
    "Anthropic, nothing cached": (
        {"input_tokens": 10, "output_tokens": 3, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 90},
        (100, 3, 0, 0),
    ),
    "Anthropic's parts inside the prompt": (
        {
            "prompt_tokens": 1000,
            "completion_tokens": 3,
            "total_tokens": 1003,
            "cache_read_input_tokens": 900,
            "cache_creation_input_tokens": 90,
            "prompt_tokens_details": {"cached_tokens": 900, "cache_creation_tokens": 90},
        },
        (1000, 3, 900, 0),
    ),
    "Anthropic's parts beside the prompt, by the total": (
        {
            "prompt_tokens": 1000,
            "completion_tokens": 3,
            "total_tokens": 1993,
            "cache_read_input_tokens": 900,
            "cache_creation_input_tokens": 90,
        },
        (1990, 3, 900, 0),
    ),
    "more cached than the prompt": (
        {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13, "prompt_tokens_details": {"cached_tokens": 990}},
        (1000, 3, 990, 0),
    ),
    "more cached and written than the prompt": (
        {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 82}},
        (100, 3, 8, 0),
    ),
    "xAI": (
        {"prompt_tokens": 12, "completion_tokens": 5, "total_tokens": 334, "completion_tokens_details": {"reasoning_tokens": 317}},
        (12, 322, 0, 317),
    ),
    "xAI, without a total": (
        {"prompt_tokens": 12, "completion_tokens": 5, "completion_tokens_details": {"reasoning_tokens": 317}},
        (12, 322, 0, 317),
    ),
    "xAI, cached tokens beside too": (
        {
            "prompt_tokens": 100,
            "completion_tokens": 5,
            "total_tokens": 100 + 5 + 40 + 317,
            "cached_tokens": 40,
            "completion_tokens_details": {"reasoning_tokens": 317},
        },
        (140, 322, 40, 317),
    ),
    "Gemini": ({"prompt_tokens": 20, "completion_tokens": 198, "total_tokens": 623}, (20, 603, 0, 405)),
    "Gemini, nothing but thoughts": (
        {"prompt_tokens": 21, "completion_tokens": 0, "total_tokens": 81, "completion_tokens_details": {"reasoning_tokens": 60}},
        (21, 60, 0, 60),
    ),
    "SGLang": ({"prompt_tokens": 10, "completion_tokens": 50, "total_tokens": 60, "reasoning_tokens": 40}, (10, 50, 0, 40)),
    "a little more reasoning than output": (
        {"prompt_tokens": 10, "completion_tokens": 50, "total_tokens": 60, "reasoning_tokens": 52},
        (10, 50, 0, 50),
    ),
    "a total and the output": ({"completion_tokens": 5, "total_tokens": 105}, (100, 5, 0, 0)),
    "a total and the prompt": ({"prompt_tokens": 100, "total_tokens": 105}, (100, 5, 0, 0)),
    "a total that is too small": ({"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 5}, (100, 5, 0, 0)),
    "a total that is none": ({"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": -1}, (100, 5, 0, 0)),
    "numbers beyond any context": ({"prompt_tokens": 10**9 * 2, "completion_tokens": 10**18, "total_tokens": 10**15}, (0, 2, 0, 0)),
}


@pytest.mark.parametrize("name", USAGES)
def test_counts_mean_the_same_under_any_name(name: str) -> None:
    usage, expected = USAGES[name]
    assert read(delta(content="Hel"), delta(content="lo"), STOP, {"choices": [], "usage": usage}, DONE).usage[:4] == expected
    texts = {key: str(value) if isinstance(value, int) else value for key, value in usage.items()}
    assert read(delta(content="Hel"), delta(content="lo"), STOP | {"usage": texts}, DONE).usage[:4] == expected


def test_cached_tokens_that_are_counted_once_for_each_sequence_are_those_of_the_prompt() -> None:
    chunks = [{"choices": [{"index": index, "delta": {"content": "x"}, "finish_reason": "stop"}]} for index in range(4)]
    usage = {"prompt_tokens": 100, "completion_tokens": 4, "total_tokens": 104, "prompt_tokens_details": {"cached_tokens": 4 * 96}}
    assert read(*chunks, {"choices": [], "usage": usage}, DONE, num_sequences=4).usage[:3] == (100, 4, 100)


def test_counts_of_llama_cpp_are_read_where_it_sends_no_usage() -> None:
    timings = {"prompt_n": 100, "cache_n": 900, "predicted_n": 3, "predicted_ms": 12.5}
    for sent in (timings, timings | {"prompt_n": "100"}):
        assert read(delta(content="x"), STOP | {"timings": sent}, DONE).usage[:3] == (1000, 3, 900)
    counts = {"usage": {"prompt_tokens": 1001, "completion_tokens": 4}}
    assert read(delta(content="x"), STOP | {"timings": timings} | counts, DONE).usage[:3] == (1001, 4, 0)


def test_the_largest_of_repeated_counts_holds() -> None:
    """Anthropic's counts come in two pieces, each with zeros or without what the other has; others end with a piece of zeros."""
    first = {"usage": {"input_tokens": 10, "cache_read_input_tokens": 900, "output_tokens": 1}}
    last = {"choices": [], "usage": {"input_tokens": 0, "output_tokens": 50}}
    assert read(delta(content="x") | first, STOP, last, DONE).usage[:3] == (910, 50, 900)
    zeros = {"choices": [], "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}}
    assert read(delta(content="x"), STOP, counted(7, 3), zeros, DONE).usage[:2] == (7, 3)


NUMBERS = st.one_of(
    st.integers(0, 2000),
    st.integers(-(10**19), 10**19),
    st.floats(),
    st.booleans(),
    st.none(),
    st.sampled_from(["12", "12.0", "-3", "many", "", 10**18, 2**27, 2**27 + 1, 12.5, -1]),
)
PARTS = st.dictionaries(st.sampled_from(TokenDetails.__struct_fields__), NUMBERS)
ANY_USAGE = JSON | st.fixed_dictionaries({}, optional=dict.fromkeys(UsageCounts.__struct_fields__, NUMBERS | PARTS | JSON))


@given(usages=st.lists(ANY_USAGE, max_size=3), late=ANY_USAGE, num_sequences=st.integers(1, 3))
def test_no_counts_make_a_charge_negative_or_too_large_for_the_records(usages: list[Any], late: Any, num_sequences: int) -> None:
    answer, events = ForeignAnswer(range(num_sequences), "key"), list[OutputEvent]()
    for index in range(num_sequences):
        choice = {"index": index, "delta": {"content": "x"}, "finish_reason": "stop"}
        answer.read(json.dumps({"choices": [choice]}).encode(), events)
    for usage in usages:
        answer.read(json.dumps({"choices": [], "usage": usage}).encode("utf-8", "surrogatepass"), events)
    answer.end(events, is_marked=True)
    answer.read_late_usage(json.dumps({"usage": late}).encode("utf-8", "surrogatepass"))
    prompt, completion, cached, reasoning = answer.usage[:4]
    assert 0 <= cached <= prompt < 2**32
    assert 0 <= reasoning <= completion < 2**32
    assert completion >= 1
    price = Price(input=MAX_PRICE, output=MAX_PRICE, cached_input=MAX_PRICE)
    assert 0 <= price.cost_nanos(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion) < 2**63
    free = Price(input=1.0, output=1.0, cached_input=0.0).cost_nanos(
        prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion
    )
    assert free >= 1000 * completion


TOKEN = {"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": [{"token": "x", "logprob": -0.5, "bytes": None}]}


@pytest.mark.parametrize(
    ("changes", "logprob", "num_top"),
    [
        ({}, -0.5, 1),
        ({"bytes": None}, -0.5, 1),
        ({"bytes": [300]}, -0.5, 1),
        ({"bytes": "x"}, -0.5, 1),
        ({"logprob": -9999}, -9999.0, 1),
        ({"logprob": float("-inf")}, float("-inf"), 1),
        ({"logprob": "-0.5"}, -0.5, 1),
        ({"top_logprobs": None}, -0.5, 0),
        ({"top_logprobs": {}}, -0.5, 0),
        ({"top_logprobs": [None, {"token": "y"}, {"token": "z", "logprob": -1}]}, -0.5, 1),
    ],
)
def test_log_probabilities_are_used_as_far_as_they_are_well_formed(changes: Chunk, logprob: float, num_top: int) -> None:
    found = read(delta(content="x"), {"choices": [{"delta": {"content": "x"}, "logprobs": {"content": [TOKEN | changes]}}]}, STOP, DONE)
    ((entry,),) = found.whole.logprobs
    assert (entry.token, entry.raw, entry.logprob, len(entry.top)) == ("x", b"x", logprob, num_top)
    assert not found.left_out


@pytest.mark.parametrize("logprobs", [True, "x", [1], {"content": "x"}, {"content": [None]}, {"content": [TOKEN, {"token": "y"}]}])
def test_log_probabilities_that_cannot_be_read_are_left_out(logprobs: Any) -> None:
    found = read({"choices": [{"delta": {"content": "xy"}, "logprobs": logprobs}]}, STOP, DONE)
    assert (found.whole.text, found.whole.logprobs) == ("xy", ())
    assert found.left_out == {"logprobs": 1}


def test_what_was_left_out_is_counted_by_name() -> None:
    found = read(
        {
            "choices": [
                {"index": "first", "delta": {"content": ["Hello", {"type": "image"}], "refusal": 5}, "stop_reason": [1], "logprobs": 5}
            ]
        },
        {"choices": [{"delta": {"reasoning": 5, "tool_calls": [call("weather", OSLO, id=5)]}}], "usage": 5},
        STOP,
        DONE,
    )
    expected = ("call_id", "content_part", "index", "logprobs", "reasoning", "refusal", "stop_reason", "usage")
    assert found.left_out == dict.fromkeys(expected, 1)
    assert (found.whole.text, found.functions) == ("Hello", [("weather", OSLO)])


@pytest.mark.parametrize(
    "error",
    [
        *(None, {}, "", False, 0, [], {"message": "", "code": None}, {"code": 0}, "null"),
        *({"message": "success", "code": 0}, {"msg": "OK", "code": "0"}, {"code": 200, "type": "none", "message": None}),
    ],
)
def test_an_error_that_says_nothing_is_none(error: Any) -> None:
    in_choice = {"choices": [{"delta": {"content": "lo"}, "error": error}]}
    assert read(delta(content="Hel") | {"error": error}, in_choice, STOP | {"error": error}, DONE).whole.text == "Hello"


@pytest.mark.parametrize(
    ("error", "code", "is_overflow"),
    [
        ({"message": "x", "code": 429}, 429, False),
        ({"message": "x", "code": "429"}, 429, False),
        ({"message": "x", "code": None}, None, False),
        ("This model's maximum context length is 16 tokens.", None, True),
        ({"code": "context_length_exceeded"}, None, True),
        (True, None, False),
        (["x"], None, False),
    ],
)
def test_an_error_in_any_form_ends_the_answer(error: Any, code: int | None, is_overflow: bool) -> None:
    in_choice = {"choices": [{"index": 0, "delta": {"content": "x"}, "error": error, "finish_reason": "stop"}]}
    for chunk in ({"error": error}, in_choice):
        with pytest.raises(BrokenStream) as broken:
            read(delta(content="Hello"), chunk, STOP, DONE)
        assert broken.value.sent is not None
        assert (broken.value.sent.status, broken.value.sent.kind is ErrorKind.OVERFLOW) == (code, is_overflow)
    assert sent_error(json.dumps([{"error": error}]).encode()).status == code


SIDE_FIELDS = [
    *(
        ("id",),
        ("object",),
        ("created",),
        ("model",),
        ("usage",),
        ("service_tier",),
        ("system_fingerprint",),
        ("x_groq",),
        ("prompt_eval_count",),
    ),
    *(("choices", 0, name) for name in ("logprobs", "stop_reason", "message", "content_filter_results", "matched_stop", "usage")),
    *(("choices", 0, "delta", name) for name in ("role", "annotations", "audio", "reasoning", "reasoning_content", "thinking")),
    *(("choices", 0, "delta", "reasoning_details"), ("choices", 0, "delta", "function_call_id")),
    *(("choices", 0, "delta", "tool_calls", 0, name) for name in ("id", "type")),
]


def whole_chunks() -> list[Any]:
    """An answer each of whose chunks has choices, a delta, and a call."""
    first = delta(content="Hel", tool_calls=[call("weather", OSLO, index=0, id="c")])
    last = counted() | {"choices": [{"index": 0, "delta": {"tool_calls": [{}]}}]}
    return [first, delta(content="lo", tool_calls=[{"index": 0}]), delta("tool_calls", tool_calls=[{}]), last]


@given(number=st.integers(0, 3), place=st.sampled_from(SIDE_FIELDS), value=JSON.filter(lambda value: value != "error"))
def test_no_value_of_a_field_beside_the_answer_changes_text_calls_or_end(number: int, place: tuple[Any, ...], value: Any) -> None:
    changed = whole_chunks()
    *path, field = number, *place
    target: Any = changed
    for key in path:
        target = target[key]
    target[field] = value
    plain, found = read(*whole_chunks(), DONE), read(*changed, DONE)
    assert (found.whole.text, found.functions, found.whole.finish) == (plain.whole.text, plain.functions, plain.whole.finish)
    json.dumps([found.calls, found.whole.reasoning, found.whole.stop_reason], ensure_ascii=False).encode()


@given(
    chunks=st.lists(
        JSON | st.fixed_dictionaries({"choices": st.lists(st.fixed_dictionaries({"delta": JSON, "finish_reason": JSON}), max_size=2)})
    )
)
def test_whatever_a_server_sends_is_an_answer_or_a_broken_stream(chunks: list[Any]) -> None:
    try:
        found = read(*chunks, counted(), DONE)
    except BrokenStream:
        return
    assert found.whole.finish is not None
    json.dumps([found.whole.text, found.whole.reasoning, found.calls, found.whole.stop_reason], ensure_ascii=False).encode()
