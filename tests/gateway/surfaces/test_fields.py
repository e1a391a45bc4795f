"""Tests the field table against the documentation, the wire types and the running gateway: every row does what it says."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import api_tables
import httpx2
import msgspec
import pytest
from gateway_kit import MODEL, TestBench, open_bench

from headrace.core.request import EngineRequest
from headrace.gateway.surfaces.chat import ChatRequest
from headrace.gateway.surfaces.completions import CompletionRequest
from headrace.gateway.surfaces.dialect.field_table import BOTH, CHAT, COMPLETIONS, TABLE, FieldRule, Inside, Treatment
from headrace.gateway.upstream.generation_request import PASSED
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

KINDS: dict[str, type[msgspec.Struct]] = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest}

SOME: dict[str, Any] = {
    "n": 2,
    "max_tokens": 5,
    "min_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.2,
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": 1},
    "seed": 99,
    "stop": "fox",
    "stop_token_ids": [5],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "prompt_logprobs": 1,
    "priority": "batch",
    "cache_salt": "mine",
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "[ab]+"},
    "guided_json": {"type": "integer"},
    "guided_regex": "[ab]+",
    "guided_choice": ["yes", "no"],
    "guided_grammar": 'start: "a"',
    "regex": "[ab]+",
    "ebnf": 'root ::= "a"',
    "json_schema": '{"type": "integer"}',
    "grammar": 'root ::= "a"',
    "format": "json",
    "stream": True,
    "model": "gpt-4o",
}
TOOLS = [{"type": "function", "function": {"name": "now"}}]
EXAMPLES: dict[str, dict[str, Any]] = {
    CHAT: SOME
    | {
        "messages": [{"role": "user", "content": "Bye"}],
        "max_completion_tokens": 5,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "logprobs": True,
        "top_logprobs": 2,
        "tools": TOOLS,
        "tool_choice": "none",
        "enable_thinking": False,
        "think": False,
        "thinking": {"type": "disabled"},
        "reasoning_effort": "none",
        "reasoning": {"enabled": False},
    },
    COMPLETIONS: SOME | {"prompt": "Bye", "best_of": 2, "echo": True, "add_special_tokens": False, "logprobs": 1},
}
WITH: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "continue_final_message": {"add_generation_prompt": False, "messages": [{"role": "assistant", "content": "The quick"}]},
    "include_stop_str_in_output": {"stop": ["fox"]},
    "best_of": {"n": 2},
    "stream_options": {"stream": True},
    "tool_choice": {"tools": TOOLS},
}
"""What a field needs beside it to mean anything."""

ELSEWHERE = (
    *("parallel_tool_calls", "include_reasoning", "separate_reasoning", "reasoning_format", "metadata", "context_fitting", "cache"),
    *("models", "fallbacks", "provider"),
)
"""Fields that need a model which calls functions or reasons (tests/gateway/surfaces/test_tools.py), or a conversation that went on before
or does not fit (tests/gateway/sessions), or a response cache (tests/gateway/cache), or several models (tests/gateway/generation).
"""

BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "seed": 1},
    COMPLETIONS: {"model": MODEL, "prompt": "Hello", "seed": 1},
}
PREFIX: dict[str, str] = {
    Inside.MESSAGE: "messages[0].",
    Inside.PART: "messages[0].content[0].",
    Inside.STREAM_OPTIONS: "stream_options.",
    Inside.CALL: "messages[0].tool_calls[0].",
    Inside.CALLED_FUNCTION: "messages[0].tool_calls[0].function.",
    Inside.TOOL: "tools[0].",
    Inside.FUNCTION: "tools[0].function.",
    Inside.TOOL_CHOICE: "tool_choice.",
    Inside.CHOSEN_FUNCTION: "tool_choice.function.",
    Inside.ALLOWED_TOOLS: "tool_choice.allowed_tools.",
    Inside.ALLOWED_TOOL: "tool_choice.allowed_tools.tools[0].",
    Inside.ALLOWED_FUNCTION: "tool_choice.allowed_tools.tools[0].function.",
    Inside.REASONING: "reasoning.",
    Inside.THINKING: "thinking.",
    Inside.RESPONSE_FORMAT: "response_format.",
    Inside.JSON_SCHEMA: "response_format.json_schema.",
    Inside.STRUCTURED_OUTPUTS: "structured_outputs.",
    Inside.CACHE: "cache.",
    Inside.PROVIDER: "provider.",
    Inside.MAX_PRICE: "provider.max_price.",
    Inside.MIN_THROUGHPUT: "provider.preferred_min_throughput.",
}
"""How an error names the objects that `inside` makes."""


def rows(treatment: Treatment, places: Iterable[str] = BOTH) -> list[Any]:
    return [
        pytest.param(place, rule, id=f"{place}-{rule.name}")
        for rule in TABLE
        if rule.treatment is treatment
        for place in rule.places
        if place in places
    ]


def inside(place: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A body with `fields` in one of its objects."""
    match place:
        case Inside.MESSAGE:
            return {**BASE[CHAT], "messages": [{"role": "user", "content": "Hello", **fields}]}
        case Inside.PART:
            return inside(Inside.MESSAGE, {"content": [{"type": "text", "text": "Hello", **fields}]})
        case Inside.STREAM_OPTIONS:
            return {**BASE[CHAT], "stream": True, "stream_options": {"include_usage": True, **fields}}
        case Inside.CALL:
            return inside(Inside.MESSAGE, {"role": "assistant", "tool_calls": [{"function": {"name": "now"}, **fields}]})
        case Inside.CALLED_FUNCTION:
            return inside(Inside.CALL, {"function": {"name": "now", **fields}})
        case Inside.TOOL:
            return {**BASE[CHAT], "tools": [{"function": {"name": "now"}, **fields}]}
        case Inside.FUNCTION:
            return inside(Inside.TOOL, {"function": {"name": "now", **fields}})
        case Inside.TOOL_CHOICE:
            return {**BASE[CHAT], "tools": TOOLS, "tool_choice": {"function": {"name": "now"}, **fields}}
        case Inside.CHOSEN_FUNCTION:
            return inside(Inside.TOOL_CHOICE, {"function": {"name": "now", **fields}})
        case Inside.ALLOWED_TOOLS:
            allowed = {"mode": "auto", "tools": [{"function": {"name": "now"}}], **fields}
            return {**BASE[CHAT], "tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
        case Inside.ALLOWED_TOOL:
            return inside(Inside.ALLOWED_TOOLS, {"tools": [{"function": {"name": "now"}, **fields}]})
        case Inside.ALLOWED_FUNCTION:
            return inside(Inside.ALLOWED_TOOL, {"function": {"name": "now", **fields}})
        case Inside.REASONING:
            return {**BASE[CHAT], "reasoning": {"enabled": False, **fields}}
        case Inside.THINKING:
            return {**BASE[CHAT], "thinking": {"type": "disabled", **fields}}
        case Inside.RESPONSE_FORMAT:
            return {**BASE[CHAT], "response_format": {"type": "json_object", **fields}}
        case Inside.JSON_SCHEMA:
            schema = {"schema": {"type": "object"}, **fields}
            return {**BASE[CHAT], "response_format": {"type": "json_schema", "json_schema": schema}}
        case Inside.CACHE:
            return {**BASE[CHAT], "cache": fields}
        case Inside.PROVIDER:
            return {**BASE[CHAT], "provider": fields}
        case Inside.MAX_PRICE:
            return inside(Inside.PROVIDER, {"max_price": fields})
        case Inside.MIN_THROUGHPUT:
            return inside(Inside.PROVIDER, {"preferred_min_throughput": fields})
        case Inside.STRUCTURED_OUTPUTS:
            return {**BASE[CHAT], "structured_outputs": {"regex": "a", **fields}}
        case _:
            return {**BASE[place], **fields}


async def ask(bench: TestBench, place: str, **fields: Any) -> tuple[httpx2.Response, EngineRequest | None]:
    """The answer, and what reached the engine (without what differs between any two requests)."""
    bench.replica.requests.clear()
    response = await bench.client.post(CHAT if isinstance(place, Inside) else place, json=inside(place, fields))
    sent = bench.replica.requests[0] if bench.replica.requests else None
    return response, replace(sent, request_id=type(sent.request_id)("x")) if sent else None


def steady(response: httpx2.Response) -> str:
    """An answer without its id and time."""
    return re.sub(r'"id":"[^"]*"|"created":\d+', "", response.text)


@pytest.mark.pure
def test_documentation_is_this_table() -> None:
    assert api_tables.shown(api_tables.FIELDS) == api_tables.fields_tables(), "run python -m tests.support.api_tables"


@pytest.mark.parametrize("surface", BOTH)
@pytest.mark.pure
def test_honoured_fields_are_the_wire_types(surface: str) -> None:
    read = (Treatment.HONOURED, Treatment.PASSED)
    honoured = {rule.name for rule in TABLE if surface in rule.places and rule.treatment in read}
    assert honoured == set(KINDS[surface].__struct_fields__)


@pytest.mark.parametrize("place", [*BOTH, *Inside])
@pytest.mark.pure
def test_no_field_has_two_rows(place: str) -> None:
    names = [rule.name for rule in TABLE if place in rule.places]
    assert len(names) == len(set(names))


@pytest.mark.pure
def test_what_is_passed_on_is_what_a_foreign_server_takes() -> None:
    passed = [(place, rule.name) for rule in TABLE if rule.treatment is Treatment.PASSED for place in rule.places]
    assert {f"{place}.{name}" if isinstance(place, Inside) else name for place, name in passed} == PASSED


@pytest.mark.parametrize(("surface", "rule"), rows(Treatment.HONOURED))
async def test_honoured_field_changes_something(bench: TestBench, surface: str, rule: FieldRule) -> None:
    """Either what the engine is asked or what the client gets differs from the same request without the field."""
    if rule.name in ELSEWHERE:
        return
    beside = WITH.get(rule.name, {})
    value = {"include_usage": True} if rule.name == "stream_options" else EXAMPLES[surface][rule.name]
    plain, plain_sent = await ask(bench, surface, **beside)
    response, sent = await ask(bench, surface, **beside, **{rule.name: value})
    assert response.status_code == 200, response.text
    if rule.name == "best_of":
        refused, _ = await ask(bench, surface, n=2, best_of=3)
        assert refused.json()["error"]["param"] == "best_of"
        return
    if rule.name == "continue_final_message":
        assert plain.status_code == 200
    assert (sent, steady(response)) != (plain_sent, steady(plain))


@pytest.mark.parametrize(("surface", "rule"), rows(Treatment.HONOURED))
async def test_null_is_absent(bench: TestBench, surface: str, rule: FieldRule) -> None:
    if rule.name in ("messages", "prompt"):
        response, _ = await ask(bench, surface, **{rule.name: None})
        assert response.json()["error"]["param"] == rule.name
        return
    seed = {} if rule.name == "seed" else {"seed": 1}
    response, sent = await ask(bench, surface, **{rule.name: None}, **seed)
    _, plain = await ask(bench, surface)
    assert response.status_code == 200
    assert sent is not None
    assert plain is not None
    assert sent.params.with_(seed=1) == plain.params


@pytest.mark.parametrize(("place", "rule"), [each for kind in (Treatment.INERT, Treatment.PASSED) for each in rows(kind, (*BOTH, *Inside))])
async def test_inert_field_changes_nothing(bench: TestBench, place: str, rule: FieldRule) -> None:
    value: Any = {"key": "value"} if rule.name == "metadata" or rule.is_any else "text"
    plain, plain_sent = await ask(bench, place)
    response, sent = await ask(bench, place, **{rule.name: value})
    assert (response.status_code, sent, steady(response)) == (200, plain_sent, steady(plain))
    assert response.headers["x-headrace-ignored"] == (f"{place}.{rule.name}" if isinstance(place, Inside) else rule.name)
    assert "x-headrace-ignored" not in plain.headers
    if rule.is_any and rule.treatment is Treatment.INERT:
        return
    too_much: Any = {str(number): "x" for number in range(17)} if rule.name == "metadata" else "x" * (513 if not rule.is_any else 256 << 10)
    refused, _ = await ask(bench, place, **{rule.name: too_much})
    assert refused.json()["error"]["param"] == PREFIX.get(place, "") + rule.name


@pytest.mark.parametrize(("place", "rule"), rows(Treatment.REFUSED, (*BOTH, *Inside)))
async def test_refused_field_is_accepted_only_at_its_default(bench: TestBench, place: str, rule: FieldRule) -> None:
    """And then the answer names it. null is as good as absent: nothing is named."""
    _, plain_sent = await ask(bench, place)
    for off in (None, *rule.off):
        response, sent = await ask(bench, place, **{rule.name: off})
        assert (response.status_code, sent) == (200, plain_sent)
        named = f"{place}.{rule.name}" if isinstance(place, Inside) else rule.name
        assert response.headers.get("x-headrace-ignored") == (None if off is None else named)
    for on in ({"surely": "not off"}, "surely not off", 17, not rule.off[0] if rule.off and isinstance(rule.off[0], bool) else True):
        if on in rule.off:
            continue
        response, sent = await ask(bench, place, **{rule.name: on})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"], sent) == (
            400,
            PREFIX.get(place, "") + rule.name,
            "invalid_value",
            None,
        )
        assert rule.note in error["message"]


@pytest.mark.parametrize("surface", BOTH)
async def test_off_is_off_however_it_is_written(bench: TestBench, surface: str) -> None:
    """1 and 1.0 are one JSON number, true is another thing; obfuscation that is switched off is not asked for."""
    for value, expected in ((1, 200), (1.0, 200), (True, 400), (2, 400)):
        response, _ = await ask(bench, surface, length_penalty=value)
        assert response.status_code == expected, value
    for wanted, expected in ((False, 200), (None, 200), (True, 400)):
        response, _ = await ask(bench, surface, stream=True, stream_options={"include_obfuscation": wanted})
        assert response.status_code == expected, wanted
    assert response.json()["error"]["param"] == "stream_options.include_obfuscation"


@pytest.mark.parametrize("surface", BOTH)
async def test_unknown_field_is_refused_with_a_suggestion(bench: TestBench, surface: str) -> None:
    response, sent = await ask(bench, surface, temprature=0.5)
    error = response.json()["error"]
    assert (response.status_code, error["param"], sent) == (400, "temprature", None)
    assert "Did you mean temperature?" in error["message"]


@pytest.mark.parametrize(
    ("surface", "field", "remedy"),
    [
        (CHAT, "tolls", "Did you mean tools?"),
        (CHAT, "function", "GET /openapi.json lists every field."),  # not "functions", which is refused
        (COMPLETIONS, "bad_word", "GET /openapi.json lists every field."),
        (CHAT, "best_of", "It is a field of /v1/completions."),
        (COMPLETIONS, "top_logprobs", "It is a field of /v1/chat/completions."),
        (COMPLETIONS, "bestof", "Did you mean best_of?"),
    ],
)
async def test_a_suggestion_is_never_refused_next(bench: TestBench, surface: str, field: str, remedy: str) -> None:
    response, _ = await ask(bench, surface, **{field: 1})
    assert response.json()["error"]["message"] == f"{field}: expected a field this server knows. {remedy}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {"5": 1, "five": 2}}, 'logit_bias: expected token ids as keys, got "five".'),
        ({"logit_bias": {"5": True}}, "logit_bias.5: expected a number, got true."),
        ({"stop": {"a": None}}, 'stop: expected a string or a list, got {"a": null}.'),
        ({"temperature": "hot"}, 'temperature: expected a number or null, got "hot".'),
    ],
)
async def test_a_refusal_shows_what_was_given_as_json(bench: TestBench, fields: dict[str, Any], message: str) -> None:
    response, _ = await ask(bench, CHAT, **fields)
    assert response.json()["error"]["message"].startswith(message)


async def test_too_many_sequences_are_counted_in_the_refusal(bench: TestBench) -> None:
    message = (await bench.complete(prompt=["a", "b", "c"], n=64)).json()["error"]["message"]
    assert message == "n: expected at most 128 sequences (prompts times n), got 192. Send several requests."


@pytest.mark.parametrize("n", [0, 65, 1000])
async def test_a_count_out_of_range_is_refused_with_the_range_of_the_field(bench: TestBench, n: int) -> None:
    message = (await bench.complete(prompt=["a", "b", "c"], n=n)).json()["error"]["message"]
    assert message == f"n: expected an integer with 1 <= n <= 64, got {n}. Send several requests for more."


@pytest.mark.parametrize("place", [*BOTH, *Inside])
async def test_every_object_refuses_what_it_does_not_know(bench: TestBench, place: str) -> None:
    response, sent = await ask(bench, place, nonsense=1)
    error = response.json()["error"]
    assert (response.status_code, error["param"], sent) == (400, f"{PREFIX.get(place, '')}nonsense", None)


async def test_everything_that_changed_nothing_is_named(bench: TestBench) -> None:
    marked = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    response, _ = await ask(
        bench,
        CHAT,
        messages=[{"role": "system", "content": [marked, marked]}, {"role": "user", "content": "Hi", "name": None}],
        store=False,
        priority=0,
        reasoning=None,
        user="me",
        temperature=0,
    )
    assert response.status_code == 200
    assert response.headers["x-headrace-ignored"] == "store, priority, user, messages[].content[].cache_control"


@pytest.mark.parametrize(
    ("given", "expected"), [(0, "standard"), (1, "standard"), (2, "batch"), ("batch", "batch"), ("standard", "standard")]
)
async def test_priority_zero_is_vllms_default(bench: TestBench, given: int | str, expected: str) -> None:
    response, sent = await ask(bench, CHAT, priority=given)
    assert response.status_code == 200
    assert sent is not None
    assert sent.priority.name.lower() == expected
    assert response.headers.get("x-headrace-ignored") == ("priority" if given == 0 else None)


@pytest.mark.parametrize(("policy", "named"), [*((each, "priority") for each in ("fcfs", "sjf", "fair")), ("priority", None), ("", None)])
@pytest.mark.parametrize("surface", BOTH)
async def test_a_priority_is_named_as_ignored_where_the_queue_has_none(
    bench: TestBench, surface: str, policy: str, named: str | None
) -> None:
    info = bench.replica.info
    assert info is not None
    bench.replica.info = replace(info, model=replace(info.model, queue_policy=policy))
    response, _ = await ask(bench, surface, priority="batch")
    assert response.headers.get("x-headrace-ignored") == named
    without, _ = await ask(bench, surface)
    assert "x-headrace-ignored" not in without.headers


@pytest.mark.parametrize("given", ["0", "1", True, 3, -1, "first", "premium"])
async def test_other_priorities_are_refused(bench: TestBench, given: Any) -> None:
    response, _ = await ask(bench, CHAT, priority=given)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")


@pytest.mark.parametrize("surface", BOTH)
async def test_a_single_model_needs_no_name(text: TextModel, surface: str) -> None:
    body = {name: value for name, value in BASE[surface].items() if name != "model"}
    async with open_bench(text) as bench:
        for given in (body, {**body, "model": None}):
            response = await bench.client.post(surface, json=given)
            assert (response.status_code, response.json()["model"]) == (200, MODEL)
    models = [{"name": name, "folder": "/nowhere", "replicas": [{"name": name, "address": "unix:/nowhere"}]} for name in ("one", "two")]
    async with open_bench(text, models=models) as bench:
        response = await bench.client.post(surface, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "model")
        assert "one of: one, two" in error["message"]


READ = {"enable_thinking": False}


@pytest.mark.parametrize("off", [None, False, 0, ""])
async def test_a_variable_no_template_reads_may_ask_for_nothing(bench: TestBench, off: object) -> None:
    """Clients of one model's switch send it to every model."""
    plain, plain_sent = await ask(bench, CHAT, chat_template_kwargs=READ)
    response, sent = await ask(bench, CHAT, chat_template_kwargs={**READ, "thinking": off})
    assert (response.status_code, sent) == (200, plain_sent)
    assert response.headers["x-headrace-ignored"] == "chat_template_kwargs.thinking"
    assert "x-headrace-ignored" not in plain.headers


@pytest.mark.parametrize("on", [True, 1, "yes", [], {}])
async def test_a_variable_no_template_reads_may_not_ask_for_something(bench: TestBench, on: object) -> None:
    response, sent = await ask(bench, CHAT, chat_template_kwargs={"thinking": on})
    assert (response.status_code, response.json()["error"]["param"], sent) == (400, "chat_template_kwargs.thinking", None)


@pytest.mark.parametrize(
    "name", ["messages", "tools", "loop", "self", "bos_token", "x\r\nset-cookie: a", "x y", "\u00e9", "x" * 65, "__class__.x"]
)
async def test_names_that_are_no_plain_variables_are_refused(bench: TestBench, name: str) -> None:
    response, sent = await ask(bench, CHAT, chat_template_kwargs={name: False})
    assert (response.status_code, sent) == (400, None)
    assert response.json()["error"]["param"].startswith("chat_template_kwargs.")


async def test_many_variables_are_named_together(bench: TestBench) -> None:
    response, _ = await ask(bench, CHAT, chat_template_kwargs={f"x{number}": None for number in range(1000)})
    assert (response.status_code, response.headers["x-headrace-ignored"]) == (200, "chat_template_kwargs")


def integers(surface: str) -> list[str]:
    """The fields of a body that hold an integer."""
    integral = [name for name, value in EXAMPLES[surface].items() if type(value) is int]
    floats = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    return [name for name in (*integral, "priority") if name not in floats]


@pytest.mark.parametrize(("surface", "name"), [(surface, name) for surface in BOTH for name in integers(surface)])
async def test_an_integer_written_with_a_point_is_that_integer(bench: TestBench, surface: str, name: str) -> None:
    value = 1 if name == "priority" else EXAMPLES[surface][name]
    beside = WITH.get(name, {})
    plain, plain_sent = await ask(bench, surface, **beside, **{name: value})
    pointed, sent = await ask(bench, surface, **beside, **{name: float(value)})
    assert (pointed.status_code, sent, steady(pointed)) == (200, plain_sent, steady(plain))
    odd, _ = await ask(bench, surface, **beside, **{name: value + 0.5})
    assert (odd.status_code, odd.json()["error"]["param"]) == (400, name)


async def test_ids_may_be_written_with_a_point_wherever_they_stand(bench: TestBench) -> None:
    for prompt, meant in (([5.0, 6, 7.0], [5, 6, 7]), ([[5.0, 6], [7]], [[5, 6], [7]])):
        _, plain = await ask(bench, COMPLETIONS, prompt=meant)
        response, sent = await ask(bench, COMPLETIONS, prompt=prompt)
        assert (response.status_code, sent) == (200, plain)
    _, sent = await ask(bench, CHAT, stop_token_ids=[5.0], logit_bias={"5": 1.0})
    assert sent is not None
    assert sent.params.stop_token_ids == (5,)
    tokens = await bench.client.post("/detokenize", json={"model": MODEL, "tokens": [5.0, 6]})
    assert tokens.json() == (await bench.client.post("/detokenize", json={"model": MODEL, "tokens": [5, 6]})).json()
    for path, body, param in (
        (COMPLETIONS, {"prompt": [5.0, 6.5]}, "prompt[1]"),
        (CHAT, {**BASE[CHAT], "stop_token_ids": [5.0, 6.5]}, "stop_token_ids[1]"),
        (COMPLETIONS, {"prompt": "x", "seed": 1e300}, "seed"),
        (COMPLETIONS, {"prompt": "x", "seed": 2.0**60 + 512}, "seed"),
        ("/detokenize", {"tokens": [0.1]}, "tokens[0]"),
    ):
        error = (await bench.client.post(path, json={**body, "model": MODEL})).json()["error"]
        assert error["param"] == param


@pytest.mark.parametrize("fields", [{"top_p": 0}, {"top_p": 0.0, "temperature": 1}, {"top_p": -0.0, "temperature": 0}])
async def test_a_top_p_of_zero_is_greedy(bench: TestBench, fields: dict[str, Any]) -> None:
    _, sent = await ask(bench, CHAT, **fields)
    assert sent is not None
    assert sent.params.is_greedy
    for outside in (-0.1, 1.01):
        response, _ = await ask(bench, CHAT, top_p=outside)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "top_p")
