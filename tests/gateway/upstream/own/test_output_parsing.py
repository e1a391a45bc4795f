"""Tests answers whose text holds reasoning and tool calls, through the whole gateway."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import text_kit
from gateway_kit import MODEL, TestBench, events_of, open_bench
from tokenizers import AddedToken, Tokenizer

from headrace.core.tools import FunctionTool
from headrace.core.update import FinishReason
from headrace.gateway.upstream.own.output_parsing import OutputParsing, OutputReader
from headrace.gateway.upstream.seam import OutputEvent
from headrace.text.folder import TextModel, load_text
from headrace.text.output.formats import REASONING_FORMATS, TOOL_FORMATS

pytestmark = pytest.mark.loop

FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}}
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "data: [DONE]\\r\\n\\r\\n</script>"}}\n</tool_call>'
ARGUMENTS = '{"q": "data: [DONE]\\r\\n\\r\\n</script>"}'
REASONING = "hm, which caf\u00e9 \U0001f389?\n"
SAID = f"<think>\n{REASONING}</think>\n\nLet me look.\n\n{CALL}\n{CALL}"


def message_of(events: Sequence[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A streamed choice put together as OpenAI's client does."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": {}}
    for choice in [choice for event in events for choice in event["choices"] if choice["index"] == index]:
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        numbers = [piece["index"] for piece in delta.get("tool_calls", ())]
        assert len(set(numbers)) == len(numbers)
        for piece in delta.get("tool_calls", ()):
            call = message["tool_calls"].setdefault(piece["index"], {"id": "", "name": "", "arguments": ""})
            call["id"] += piece.get("id", "")
            call["name"] += piece["function"].get("name", "")
            call["arguments"] += piece["function"].get("arguments", "")
        message["finish"] = choice["finish_reason"]
    return message


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": True}], ids=["plain", "n", "logprobs"])
async def test_a_stream_and_a_whole_answer_hold_the_same_calls(either: TestBench, fields: dict[str, Any]) -> None:
    either.replica.said = SAID
    whole = (await either.chat(tools=[FIND], **fields)).json()
    stream = await either.chat(tools=[FIND], stream=True, stream_options={"include_usage": True}, **fields)
    events = events_of(stream.text)

    assert stream.text.endswith("data: [DONE]\n\n")
    for choice in whole["choices"]:
        message, streamed = choice["message"], message_of(events, choice["index"])
        assert choice["finish_reason"] == streamed["finish"] == "tool_calls"
        assert message["content"] == streamed["content"] == "Let me look.\n\n"
        assert message["reasoning_content"] == streamed["reasoning_content"] == REASONING
        calls = [call["function"] for call in message["tool_calls"]]
        assert calls == [{"name": call["name"], "arguments": call["arguments"]} for call in streamed["tool_calls"].values()]
        assert calls == [{"name": "find", "arguments": ARGUMENTS}] * 2
    ids = [call["id"] for choice in whole["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == len(ids)
    assert all(call_id.startswith("call_") for call_id in ids)
    assert events[-1]["usage"] == whole["usage"]


async def test_arguments_are_streamed_piece_by_piece(bench: TestBench) -> None:
    bench.replica.said = CALL
    events = events_of((await bench.chat(tools=[FIND], stream=True)).text)
    pieces = [piece for event in events for choice in event["choices"] for piece in choice["delta"].get("tool_calls", ())]

    assert pieces[0]["function"]["name"] == "find"
    assert not any("name" in piece["function"] for piece in pieces[1:])
    assert len(pieces) > 10


async def test_reasoning_tokens_are_counted(bench: TestBench, text: TextModel) -> None:
    bench.replica.said = SAID
    usage = (await bench.chat()).json()["usage"]
    ids = text.tokenizer.encode(SAID, add_special_tokens=False)
    end = text.tokenizer.token_to_id("</think>")
    assert end is not None

    assert usage["completion_tokens_details"] == {"reasoning_tokens": ids.index(end) - 1}  # all but <think>


async def test_reasoning_can_stay_in_the_text_and_calls_need_tools(bench: TestBench) -> None:
    bench.replica.said = SAID
    for fields in ({"separate_reasoning": False}, {"separate_reasoning": False, "tools": [FIND], "tool_choice": "none"}):
        answer = (await bench.chat(**fields)).json()
        message = answer["choices"][0]["message"]
        assert message["content"] == SAID
        assert "tool_calls" not in message
        assert "completion_tokens_details" not in answer["usage"]
        assert answer["choices"][0]["finish_reason"] == "stop"


async def test_completions_are_text(bench: TestBench) -> None:
    bench.replica.said = SAID
    answer = (await bench.complete(max_tokens=400)).json()

    assert answer["choices"][0]["text"] == SAID


async def test_an_answer_that_goes_on_inside_the_reasoning(bench: TestBench) -> None:
    bench.replica.said = "more</think>so"
    messages = [{"role": "user", "content": "why <think>?"}, {"role": "assistant", "content": "<think>some"}]
    begun = (await bench.chat(messages=messages, continue_final_message=True, add_generation_prompt=False)).json()
    fresh = (await bench.chat(messages=messages[:1])).json()

    assert begun["choices"][0]["message"]["reasoning_content"] == "more"
    assert begun["choices"][0]["message"]["content"] == "so"
    assert fresh["choices"][0]["message"]["content"] == "more</think>so"


async def test_a_call_that_is_cut_off_says_so(bench: TestBench) -> None:
    bench.replica.said = CALL
    whole = (await bench.chat(tools=[FIND], max_tokens=40)).json()["choices"][0]

    assert whole["finish_reason"] == "length"
    (call,) = whole["message"]["tool_calls"]
    assert ARGUMENTS.startswith(call["function"]["arguments"])


@pytest.mark.parametrize(("stop", "finish"), [('"}', "stop"), ("</tool_call>", "tool_calls")])
async def test_a_stop_string_inside_a_call_is_no_complete_call(either: TestBench, stop: str, finish: str) -> None:
    """An agent makes the calls of an answer that ends with tool_calls: these must be whole."""
    either.replica.said = '<tool_call>\n{"name": "find", "arguments": {"q": "a"}}\n</tool_call>'
    whole = (await either.chat(tools=[FIND], stop=[stop])).json()["choices"][0]
    streamed = message_of(events_of((await either.chat(tools=[FIND], stop=[stop], stream=True)).text))

    assert (whole["finish_reason"], whole["stop_reason"], streamed["finish"]) == (finish, stop, finish)
    assert streamed["tool_calls"][0]["arguments"] == whole["message"]["tool_calls"][0]["function"]["arguments"]


async def test_hostile_names_and_half_markers_keep_the_framing(bench: TestBench) -> None:
    huge = '<tool_call>{"name": "' + "n\\r\\ndata: [DONE]" * 16 + '", "arguments": {}}</tool_call>'
    named = '<tool_call>{"name": "a\\r\\n\\r\\ndata: x", "arguments": {}}</tool_call>'
    for said in (huge, "<tool_call>data: [DONE]\r\n\r\n", "<tool_call" * 9):
        bench.replica.said = said
        streamed = message_of(events_of((await bench.chat(tools=[FIND], stream=True)).text))
        assert (streamed["content"], streamed["tool_calls"]) == (said, {})
    bench.replica.said = named
    streamed = message_of(events_of((await bench.chat(tools=[FIND], stream=True)).text))
    assert streamed["tool_calls"][0]["name"] == "a\r\n\r\ndata: x"


async def test_values_between_tags_have_the_types_of_the_functions_schema(text: TextModel) -> None:
    models = [{"name": MODEL, "folder": "/n", "replicas": [{"name": "r0", "address": "unix:/n"}], "tool_call_parser": "qwen3_coder"}]
    parameters = {"type": "object", "properties": {"q": {"type": "string"}, "limit": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "find", "parameters": parameters}}
    async with open_bench(text, models=models) as bench:
        values = "<parameter=q>\n42\n</parameter>\n<parameter=limit>\n42\n</parameter>\n"
        bench.replica.said = f"So.\n<tool_call>\n<function=find>\n{values}</function>\n</tool_call>"
        whole = (await bench.chat(tools=[tool], tool_choice="required")).json()["choices"][0]
        streamed = message_of(events_of((await bench.chat(tools=[tool], stream=True)).text))
        assert bench.replica.requests[0].grammar is not None
        assert "<function=find>" in bench.replica.requests[0].grammar.source

    assert whole["message"]["tool_calls"][0]["function"] == {"name": "find", "arguments": '{"q": "42", "limit": 42}'}
    assert (streamed["content"], streamed["tool_calls"][0]["arguments"]) == ("So.\n", '{"q": "42", "limit": 42}')
    assert whole["finish_reason"] == streamed["finish"] == "tool_calls"


async def test_markers_that_are_special_tokens_reach_the_parser_alone(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools }}[TOOL_CALLS]{% endif %}"
    folder = text_kit.save_byte_level(tmp_path / "mistral", chat_template=template)
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True, normalized=False)])
    inner.save(str(folder / "tokenizer.json"))
    text = load_text(folder)
    async with open_bench(text) as bench:
        eos = text.tokenizer.special_tokens["bos_token"]
        bench.replica.said = f'Hm{eos}.[TOOL_CALLS] [{{"name": "find", "arguments": {{}}}}]'
        assert bench.replica.text.tokenizer.token_to_id("[TOOL_CALLS]") in text.tokenizer.special_ids
        encode = text.tokenizer.encode
        ids = encode(bench.replica.said, add_special_tokens=False, allow_control_tokens=True)
        text.tokenizer.encode = lambda said, **given: ids if said == bench.replica.said else encode(said, **given)  # type: ignore[method-assign]
        message = (await bench.chat(tools=[FIND])).json()["choices"][0]["message"]
        plain = (await bench.chat()).json()["choices"][0]["message"]

    assert message["content"] == "Hm."
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "find", "arguments": "{}"}
    assert len(call["id"]) == 9
    assert call["id"].isalnum()
    assert plain["content"] == 'Hm. [{"name": "find", "arguments": {}}]'


@pytest.mark.pure
def test_reasoning_tokens_are_those_that_begin_inside(text: TextModel) -> None:
    """Random texts in random frames, against the definition: tokens whose first character is reasoning."""
    rng = random.Random(5)
    row, tokenizer = REASONING_FORMATS["reasoning"], text.tokenizer
    for _ in range(200):
        reasoning = "".join(rng.choices(["a", "fox ", "\U0001f389", "<", "</rea", "caf\u00e9"], k=rng.randrange(12)))
        said = f"{row.start}{reasoning}{rng.choice([row.end, ''])}" + rng.choice(["", "so", " \U0001f600"])
        ids = tokenizer.encode(said, add_special_tokens=False)
        end = said.find(row.end)
        begins = [len(tokenizer.join(ids[:number]).decode("utf-8", "ignore")) for number in range(len(ids))]
        expected = sum(len(row.start) <= begin < (end if end >= 0 else len(said)) for begin in begins)
        assert counted(OutputParsing(reasoning=row), text, ids, rng) == expected, said


def counted(parsing: OutputParsing, text: TextModel, ids: Sequence[int], rng: random.Random) -> int:
    """Reasoning tokens of an output in frames of random lengths that end with whole characters, as an assembler gives them."""
    reader = OutputReader(parsing, text.tokenizer, frozenset(), "")
    at = 0
    while at < len(ids):
        after = min(len(ids), at + rng.randrange(1, 4))
        while "\ufffd" in text.tokenizer.join(ids[at:after]).decode("utf-8", "replace"):
            after += 1
        part = ids[at:after]
        finish = FinishReason.STOP if after == len(ids) else None
        reader.read(OutputEvent(0, text.tokenizer.join(part).decode(), len(part), finish=finish), part)
        at = after
    return reader.num_reasoning_tokens


@pytest.mark.pure
def test_a_reader_that_can_find_nothing_more_is_passed(text: TextModel) -> None:
    parsing = OutputParsing(tools=TOOL_FORMATS["pythonic"], reasoning=REASONING_FORMATS["qwen3"], functions=[FunctionTool(name="f")])
    reader = OutputReader(parsing, text.tokenizer, frozenset(), "")
    for said, is_passed in (("<think>a", False), ("</think>b", True)):
        reader.read(OutputEvent(0, said, 1), (0,))
        assert reader.is_passed is is_passed


@pytest.mark.pure
def test_ids_of_calls_depend_on_the_sequence_alone(text: TextModel) -> None:
    def ids(key: str) -> list[str | None]:
        reader = OutputReader(OutputParsing(tools=TOOL_FORMATS["hermes"]), text.tokenizer, frozenset(), key)
        return [call.call_id for call in reader.read(OutputEvent(0, CALL * 2, 1), (0,)).tool_calls if call.name]

    assert ids("a") == ids("a")
    assert len({*ids("a"), *ids("b")}) == 4
    assert json.dumps(ids("a"))
