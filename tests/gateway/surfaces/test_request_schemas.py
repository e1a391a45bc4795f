"""Tests that /openapi.json is as strict as the checks: a body that its schemas allow is taken, one that breaks a bound is refused
by both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
import pytest
from gateway_kit import TestBench
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.core.sampling import SamplingParams
from headrace.core.tools import MAX_TOOLS
from headrace.gateway.access.principal import Principal
from headrace.gateway.generation.parsed_request import MAX_SEQUENCES
from headrace.gateway.surfaces import chat, completions, openapi
from headrace.gateway.surfaces.dialect.field_table import BOTH, CHAT, COMPLETIONS, RULES
from headrace.gateway.surfaces.dialect.schemas import READERS, VLLM_KINDS
from headrace.gateway.surfaces.routes import ENDPOINTS
from headrace.policy.limits.tier import Tier

pytestmark = pytest.mark.loop

NAMES = {CHAT: "ChatRequest", COMPLETIONS: "CompletionRequest"}
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}]},
    COMPLETIONS: {"prompt": "Hello"},
}


@cache
def schemas() -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(openapi.document(ENDPOINTS))["components"]["schemas"]
    return found


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema behind a reference."""
    if "$ref" not in schema:
        return schema
    found: dict[str, Any] = schemas()[schema["$ref"].rsplit("/", 1)[1]]
    return found


# ---------------------------------------------------------------------------------------------------- a validator of what is used here


KINDS = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}


def allows(schema: dict[str, Any], value: object) -> bool:
    """JSON Schema's judgement, for the keywords that our documents use."""
    schema = resolved(schema)
    if "anyOf" in schema and not any(allows(each, value) for each in schema["anyOf"]):
        return False
    if "enum" in schema and not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in schema["enum"]):
        return False
    if "type" in schema and not any(is_kind(kind, value) for kind in [schema["type"]] if isinstance(kind, str)):
        return isinstance(schema["type"], list) and any(allows({**schema, "type": kind}, value) for kind in schema["type"])
    match value:
        case bool():
            return True
        case int() | float():
            low, above, high = (schema.get(word) for word in ("minimum", "exclusiveMinimum", "maximum"))
            is_high_enough = (low is None or value >= low) and (above is None or value > above)
            return is_high_enough and (high is None or value <= high)
        case str():
            is_long_enough = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
            return is_long_enough and ("pattern" not in schema or re.search(schema["pattern"], value) is not None)
        case list():
            items = schema.get("items", {})
            return schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)) and all(
                allows(items, item) for item in value
            )
        case dict():
            return (
                len(value) <= schema.get("maxProperties", len(value))
                and all(allows_field(schema, *pair) for pair in value.items())
                and (set(schema.get("required", ())) <= set(value))
            )
        case _:
            return True


def is_kind(kind: str, value: object) -> bool:
    if kind in ("integer", "number"):
        return isinstance(value, int if kind == "integer" else int | float) and not isinstance(value, bool)
    return isinstance(value, KINDS[kind])


def allows_field(schema: dict[str, Any], name: str, value: object) -> bool:
    if name in schema.get("properties", {}):
        return allows(schema["properties"][name], value)
    others = schema.get("additionalProperties", True)
    return allows(schema.get("propertyNames", {}), name) and (allows(others, value) if isinstance(others, dict) else others)


# ------------------------------------------------------------------------------------------------------------------- allowed bodies


TEXT = st.sampled_from("abcXYZ 0190_-.!")
"""ASCII: `stop` is bounded in bytes, which a schema cannot say."""


def values_of(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a schema allows."""
    schema = resolved(schema)
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema:
        return st.one_of([values_of(each) for each in schema["anyOf"]])
    if not schema:  # anything
        return st.one_of(st.booleans(), st.integers(0, 9), st.text(TEXT), st.dictionaries(st.text(TEXT), st.booleans(), max_size=2))
    if isinstance(schema["type"], list):
        return st.one_of([values_of({**schema, "type": kind}) for kind in schema["type"]])
    match schema["type"]:
        case "integer":
            return st.sampled_from([schema["minimum"], schema["maximum"]]) | st.integers(schema["minimum"], schema["maximum"])
        case "number":
            low = schema.get("minimum", schema.get("exclusiveMinimum", -1e300))
            return st.floats(low, schema.get("maximum", 1e300), exclude_min="exclusiveMinimum" in schema)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "string":
            if "contentMediaType" in schema:
                return st.sampled_from(['{"type": "integer"}', "{}"])
            if schema.get("pattern") == r"\S":
                return st.text(TEXT, max_size=20).map(lambda text: "x" + text)
            if "pattern" in schema:
                return st.from_regex(schema["pattern"], fullmatch=True)
            return st.text(TEXT, min_size=schema.get("minLength", 0), max_size=min(schema.get("maxLength", 20), 20))
        case "array":
            return st.lists(values_of(schema["items"]), min_size=schema.get("minItems", 0), max_size=min(schema.get("maxItems", 4), 4))
        case kind:
            assert kind == "object"
            return objects_of(schema)


def objects_of(schema: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    if "properties" not in schema and "additionalProperties" not in schema:
        return st.sampled_from([{}, {"type": "object", "properties": {"a": {"type": "string"}}}])
    if "properties" not in schema:
        is_id = "pattern" in schema.get("propertyNames", {})
        names = st.integers(0, 999_999_999).map(str) if is_id else st.text(TEXT)
        return st.dictionaries(names, values_of(schema["additionalProperties"]), max_size=3)
    fields = {name: values_of(each) for name, each in schema["properties"].items()}
    required = {name: fields.pop(name) for name in schema.get("required", ())}
    # All optional fields at once would end in a body of nulls and offs: a few of them meet each other.
    some = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True) if fields else st.just([])
    return some.flatmap(lambda chosen: st.fixed_dictionaries({**required, **{name: fields[name] for name in chosen}}))


def in_agreement(body: dict[str, Any], surface: str) -> dict[str, Any]:
    """The body with the rules between fields kept, which no schema of one field can say. docs/api.md has them beside the fields."""
    made = dict(body)
    for name in ("max_completion_tokens", "best_of"):
        made.pop(name, None)
    if made.get("top_logprobs") is not None:
        made["logprobs"] = True
    if made.get("max_tokens") == 0 and surface == COMPLETIONS:
        made["echo"] = True
    if made.get("min_tokens"):
        made["max_tokens"] = made["min_tokens"]
    if made.get("stream_options") is not None:
        made["stream"] = True
        if made["stream_options"].get("continuous_usage_stats"):
            made["stream_options"] = {**made["stream_options"], "include_usage": True}
    if made.get("n") and isinstance(made.get("prompt"), list):
        made["n"] = min(made["n"], max(1, MAX_SEQUENCES // max(1, len(made["prompt"]))))
    if made.get("stream"):
        made.pop("prompt_logprobs", None)
    for name in [name for name in READERS if made.get(name) is not None][1:]:
        del made[name]
    if made.get("response_format") is not None:
        made["response_format"] = agreeing_format(made["response_format"])
    if made.get("structured_outputs") is not None:
        given = [(name, value) for name, value in made["structured_outputs"].items() if name in (*VLLM_KINDS, "json_object") and value]
        made["structured_outputs"] = dict(given[:1] or [("json_object", True)])
    return in_agreement_on_calls(made) if surface == CHAT else made


def in_agreement_on_calls(body: dict[str, Any]) -> dict[str, Any]:
    """The same for functions and messages with calls."""
    made = {**body, "messages": [message_in_agreement(message) for message in body["messages"]]}
    tools: dict[str, Any] = {}
    for number, tool in enumerate(made.get("tools") or ()):
        name = tool["function"]["name"]
        name = name if name not in tools else f"other-{number}"
        tools[name] = {**tool, "function": {**tool["function"], "name": name}}
    choice = made.get("tool_choice")
    if choice == "required" or isinstance(choice, dict):
        choice, names = (choice, ["now"]) if choice == "required" else agreeing_choice(choice)
        tools |= {name: {"function": {"name": name}} for name in names if name not in tools and len(tools) + len(names) <= MAX_TOOLS}
        made["tool_choice"] = choice if choice == "required" or set(names) <= set(tools) else "auto"
    return {**made, "tools": list(tools.values())} if tools else made


def agreeing_choice(choice: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A choice of one function or of some, with the field of its type alone, and the names in it."""
    if choice.get("type") != "allowed_tools":
        function = choice.get("function") or {"name": "now"}
        return {"type": "function", "function": function}, [function["name"]]
    allowed = choice.get("allowed_tools") or {"mode": "auto"}
    allowed["tools"] = allowed.get("tools") or [{"function": {"name": "now"}}]
    return {"type": "allowed_tools", "allowed_tools": allowed}, [tool["function"]["name"] for tool in allowed["tools"]]


def message_in_agreement(message: dict[str, Any]) -> dict[str, Any]:
    made = dict(message)
    if made["role"] != "assistant":
        for name in ("tool_calls", "reasoning_content", "reasoning"):
            made.pop(name, None)
    if made["role"] != "tool":
        made.pop("tool_call_id", None)
    if made.get("reasoning") and made.get("reasoning_content") is not None:
        made["reasoning_content"] = made["reasoning"]
    if made.get("content") is None and not made.get("tool_calls"):
        made["content"] = "x"
    return made


def agreeing_format(made: dict[str, Any]) -> dict[str, Any]:
    """One schema beside the types that take one, and one where it is required."""
    found = made.get("json_schema")
    if made["type"] == "text":
        return {"type": "text"}
    if made["type"] == "json_object":
        return {"type": "json_object"}
    return (
        {"type": "json_schema", "json_schema": found} if found is not None else {"type": "json_schema", "schema": made.get("schema") or {}}
    )


@pytest.mark.pure
@pytest.mark.parametrize("surface", BOTH)
def test_what_the_schema_allows_is_taken(surface: str) -> None:
    schema = schemas()[NAMES[surface]]

    @settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # strategies are made at the first draw
    @given(values_of(schema))
    def takes(body: dict[str, Any]) -> None:
        body = in_agreement(body, surface)
        assert allows(schema, body)
        take(body, surface)

    takes()


CALLER = Principal(tenant="t", tier=Tier(class_="premium"))


def take(body: dict[str, Any], surface: str) -> None:
    """Every check that needs no model. Raises InvalidRequest."""
    if surface == CHAT:
        chatted, _ = chat.parse_chat(body)
        ask = chat.chat_completions.common(chatted, CALLER)
    else:
        completed, _ = completions.parse_completion(body)
        ask = completions.completions.common(completed, CALLER)
    SamplingParams(**ask.sampling).checked()


@pytest.mark.pure
@pytest.mark.parametrize("surface", BOTH)
def test_what_is_just_within_a_bound_is_taken(surface: str) -> None:
    schema = schemas()[NAMES[surface]]
    num_tried = 0
    for name, field in schema["properties"].items():
        for value in edges(field):
            body = in_agreement({**BASE[surface], name: value}, surface)
            assert allows(schema, body), (name, value)
            take(body, surface)
            num_tried += 1
    assert num_tried > 100


def edges(schema: dict[str, Any]) -> Iterator[Any]:
    """Values at each bound of a schema."""
    schema = resolved(schema)
    yield from schema.get("enum", ())
    for each in schema.get("anyOf", ()):
        yield from edges(each)
    yield from (schema[bound] for bound in ("minimum", "maximum") if bound in schema)
    if "contentMediaType" not in schema:
        yield from ("x" * schema[bound] for bound in ("minLength", "maxLength") if bound in schema)
    if "items" in schema:
        yield from ([good(schema["items"])] * schema.get(bound, 1) for bound in ("minItems", "maxItems"))
        yield from ([value] for value in edges(schema["items"]))
    if "maxProperties" in schema:
        yield {str(number): good(schema["additionalProperties"]) for number in range(schema["maxProperties"])}
        yield from ({"1": value} for value in edges(schema["additionalProperties"]))
    if "properties" in schema:
        yield from ({**good(schema), name: value} for name, each in schema["properties"].items() for value in edges(each))


# ------------------------------------------------------------------------------------------------------------------- broken bounds


def wrong(schema: dict[str, Any]) -> Iterator[Any]:
    """Values one step beyond each bound of a schema, and of other types. Some may be allowed by another part of it."""
    schema = resolved(schema)
    yield from ("surely not", {"surely": "not"}, 1.5, True, [None], -(2**70))
    for each in schema.get("anyOf", ()):
        yield from wrong(each)
    if "minimum" in schema:
        yield schema["minimum"] - 1
    if "exclusiveMinimum" in schema:
        yield schema["exclusiveMinimum"]
    if "maximum" in schema:
        yield schema["maximum"] + 1
    if "minLength" in schema:
        yield ""
    if "maxLength" in schema:
        yield "x" * (schema["maxLength"] + 1)
    if "minItems" in schema:
        yield []
    if "items" in schema:
        one = good(schema["items"])
        if schema.get("maxItems", 4096) < 4096:
            yield [one] * (schema["maxItems"] + 1)
        yield from ([one, value] for value in wrong(schema["items"]) if not allows(schema["items"], value))
    if "maxProperties" in schema:
        yield {str(number): good(schema["additionalProperties"]) for number in range(schema["maxProperties"] + 1)}
        yield {"1" * 600: good(schema["additionalProperties"])}
        yield from ({"1": value} for value in wrong(schema["additionalProperties"]))
    if "properties" in schema:
        base = good(schema)
        yield {**base, "surely_not": 1}
        yield from ({key: value for key, value in base.items() if key != name} for name in schema.get("required", ()))
        yield from ({**base, name: value} for name, each in schema["properties"].items() for value in wrong(each))


def good(schema: dict[str, Any]) -> Any:
    """The plainest value of an item."""
    schema = resolved(schema)
    if "properties" in schema:
        return {name: good(schema["properties"][name]) for name in schema.get("required", ())}
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return good(schema["anyOf"][0])
    return {"string": "x", "integer": 1, "number": 1, "array": [1], "object": {}}[schema["type"]]


@pytest.mark.parametrize("surface", BOTH)
async def test_what_breaks_a_bound_is_refused_by_both(bench: TestBench, surface: str) -> None:
    """Every bound of every field, one at a time, at the running gateway."""
    schema = schemas()[NAMES[surface]]
    num_tried = 0
    for name, field in schema["properties"].items():
        values = [value for value in wrong(field) if not allows(field, value)]
        if not values and RULES[surface][name].is_any:
            continue  # any value within its bytes
        assert values, name
        for value in values:
            assert not allows(schema, {**BASE[surface], name: value})
            response = await bench.client.post(
                surface, json={**BASE[surface], **({"stream": True} if name == "stream_options" else {}), name: value}
            )
            assert response.status_code in (400, 413), (name, value, response.text)
            assert response.json()["error"]["param"].startswith(name), (name, value, response.text)
            num_tried += 1
    assert num_tried > 500
    assert not bench.replica.requests


async def test_the_schema_is_served(bench: TestBench) -> None:
    served = (await bench.client.get("/openapi.json")).json()["components"]["schemas"]
    assert served["ChatRequest"]["properties"]["messages"]["maxItems"] == 1024
    assert served["ChatRequest"]["required"] == ["messages"]
    assert served["CompletionRequest"]["required"] == ["prompt"]
