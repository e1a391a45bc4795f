"""Tests structured output through the official `openai` client, from a model with random weights: nothing matches by luck."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import pytest
from http_kit import ask
from openai import BadRequestError, LengthFinishReasonError, OpenAI
from openai.types.chat import ChatCompletionUserMessageParam
from plain_loop import Checkpoint
from pydantic import BaseModel, ConfigDict
from server_kit import KEY, Server

from tests.e2e.test_hostile import calm_neighbourhood

pytestmark = pytest.mark.process

MESSAGES: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
AT_ONCE: dict[str, Any] = {"enable_thinking": False}
"""A grammar binds after the reasoning, of which random weights do not find the end."""


class Size(BaseModel):
    model_config = ConfigDict(extra="forbid")

    unit: Literal["cm", "in"]
    is_round: bool


class Thing(BaseModel):
    """Bounded: a model that picks any allowed token comes to its end."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["box", "ball"]
    sizes: tuple[Size, Size]
    owner: Literal["me"] | None


SCHEMA = Thing.model_json_schema()
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY, max_retries=0, timeout=60.0) as client:
        yield client


def test_the_parse_helper_gives_an_object(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="random", messages=MESSAGES, response_format=Thing, n=3, seed=5, max_tokens=300, extra_body=AT_ONCE
    )
    assert len(answer.choices) == 3
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Thing)
        assert list(json.loads(choice.message.content or "")) == ["name", "sizes", "owner"]


def test_a_stream_is_the_whole_answer_and_its_helper_parses_it(client: OpenAI) -> None:
    whole = client.chat.completions.create(
        model="random", messages=MESSAGES, extra_body={**AT_ONCE, "response_format": FORMAT}, seed=6, max_tokens=300
    )
    with client.chat.completions.stream(
        model="random", messages=MESSAGES, response_format=Thing, seed=6, max_tokens=300, extra_body=AT_ONCE
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert isinstance(final.choices[0].message.parsed, Thing)


def test_log_probabilities_come_with_every_token(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="random",
        messages=MESSAGES,
        response_format={"type": "json_object"},
        logprobs=True,
        top_logprobs=2,
        seed=7,
        max_tokens=12,
        extra_body=AT_ONCE,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) in (answer.usage.completion_tokens, answer.usage.completion_tokens - 1)  # an end token has no text
    assert "".join(token.token for token in logprobs.content).startswith("{")


def test_a_stop_string_ends_the_document(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="random",
        messages=MESSAGES,
        extra_body={**AT_ONCE, "response_format": FORMAT},
        stop='"sizes"',
        seed=8,
        max_tokens=300,
    )
    content = answer.choices[0].message.content
    assert content is not None
    assert re.fullmatch(r'\{\s*"name"\s*:\s*"(box|ball)"\s*,\s*', content)
    assert answer.choices[0].finish_reason == "stop"


def test_a_document_that_is_cut_says_so(client: OpenAI) -> None:
    with pytest.raises(LengthFinishReasonError):
        client.chat.completions.parse(model="random", messages=MESSAGES, response_format=Thing, max_tokens=3, extra_body=AT_ONCE)


REGEX = r"[A-Z]{2}-[0-9]{3}( ok)?"

FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": REGEX}, REGEX),
    ({"structured_outputs": {"regex": REGEX}}, REGEX),
    ({"regex": REGEX}, REGEX),
    ({"guided_choice": ["yes", "no", "may be"]}, "yes|no|may be"),
    ({"structured_outputs": {"choice": ["\u00e9t\u00e9", "\U0001f600"]}}, "\u00e9t\u00e9|\U0001f600"),
    ({"guided_grammar": 'start: "a" | "b" start "c"'}, "b*ac*"),
    ({"ebnf": 'root ::= [ab]{3} ("c" | "d")'}, "[ab]{3}[cd]"),
    ({"grammar": 'root ::= "x" | "y" "z"'}, "x|yz"),
    ({"json_schema": {"enum": ["a", 1]}}, '"a"|1'),
    ({"guided_json": json.dumps({"const": [None]})}, r"\[\s*null\s*\]"),
    ({"format": {"type": "boolean"}}, "true|false"),
    ({"response_format": {"type": "json_object", "schema": {"const": {}}}}, r"\{\s*\}"),
]


@pytest.mark.parametrize(("fields", "expected"), FIELDS)
def test_every_dialects_field_binds_the_answer(client: OpenAI, fields: dict[str, Any], expected: str) -> None:
    chat = client.chat.completions.create(model="random", messages=MESSAGES, seed=1, max_tokens=200, extra_body={**AT_ONCE, **fields})
    plain = client.completions.create(model="random", prompt="Hello", seed=2, max_tokens=200, extra_body=fields)
    for text, finish in (
        (chat.choices[0].message.content, chat.choices[0].finish_reason),
        (plain.choices[0].text, plain.choices[0].finish_reason),
    ):
        assert finish == "stop", text
        assert text is not None
        assert re.fullmatch(expected, text), text


def test_optional_properties_and_the_order_of_the_schema(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in ("zulu", "alpha", "mike")},
        "required": ["mike"],
        "additionalProperties": False,
    }
    for seed in range(4):
        body = {**AT_ONCE, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
        answer = client.chat.completions.create(model="random", messages=MESSAGES, seed=seed, max_tokens=200, extra_body=body)
        value = json.loads(answer.choices[0].message.content or "")
        jsonschema.validate(value, schema)
        assert list(value) == [name for name in ("zulu", "alpha", "mike") if name in value]


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "(a+)+" * 40 + "{1000}"}, "guided_regex"),
    ({"guided_regex": "((a{1,1000}){1,1000}){1,1000}"}, "guided_regex"),
    ({"regex": "(?=a)b"}, "regex"),
    ({"structured_outputs": {"regex": r"(a)\1"}}, "structured_outputs.regex"),
    ({"guided_regex": "[a-z"}, "guided_regex"),
    ({"guided_grammar": "start: start"}, "guided_grammar"),
    ({"guided_grammar": "start: missing"}, "guided_grammar"),
    ({"ebnf": 'root ::= ("a"{1,9999}){1,9999}'}, "ebnf"),
    ({"guided_json": {"$ref": "https://example.com/schema.json"}}, "guided_json"),
    ({"guided_json": {"$ref": "#"}}, "guided_json"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {"pattern": "a"}}}}},
        "response_format.json_schema.schema",
    ),
    ({"guided_json": {"enum": [f"{number}" * 50 for number in range(4000)]}}, "guided_json"),
    ({"guided_json": {"type": "array", "items": {"type": "string"}, "minItems": 10**9, "maxItems": 10**9}}, "guided_json"),
    ({"guided_json": {"type": "string", "pattern": "(" * 30 + "a" + "{1,50})" * 30}}, "guided_json"),
    ({"guided_json": {"type": "object", "properties": {"a": {"type": "nonsense"}}}}, "guided_json"),
]
"""Fields that nobody can match, or that take too much to compile, and the field that the refusal names."""


async def test_hostile_grammars_are_refused_and_a_neighbour_streams_on(server: Server, random_checkpoint: Checkpoint) -> None:
    """Each is answered 400 by its field's name, or served; never a 500, and no engine starts anew."""
    body = {"model": "random", "messages": MESSAGES, "max_tokens": 8, **AT_ONCE}
    async with calm_neighbourhood(server, random_checkpoint):
        replies = await asyncio.gather(
            *(ask(server.port, "POST", "/v1/chat/completions", {**body, **fields}, key=KEY) for fields, _ in HOSTILE)
        )
    statuses = [reply.status for reply in replies]
    assert set(statuses) <= {200, 400}, statuses
    assert statuses.count(400) >= 10, statuses
    for (_, field), reply in zip(HOSTILE, replies, strict=True):
        if reply.status == 400:
            assert reply.error["param"] == field
            assert reply.error["message"].startswith(f"{field}: expected")


def test_a_refusal_reads_as_the_clients_mistake(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match=r'response_format\.json_schema\.schema: expected .* got "not"') as refused:
        client.chat.completions.create(
            model="random",
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}},
        )
    assert refused.value.param == "response_format.json_schema.schema"
