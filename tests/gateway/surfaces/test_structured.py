"""Tests that every dialect's field for structured output reaches the engine as one grammar, and that a refusal names the client's own
field.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from gateway_kit import MODEL, TestBench, events_of, eventually, open_bench, serving

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import CANNOT_CONTINUE, MAX_GRAMMAR_BYTES, Grammar, GrammarKind, ReasoningSpan
from headrace.core.request import EngineRequest
from headrace.core.update import FinishReason, SequenceUpdate
from headrace.gateway.surfaces.endpoint import MAX_INLINE_BYTES
from headrace.text.folder import TextModel
from headrace.wire.stream import ReplicaStream

pytestmark = pytest.mark.loop

SCHEMA = {
    "type": "object",
    "properties": {"zebra": {"type": "integer"}, "apple": {"type": "number", "maximum": 1e22}},
    "required": ["zebra"],
}
SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":"))
BY_SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT)
BY_REGEX = Grammar(GrammarKind.REGEX, "[a-z]+")
BY_LARK = Grammar(GrammarKind.LARK, 'start: "a"')
BY_GBNF = Grammar.ebnf('root ::= "a"')
ANY_OBJECT = Grammar.json_object()
YES_OR_NO = Grammar.choice(["yes", "no"])

THINK = ReasoningSpan(start="<think>", end="</think>")
"""Of the bench's template."""

FIELDS: list[tuple[dict[str, Any], Grammar | None, str]] = [
    ({"response_format": {"type": "text"}}, None, ""),
    ({"response_format": {"type": "text", "json_schema": None}}, None, ""),
    ({"response_format": {"type": "json_object"}}, ANY_OBJECT, "response_format"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, BY_SCHEMA, "response_format.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": SCHEMA}}},
        BY_SCHEMA,
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, BY_SCHEMA, "response_format.json_schema.schema"),
    ({"structured_outputs": {"json": SCHEMA}}, BY_SCHEMA, "structured_outputs.json"),
    ({"structured_outputs": {"json": SCHEMA_TEXT, "regex": None, "json_object": False}}, BY_SCHEMA, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "[a-z]+"}}, BY_REGEX, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, YES_OR_NO, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, BY_LARK, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": 'root ::= "a"', "whitespace_pattern": None}}, BY_GBNF, "structured_outputs.grammar"),
    ({"structured_outputs": {"json_object": True}}, ANY_OBJECT, "structured_outputs.json_object"),
    ({"guided_json": SCHEMA}, BY_SCHEMA, "guided_json"),
    ({"guided_json": SCHEMA_TEXT, "guided_decoding_backend": "auto"}, BY_SCHEMA, "guided_json"),
    ({"guided_regex": "[a-z]+"}, BY_REGEX, "guided_regex"),
    ({"guided_choice": ["yes", "no"]}, YES_OR_NO, "guided_choice"),
    ({"guided_grammar": 'root ::= "a"'}, BY_GBNF, "guided_grammar"),
    ({"regex": "[a-z]+"}, BY_REGEX, "regex"),
    ({"ebnf": 'root ::= "a"'}, BY_GBNF, "ebnf"),
    ({"json_schema": SCHEMA_TEXT}, BY_SCHEMA, "json_schema"),
    ({"json_schema": SCHEMA}, BY_SCHEMA, "json_schema"),
    ({"grammar": 'root ::= "a"'}, BY_GBNF, "grammar"),
    ({"grammar": ""}, None, ""),
    ({"format": "json"}, ANY_OBJECT, "format"),
    ({"format": SCHEMA}, BY_SCHEMA, "format"),
    ({"format": ""}, None, ""),
]
"""Fields of a body, the grammar that they ask for, and the field that errors name."""

ASKING = [(fields, grammar, field) for fields, grammar, field in FIELDS if grammar is not None]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"prompt": "Hello"},
}


async def ask(bench: TestBench, path: str, fields: dict[str, Any]) -> httpx2.Response:
    return await bench.client.post(path, json={"model": MODEL, **PATHS[path], **fields})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("fields", "grammar", "field"), FIELDS)
async def test_every_dialects_field_becomes_one_grammar(
    bench: TestBench, path: str, fields: dict[str, Any], grammar: Grammar | None, field: str
) -> None:
    response = await ask(bench, path, fields)
    assert response.status_code == 200, response.text
    sent = bench.replica.requests[-1].grammar
    assert sent is None or sent.reasoning == (THINK if "chat" in path else None)
    assert (sent and replace(sent, reasoning=None)) == grammar


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize(("fields", "grammar", "field"), ASKING)
async def test_a_refusal_of_the_engine_names_the_clients_field(
    bench: TestBench, fields: dict[str, Any], grammar: Grammar, field: str, is_streaming: bool
) -> None:
    """Also for a stream, which has not begun: the status is the refusal's own. The word in the limit is not the field's name."""

    def refuse(request: EngineRequest, stream: ReplicaStream) -> None:
        stream.reject(InvalidRequest("grammar", "at most 16 MB per grammar once compiled", None, "Send a smaller grammar."))

    bench.replica.on_submit = refuse
    for path in PATHS:
        response = await ask(bench, path, {**fields, "stream": is_streaming})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, field, "invalid_value")
        assert error["message"] == f"{field}: expected at most 16 MB per grammar once compiled. Send a smaller grammar."


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_an_output_that_its_own_grammar_ended_is_the_clients_error_and_says_why(bench: TestBench, is_streaming: bool) -> None:
    """A server error would have clients send it again, to end in the same way."""

    def begin_and_fail(request: EngineRequest, stream: ReplicaStream) -> None:
        ids = bench.replica.text.tokenizer.encode("aa", add_special_tokens=False)
        stream.put(SequenceUpdate(request_id=request.request_id, epoch=0, index=0, token_ids=tuple(ids)))
        words = CANNOT_CONTINUE + "too many states"
        stream.put(SequenceUpdate(request_id=request.request_id, epoch=0, index=0, finish=FinishReason.ERROR, error=words))

    bench.replica.on_submit = begin_and_fail
    response = await bench.chat(guided_regex="a{2,900}", stream=is_streaming)
    if is_streaming:
        error = events_of(response.text)[-1]["error"]
    else:
        assert response.status_code == 400
        error = response.json()["error"]
    assert (error["param"], error["code"]) == ("guided_regex", "invalid_value")
    assert error["message"].endswith("output can be continued within its limits. This output ended: too many states")


@pytest.mark.parametrize("path", PATHS)
async def test_an_end_that_is_ignored_does_not_go_with_a_grammar(bench: TestBench, path: str) -> None:
    response = await ask(bench, path, {"guided_regex": "a", "ignore_eos": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "ignore_eos")
    assert not bench.replica.requests


@pytest.mark.parametrize("choice", [None, "auto", "required", {"function": {"name": "now"}}])
async def test_a_document_may_stand_where_calls_may_but_not_where_they_must(bench: TestBench, choice: object) -> None:
    tools = [{"function": {"name": "now"}}]
    response = await bench.chat(tools=tools, tool_choice=choice, response_format={"type": "json_object"})
    if choice in (None, "auto"):
        assert response.status_code == 200
        sent = bench.replica.requests[-1].grammar
        assert sent is not None
        assert sent.kind is GrammarKind.LARK
        assert sent.source.startswith("start: ")
        assert "| document" in sent.source
        return
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")
    assert 'tool_choice "auto" or "none" beside it' in response.json()["error"]["message"]


async def test_only_a_schema_may_stand_beside_functions(bench: TestBench) -> None:
    tools = [{"function": {"name": "now"}}]
    for fields in ({"guided_regex": "a"}, {"guided_choice": ["a"]}):
        response = await bench.chat(tools=tools, **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(fields)))
        assert (await bench.chat(tools=tools, tool_choice="none", **fields)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"guided_json": {}, "regex": "a"}, "regex", "absent beside guided_json"),
        ({"response_format": {"type": "json_object"}, "format": "json"}, "format", "absent beside response_format"),
        (
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs",
            "exactly one of json, regex, choice, grammar and json_object",
        ),
        ({"structured_outputs": {"json": None}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "Use a grammar in Lark"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "absent or null"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "Did you mean structured_outputs.json?"),
        ({"response_format": {}}, "response_format.type", "it is required"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "it is required"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "it"}}},
            "response_format.json_schema.schema",
            "it is required",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "one of text, json_object, json_schema"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.type", "beside a schema"),
        (
            {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}},
            "response_format.schema",
            "absent beside response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
            "response_format.json_schema.strict",
            "",
        ),
        ({"guided_json": '{"type": '}, "guided_json", "a JSON schema, as an object or as its JSON text"),
        ({"guided_json": '{"a": 1, "a": 2}'}, "guided_json", "The body names it twice"),
        ({"guided_json": "[1]"}, "guided_json", "a JSON object"),
        ({"guided_json": "[" * 40 + "]" * 40}, "guided_json", "nested at most 32 deep"),
        ({"guided_json": 5}, "guided_json", "a string or an object or null"),
        ({"guided_choice": []}, "guided_choice", "at least one text"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "none of them empty"),
        ({"guided_choice": [1]}, "guided_choice[0]", "a string"),
        ({"guided_regex": " "}, "guided_regex", "a non-empty text"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "absent or null"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "llguidance compiles every grammar"),
        ({"ebnf": 'root ::= "a" b'}, "ebnf", "The rule b is not defined"),
        ({"format": "yaml"}, "format", 'expected "json" or a JSON schema'),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "regex", f"at most {MAX_GRAMMAR_BYTES} bytes"),
        (
            {"response_format": {"type": "json_object", "schema": {"const": "\u00e9" * (MAX_GRAMMAR_BYTES // 2)}}},
            "response_format.schema",
            f"at most {MAX_GRAMMAR_BYTES} bytes",
        ),
    ],
)
async def test_what_is_no_grammar_is_refused_by_name(bench: TestBench, fields: dict[str, Any], param: str, message: str) -> None:
    for path in PATHS:
        response = await ask(bench, path, fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert message in error["message"]
    assert not bench.replica.requests


async def test_what_changes_nothing_is_named(bench: TestBench) -> None:
    schema = {"name": "it", "description": "a thing", "strict": True, "schema": SCHEMA}
    response = await bench.chat(response_format={"type": "json_schema", "json_schema": schema})
    named = [f"response_format.json_schema.{name}" for name in ("name", "description", "strict")]
    assert response.headers["x-headrace-ignored"] == ", ".join(named)


@pytest.mark.parametrize("path", PATHS)
async def test_a_large_schema_is_read_by_a_text_worker(bench: TestBench, path: str) -> None:
    """Order, numbers and characters beyond ASCII survive the way there and back."""
    names = {f"p{number}\u00e9": {"const": 0.1 * number} for number in range(2000, 0, -1)}
    schema = {"type": "object", "properties": names, "required": list(names), "maximum": 10**30}
    assert len(json.dumps(schema)) > 3 * MAX_INLINE_BYTES
    response = await ask(bench, path, {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}})
    assert response.status_code == 200, response.text
    grammar = bench.replica.requests[-1].grammar
    assert grammar is not None
    assert grammar.source == json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize("rule", ["::=", "\\u003a:="])
async def test_gbnf_of_some_length_is_rewritten_by_a_text_worker(bench: TestBench, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    jobs: list[str] = []
    pool = bench.gateway.service.text_pool
    parse_body = pool.parse_body

    async def parsing(path: str, *args: Any, **kwargs: Any) -> Any:
        jobs.append(path)
        return await parse_body(path, *args, **kwargs)

    monkeypatch.setattr(pool, "parse_body", parsing)
    for count in (10, 1000):
        grammar = "root ::= " + "x " * count + '\\nx ::= \\"a\\"'
        body = f'{{"model": "{MODEL}", "prompt": "Hello", "ebnf": "{grammar.replace("::=", rule)}"}}'
        response = await bench.client.post("/v1/completions", content=body.encode(), headers={"content-type": "application/json"})
        assert response.status_code == 200, response.text
    assert jobs == ["/v1/completions"]


@pytest.mark.parametrize(("fields", "grammar", "field"), ASKING)
async def test_a_foreign_server_gets_the_clients_own_field(text: TextModel, fields: dict[str, Any], grammar: Grammar, field: str) -> None:
    """The far server is a gateway of ours, which reads them all."""
    async with open_bench(text) as far, serving(far.gateway) as port:
        models = [{"name": MODEL, "upstreams": [{"url": f"http://127.0.0.1:{port}/v1"}]}]
        async with open_bench(text, models=models) as near:
            for path in PATHS:
                response = await ask(near, path, fields)
                assert response.status_code == 200, response.text
                sent = far.replica.requests[-1].grammar
                assert sent is not None
                assert replace(sent, reasoning=None) == grammar


async def test_the_memory_of_a_grammar_is_counted(text: TextModel) -> None:
    """Both forms of it, beside the body: the one for our engines and the one for servers that read it themselves."""
    async with open_bench(text) as bench:
        bench.replica.go.clear()
        held = []
        for regex in ("a", "a" * 10_000):
            task = asyncio.create_task(bench.chat(regex=regex))
            await eventually(lambda: bool(bench.replica.requests))
            held.append(bench.gateway.service.memory.prompts.held)
            bench.replica.go.set()
            assert (await task).status_code == 200
            bench.replica.requests.clear()
            bench.replica.go.clear()
        assert held[1] - held[0] >= 30_000 - 16
