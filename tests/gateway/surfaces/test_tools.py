"""Tests functions and reasoning in a chat: what reaches the template, what is refused by name, what another server is sent."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from figures import Figure
from gateway_kit import MODEL, SAID, TestBench, chat_body, events_of, headers, open_bench, serving
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import ReasoningSpan
from headrace.core.request import EngineRequest
from headrace.core.tools import MAX_TOOLS
from headrace.gateway.surfaces.dialect.conversation import MAX_CALLS, MAX_TOOLS_BYTES, Message, template_messages
from headrace.text.folder import TextModel
from headrace.wire.stream import ReplicaStream

pytestmark = pytest.mark.loop

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
TURNS = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]


def prompt_of(bench: TestBench) -> str:
    return bench.replica.text.tokenizer.decode(bench.replica.requests[-1].prompt_ids, skip_special_tokens=False)


async def test_functions_are_shown_as_they_were_written_but_for_strict(bench: TestBench) -> None:
    response = await bench.chat(tools=[{**WEATHER, "function": {**WEATHER["function"], "strict": False}}])
    assert response.status_code == 200
    shown = prompt_of(bench).split("<|im_end|>\n")[1].split("<|im_start|>")[0]
    assert msgspec.json.decode(shown) == [WEATHER]


async def test_none_leaves_the_functions_out_of_the_prompt(bench: TestBench) -> None:
    await bench.chat()
    plain = prompt_of(bench)
    response = await bench.chat(tools=[WEATHER], tool_choice="none")
    assert response.json()["choices"][0]["message"]["content"] == SAID
    assert prompt_of(bench) == plain


async def test_turns_with_calls_reach_the_template(either: TestBench) -> None:
    response = await either.chat(messages=TURNS, tools=[WEATHER])
    assert response.status_code == 200, response.text
    prompt = prompt_of(either)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>' in prompt
    assert "<|im_start|>tool\nrain<|im_end|>" in prompt


TIME = {"type": "function", "function": {"name": "get_time"}}
ALLOWED: dict[str, Any] = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_weather"}}]},
}


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"function": {"name": "f", **fields}}]}


def turn(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": "x", **fields}]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": "f"}, "tools"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
    ({"tools": [{"function": {"name": f"f{number}"}} for number in range(MAX_TOOLS + 1)]}, "tools"),
    (function(name=""), "tools[0].function.name"),
    (function(name="get weather"), "tools[0].function.name"),
    (function(name="<|im_end|>"), "tools[0].function.name"),
    (function(description=5), "tools[0].function.description"),
    (function(parameters="{}"), "tools[0].function.parameters"),
    (function(parameters={"type": "array"}), "tools[0].function.parameters.type"),
    (function(parameters={"type": ["object", "null"]}), "tools[0].function.parameters.type"),
    (function(strict="yes"), "tools[0].function.strict"),
    (function(strict=True, examples=[]), "tools[0].function.examples"),
    (function(description="x" * MAX_TOOLS_BYTES), "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [WEATHER], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tools": [WEATHER], "tool_choice": {**ALLOWED, "function": {"name": "get_weather"}}}, "tool_choice.allowed_tools"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "tool_choice.allowed_tools.tools",
    ),
    (
        {"tools": [{"function": {"name": "other"}}], "tool_choice": ALLOWED},
        "tool_choice.allowed_tools.tools[0].function.name",
    ),
    ({"tools": [WEATHER], "tool_choice": {"function": {"name": "other"}}}, "tool_choice.function.name"),
    ({"tools": [WEATHER], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"functions": [WEATHER["function"]]}, "functions"),
    (turn(tool_calls=[CALL] * (MAX_CALLS + 1)), "messages[0].tool_calls"),
    (turn(tool_calls=[{}]), "messages[0].tool_calls[0].function"),
    (turn(tool_calls=[{"function": {"arguments": "{}"}}]), "messages[0].tool_calls[0].function.name"),
    (turn(tool_calls=[{"function": {"name": "f", "arguments": {"a": 1}}}]), "messages[0].tool_calls[0].function.arguments"),
    (turn(tool_call_id="1"), "messages[0].tool_call_id"),
    (turn(role="user", tool_calls=[CALL]), "messages[0].tool_calls"),
    (turn(role="user", reasoning_content="hm"), "messages[0].reasoning_content"),
    (turn(reasoning_content="hm", reasoning="other"), "messages[0].reasoning"),
    (turn(content=None), "messages[0].content"),
    (turn(role="tool", content=None), "messages[0].content"),
    (turn(role="function"), "messages[0].role"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"reasoning_effort": "most"}, "reasoning_effort"),
    ({"think": "high"}, "think"),
    ({"think": "a lot"}, "think"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ({"reasoning": {"effort": "all"}}, "reasoning.effort"),
    ({"reasoning": {"max_tokens": 100}}, "reasoning.max_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive"}}, "thinking.type"),
    ({"thinking": True}, "thinking"),
    ({"think": True, "enable_thinking": False}, "think"),
    ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking"),
    ({"reasoning_format": "xml"}, "reasoning_format"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[f"{number}-{param}" for number, (_, param) in enumerate(REFUSED)])
async def test_what_no_model_can_be_asked_is_refused_by_name(bench: TestBench, fields: dict[str, Any], param: str) -> None:
    response = await bench.chat(**fields)
    error = response.json()["error"]
    assert (response.status_code in (400, 413), error["param"]) == (True, param), error
    assert not bench.replica.requests


HOSTILE: list[tuple[str, dict[str, Any]]] = [
    ("wide", {"properties": {f"p{number}": {"type": "string"} for number in range(20_000)}}),
    ("many values", {"enum": list(range(200_000))}),
    ("long key", {"properties": {"k" * 200_000: {}}}),
]


@pytest.mark.timing
async def test_hostile_definitions_are_refused_at_once(bench: TestBench, figure: Figure) -> None:
    deep: dict[str, Any] = {"properties": {"a": {}}}
    for _ in range(200):
        deep = {"properties": {"a": deep}}
    for kind, parameters in [("deep", deep), *HOSTILE]:
        body = msgspec.json.encode(chat_body(**function(parameters=parameters)))
        began_s = time.process_time()
        response = await bench.client.post("/v1/chat/completions", content=body, headers=headers())
        assert response.status_code in (400, 413), response.text
        figure(kind, time.process_time() - began_s, 0.08, "s of CPU")
    assert not bench.replica.requests


SWITCHED_OFF: list[dict[str, Any]] = [
    {"enable_thinking": False},
    {"think": False},
    {"thinking": {"type": "disabled"}},
    {"reasoning": {"enabled": False}},
    {"reasoning": {"effort": "none"}},
    {"reasoning_effort": "none"},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"enable_thinking": False, "think": False, "chat_template_kwargs": {"enable_thinking": False}},
]


@pytest.mark.parametrize("fields", SWITCHED_OFF, ids=str)
async def test_reasoning_is_switched_off_by_every_name_that_clients_have_for_it(bench: TestBench, fields: dict[str, Any]) -> None:
    response = await bench.chat(**fields)
    assert response.status_code == 200
    assert "x-headrace-ignored" not in response.headers
    assert prompt_of(bench).endswith("<|im_start|>assistant\n<think></think>")


async def test_reasoning_of_earlier_turns_is_named_where_the_template_does_not_read_it(bench: TestBench) -> None:
    for name in ("reasoning_content", "reasoning"):
        response = await bench.chat(messages=[{"role": "assistant", "content": "Hi", name: "hm"}, {"role": "user", "content": "Bye"}])
        assert response.headers["x-headrace-ignored"] == "messages[].reasoning_content"


async def test_tokenize_counts_what_a_chat_with_functions_sends(bench: TestBench) -> None:
    await bench.chat(messages=TURNS, tools=[WEATHER])
    body = {"model": MODEL, "messages": TURNS, "tools": [WEATHER]}
    counted = (await bench.client.post("/tokenize", json=body)).json()
    assert counted["tokens"] == list(bench.replica.requests[-1].prompt_ids)
    refused = await bench.client.post("/tokenize", json={"model": MODEL, "prompt": "x", "tools": [WEATHER]})
    assert refused.json()["error"]["param"] == "tools"


async def test_another_server_is_sent_the_fields_as_the_client_wrote_them(text: TextModel) -> None:
    """A gateway before a gateway: what the far one reads is what the near one's client said."""
    async with open_bench(text) as far, serving(far.gateway) as port:
        models = [{"name": MODEL, "upstreams": [{"url": f"http://127.0.0.1:{port}/v1"}]}]
        async with open_bench(text, models=models) as near:
            for fields in (
                *SWITCHED_OFF,
                {"tools": [WEATHER]},
                {"tools": [WEATHER, TIME], "tool_choice": ALLOWED},
                {"messages": TURNS, "tools": [WEATHER], "tool_choice": "none"},
            ):
                assert (await near.chat(**fields)).status_code == 200
                assert (await far.chat(**fields)).status_code == 200
                sent, same = far.replica.requests[-2:]
                assert (sent.prompt_ids, sent.grammar) == (same.prompt_ids, same.grammar)


STRICT = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
FORCED: list[tuple[dict[str, Any], bool]] = [
    ({"tools": [WEATHER]}, False),
    ({"tools": [WEATHER], "tool_choice": "auto"}, False),
    ({"tools": [STRICT], "tool_choice": "none"}, False),
    ({"tools": [STRICT]}, True),
    ({"tools": [WEATHER], "parallel_tool_calls": False}, True),
    ({"tools": [WEATHER], "tool_choice": "required"}, True),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}, True),
]


@pytest.mark.parametrize(("fields", "is_forced"), FORCED, ids=str)
async def test_calls_are_forced_by_a_grammar_where_the_request_binds_them(
    bench: TestBench, fields: dict[str, Any], is_forced: bool
) -> None:
    assert (await bench.chat(**fields)).status_code == 200
    grammar = bench.replica.requests[-1].grammar
    assert (grammar is not None) is is_forced
    if grammar is not None:
        assert "get_weather" in grammar.source
        assert grammar.reasoning == ReasoningSpan(start="<think>", end="</think>")


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_some_of_the_functions_may_be_called_and_all_are_shown(bench: TestBench, mode: str) -> None:
    tools = [WEATHER, TIME]
    allowed = {"type": "allowed_tools", "allowed_tools": {**ALLOWED["allowed_tools"], "mode": mode}}
    assert (await bench.chat(tools=tools, tool_choice=allowed)).status_code == 200
    grammar = bench.replica.requests[-1].grammar
    assert grammar is not None
    assert "get_weather" in grammar.source
    assert "get_time" not in grammar.source
    assert "get_time" in prompt_of(bench)
    assert ("FREE" in grammar.source) is (mode == "auto")


@pytest.mark.parametrize(("fields", "span"), [({}, True), ({"enable_thinking": False}, False)])
async def test_a_grammar_binds_after_the_reasoning_unless_the_prompt_has_ended_it(
    bench: TestBench, fields: dict[str, Any], span: bool
) -> None:
    await bench.chat(tools=[WEATHER], tool_choice="required", **fields)
    grammar = bench.replica.requests[-1].grammar
    assert grammar is not None
    assert (grammar.reasoning is not None) is span


@pytest.mark.parametrize(
    ("begun", "span"),
    [
        ("<think>Let me", ReasoningSpan(start="<think>", end="</think>", is_open=True)),
        ("So, it", None),
    ],
)
async def test_a_grammar_binds_after_the_reasoning_of_an_answer_that_is_continued(
    bench: TestBench, begun: str, span: ReasoningSpan | None
) -> None:
    messages = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": begun}]
    fields = {"continue_final_message": True, "add_generation_prompt": False, "tools": [WEATHER], "tool_choice": "required"}
    response = await bench.chat(messages=messages, **fields)
    assert response.status_code == 200, response.text
    grammar = bench.replica.requests[-1].grammar
    assert grammar is not None
    assert grammar.reasoning == span


async def test_the_engine_refusing_the_functions_schema_names_the_functions(bench: TestBench) -> None:
    def refuse(request: EngineRequest, stream: ReplicaStream) -> None:
        stream.reject(InvalidRequest("grammar", "no keyword that is not known", None))

    bench.replica.on_submit = refuse
    response = await bench.chat(tools=[STRICT])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


async def test_a_model_whose_calls_cannot_be_read_refuses_functions(text: TextModel) -> None:
    models = [{"name": MODEL, "folder": "/nowhere", "replicas": [{"name": "r0", "address": "unix:/nowhere"}], "tool_call_parser": "none"}]
    async with open_bench(text, models=models) as bench:
        response = await bench.chat(tools=[WEATHER])
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
        assert "--tool-call-parser" in response.json()["error"]["message"]
        assert (await bench.chat(tools=[WEATHER], tool_choice="none")).status_code == 200


async def test_a_choice_among_no_functions_is_named_as_ignored(bench: TestBench) -> None:
    for fields in ({"tool_choice": "auto"}, {"tool_choice": "none"}, {"parallel_tool_calls": False}, {"parallel_tool_calls": True}):
        response = await bench.chat(**fields)
        assert (response.status_code, response.headers["x-headrace-ignored"]) == (200, next(iter(fields)))
        response = await bench.chat(tools=[WEATHER], **fields)
        assert (response.status_code, response.headers.get("x-headrace-ignored")) == (200, None)


THOUGHT = "<think>Let me see.</think>Paris."
REASONING_SHOWN: list[tuple[dict[str, Any], str, str | None]] = [
    ({}, "Paris.", "Let me see."),
    ({"include_reasoning": True}, "Paris.", "Let me see."),
    ({"include_reasoning": False}, "Paris.", None),
    ({"reasoning": {"exclude": True}}, "Paris.", None),
    ({"separate_reasoning": False}, THOUGHT, None),
    ({"reasoning_format": "none"}, THOUGHT, None),
    ({"reasoning_format": "deepseek"}, "Paris.", "Let me see."),
]


@pytest.mark.parametrize(("fields", "content", "reasoning"), REASONING_SHOWN, ids=[str(fields) for fields, _, _ in REASONING_SHOWN])
async def test_reasoning_is_separated_left_out_or_left_in_as_the_client_wants(
    either: TestBench, fields: dict[str, Any], content: str, reasoning: str | None
) -> None:
    either.replica.said = THOUGHT
    whole = (await either.chat(**fields)).json()
    message = whole["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == (content, reasoning)
    counted = whole["usage"].get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    assert (counted > 0) is (content == "Paris.")
    deltas = [choice["delta"] for event in events_of((await either.chat(**fields, stream=True)).text) for choice in event["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == content
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == (reasoning or "")


@pytest.mark.pure
@pytest.mark.parametrize("given", [{}, {"type": "function"}])
def test_calls_of_earlier_turns_have_their_type(given: dict[str, Any]) -> None:
    """DeepSeek's templates write it, and servers behind a gateway require it."""
    call = {"function": {"name": "f", "arguments": "{}"}, **given}
    (message,) = template_messages(msgspec.convert([{"role": "assistant", "tool_calls": [call]}], list[Message]))
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]


async def test_a_call_with_broken_arguments_goes_back_as_the_model_wrote_it(either: TestBench) -> None:
    """An agent's conversation goes on after a call that no program can read: the model sees it beside the complaint."""
    broken = {**CALL, "function": {"name": "get_weather", "arguments": '{"city": Paris'}}
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "error: the arguments are no JSON"}
    asked = {"role": "assistant", "content": None, "tool_calls": [broken]}
    response = await either.chat(messages=[TURNS[0], asked, answer], tools=[WEATHER])
    assert response.status_code == 200, response.text
    assert msgspec.json.encode('{"city": Paris').decode() in prompt_of(either)


async def test_a_call_is_answered_and_the_answer_goes_back(bench: TestBench) -> None:
    """A round trip as an agent makes it: what the model wrote comes back to it as it wrote it."""
    written = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    bench.replica.said = written
    message = (await bench.chat(tools=[WEATHER])).json()["choices"][0]["message"]
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    await bench.chat(messages=[{"role": "user", "content": "Hello"}, message, answer], tools=[WEATHER])
    assert f"<|im_start|>assistant\n{written}<|im_end|>" in prompt_of(bench)


@pytest.mark.parametrize("updates_at_once", [1, 1000])
async def test_the_clients_helper_sees_the_end_of_each_calls_arguments(bench: TestBench, updates_at_once: int) -> None:
    """A call that comes whole with its end is no exception: the helper makes no such event of one chunk with both."""
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    bench.replica.said, bench.replica.updates_at_once = f"{call}\n{call}", updates_at_once
    tools: Any = [WEATHER]
    response = await bench.chat(tools=tools, stream=True)
    state: Any = ChatCompletionStreamState(input_tools=tools)
    events = [event for chunk in events_of(response.text) for event in state.handle_chunk(ChatCompletionChunk.model_validate(chunk))]
    ended = [(event.index, event.arguments) for event in events if event.type == "tool_calls.function.arguments.done"]
    assert ended == [(number, '{"city": "Paris"}') for number in range(2)]
    assert state.get_final_completion().choices[0].finish_reason == "tool_calls"
