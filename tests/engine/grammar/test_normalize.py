"""Tests, rule by rule, how a JSON schema is normalized before the grammar library reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from grammar_kit import lark, matches
from grammar_kit import schema as grammar_of

from headrace.core.errors import InvalidRequest
from headrace.engine.grammar.normalize import MAX_WRITTEN, normalized
from headrace.engine.grammar.sources import llguidance_source, read_schema

pytestmark = pytest.mark.pure

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
LIST = {"type": "array", "items": {"type": "integer"}, "maxItems": 2}
TEXT = {"type": "string"}
NUMBER = {"type": "number"}

NAMES: list[Any] = [{}, True, TEXT, {"type": ["string", "null"]}, {"minLength": 0}, {"maximum": 3}]
IDLE_DEPENDENCIES: list[dict[str, Any]] = [{"a": []}, {"a": {}}, {"a": True, "b": {"title": "x"}}]

WITHOUT_EFFECT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *((OBJECT, {"propertyNames": rule}) for rule in NAMES),
    *((OBJECT, {name: {}}) for name in ("dependentRequired", "dependentSchemas", "dependencies", "patternProperties")),
    *((OBJECT, {"dependencies": rule}) for rule in IDLE_DEPENDENCIES),
    (OBJECT, {"dependentRequired": {"a": []}, "dependentSchemas": {"a": {"description": "x"}}}),
    (OBJECT, {"unevaluatedProperties": True, "minProperties": 0}),
    (OBJECT, {"unevaluatedProperties": {}, "minProperties": 1, "maxProperties": 1}),
    (LIST, {"uniqueItems": False, "minItems": 0, "minContains": 2, "maxContains": 3}),
    (LIST, {"contains": TEXT, "minContains": 0}),
    (LIST, {"unevaluatedItems": True, "additionalItems": False}),
    (LIST, {"prefixItems": []}),
    (TEXT, {"minLength": 0, "maxLength": 2147483647, "minimum": 5, "items": {"type": "null"}, "required": ["a"]}),
    (TEXT, {"then": {"minLength": 5}, "else": {"maxLength": 1}}),
    (TEXT, {"if": {"maxLength": 5}}),
    (TEXT, {"if": {"maxLength": 5}, "then": {}, "else": True}),
    (TEXT, {"not": False}),
    (TEXT, {"not": {"not": {}}}),
    (TEXT, {"allOf": []}),
    (TEXT, {"allOf": [{}, True, {"title": "x"}], "anyOf": [{"type": "null"}, {}], "oneOf": [{"$comment": "x"}]}),
    (TEXT, {"nullable": False, "deprecated": True, "readOnly": True, "writeOnly": False, "$comment": "", "examples": [1], "default": None}),
    (TEXT, {"discriminator": {"propertyName": "x"}, "xml": {}, "externalDocs": {"url": "x"}, "example": 1, "x-order": 1, "title": "x"}),
    (TEXT, {"contentEncoding": "base64", "contentMediaType": "text/plain", "contentSchema": {"uniqueItems": True}}),
    (TEXT, {"$id": "https://example.com/a", "$schema": "https://json-schema.org/draft/2020-12/schema", "$anchor": "a", "$vocabulary": {}}),
    (TEXT, {"$defs": {"a": {"uniqueItems": True}}, "definitions": {"b": {"type": "any"}}, "id": "a"}),
    (TEXT, {"required": False}),
    (NUMBER, {"exclusiveMinimum": False, "exclusiveMaximum": True, "maxLength": 9}),
]


@pytest.mark.parametrize(("schema", "idle"), WITHOUT_EFFECT, ids=[json.dumps(idle) for _, idle in WITHOUT_EFFECT])
def test_what_has_no_effect_goes(schema: dict[str, Any], idle: dict[str, Any]) -> None:
    assert normalized({**schema, **idle}) == normalized(schema)
    assert normalized({**idle, **schema}) == normalized(schema)
    assert normalized({"properties": {"p": {**schema, **idle}}}) == {"properties": {"p": schema}}


NOTES = [
    *("path", "file-path", "directory-path", "binary", "byte", "password", "json-string", "ipvanyaddress", "url", "uuid4", "decimal"),
    *("base64", "text", "color", "phone", "datetime", "ipv4network", "multi-host-uri", "int32", "int64", "float", "double", "cidrv4"),
    *("nanoid", "e164", "jwt", "emoji", "style", "utc-millisec", "host-name", "ip-address"),
]


@pytest.mark.parametrize("name", NOTES)
def test_a_format_that_json_schema_does_not_define_is_an_annotation(name: str) -> None:
    assert normalized({**TEXT, "format": name}) == TEXT
    assert normalized({"type": ["integer", "string"], "format": name}) == {"type": ["integer", "string"]}


def test_a_format_that_the_library_has_is_enforced_but_for_listed_values() -> None:
    assert normalized({**TEXT, "format": "date"}) == {**TEXT, "format": "date"}
    assert normalized({**TEXT, "format": "date", "enum": ["today"]}) == {"enum": ["today"]}
    assert normalized({"type": "integer", "format": "date"}) == {"type": "integer"}


REWRITTEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"minimum": 0, "exclusiveMinimum": True, "type": "integer"}, {"exclusiveMinimum": 0, "type": "integer"}),
    ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
    ({"type": "string", "nullable": True, "enum": ["a"]}, {"enum": ["a"]}),
    ({"type": "string", "nullable": True, "enum": ["a", None]}, {"enum": ["a", None]}),
    ({"nullable": True, "allOf": [TEXT]}, {"allOf": [TEXT]}),
    ({"type": ["string", "string"]}, {"type": "string"}),
    ({"type": ["null", "boolean", "object", "array", "number", "string"], "minLength": 1}, {"minLength": 1}),
    ({"type": "integer", "enum": [1, 1.5, "a", True, 1, 2]}, {"enum": [1, 2]}),
    ({"enum": [1, True, "1", [1], [1], {"a": 1}, {"a": 1}]}, {"enum": [1, True, "1", [1], {"a": 1}]}),
    ({"type": "string", "const": "ab", "minLength": 2}, {"const": "ab"}),
    ({"enum": [1, 5, 9], "minimum": 2, "exclusiveMaximum": 9}, {"enum": [5]}),
    ({"enum": [{"a": 1}, {"b": 1}], "required": ["a"]}, {"enum": [{"a": 1}]}),
    ({"items": [TEXT, {}], "additionalItems": False}, {"prefixItems": [TEXT, True], "items": False}),
    ({"items": [TEXT], "maxItems": 2}, {"prefixItems": [TEXT], "maxItems": 2}),
    ({"type": "array", "contains": {}, "minContains": 2, "maxContains": 4, "minItems": 1}, {"type": "array", "minItems": 2, "maxItems": 4}),
    ({"type": "array", "contains": True}, {"type": "array", "minItems": 1}),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, {"type": "array", "maxItems": 1}),
    ({"not": {"not": TEXT}}, {"allOf": [TEXT]}),
    ({"not": {"type": "null"}, "type": ["null", "string"]}, TEXT),
    ({"not": {"type": ["number", "null", "boolean", "object"]}}, {"type": ["array", "string"]}),
    (
        {"properties": {"never": {"not": {}}}, "additionalProperties": {"not": True}},
        {"properties": {"never": False}, "additionalProperties": False},
    ),
    ({"if": {}, "then": TEXT, "else": NUMBER}, {"allOf": [TEXT]}),
    ({"if": False, "then": TEXT, "else": NUMBER}, {"allOf": [NUMBER]}),
    ({"required": ["b", "a", "b"]}, {"required": ["b", "a"]}),
    ({"allOf": [{"$ref": "#/$defs/t"}], "default": "x", "$defs": {"t": TEXT}}, {"$ref": "#/$defs/t", "$defs": {"t": TEXT}}),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b", 1]}, "properties": {"c": {}, "b": TEXT}, "additionalProperties": True},
        {"type": "object", "properties": {"c": False, "b": TEXT, "a": True}, "additionalProperties": False},
    ),
    (
        {"propertyNames": {"$ref": "#/$defs/n"}, "additionalProperties": NUMBER, "$defs": {"n": {"enum": ["x", "y"]}}},
        {
            "properties": {"x": {"$ref": "#/$defs/values"}, "y": {"$ref": "#/$defs/values"}},
            "additionalProperties": False,
            "$defs": {"values": NUMBER},
        },
    ),
    (
        {"propertyNames": {"pattern": "^x"}, "additionalProperties": TEXT},
        {"patternProperties": {"^x": TEXT}, "additionalProperties": False},
    ),
    (
        {"propertyNames": {"minLength": 1, "maxLength": 3}, "maxProperties": 2},
        {"maxProperties": 2, "patternProperties": {"^(?s:.{1,3})$": True}, "additionalProperties": False},
    ),
    ({**OBJECT, "additionalProperties": {}, "unevaluatedProperties": False}, {**OBJECT, "additionalProperties": True}),
    (
        {"allOf": [OBJECT | {"additionalProperties": True}], "unevaluatedProperties": False},
        {"allOf": [OBJECT | {"additionalProperties": True}]},
    ),
    (
        {
            "type": "object",
            "properties": {"b": {}},
            "allOf": [{"properties": {"a": TEXT, "b": TEXT}}],
            "unevaluatedProperties": {"not": {}},
        },
        {
            "type": "object",
            "properties": {"b": True, "a": True},
            "allOf": [{"properties": {"a": TEXT, "b": TEXT}}],
            "additionalProperties": False,
        },
    ),
    (
        {"prefixItems": [{}], "allOf": [{"prefixItems": [TEXT, TEXT]}], "unevaluatedItems": False},
        {"prefixItems": [True, True], "allOf": [{"prefixItems": [TEXT, TEXT]}], "items": False},
    ),
]


@pytest.mark.parametrize(("schema", "written"), REWRITTEN, ids=[json.dumps(schema) for schema, _ in REWRITTEN])
def test_what_the_library_cannot_hold_is_rewritten_where_that_says_the_same(schema: dict[str, Any], written: dict[str, Any]) -> None:
    assert normalized(schema) == written


DRAFT_7 = "http://json-schema.org/draft-07/schema#"

REFUSED: list[tuple[Any, str]] = [
    ({"properties": {"v": {"uniqueItems": True}}}, 'that are supported, got "uniqueItems". Leave them out. See #/properties/v.'),
    ({"items": {"if": TEXT, "else": {"minLength": 1}}}, 'got "if, else". Leave them out. See #/items.'),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"contains": TEXT}}}, 'got "contains". Leave them out. See #/$defs/a.'),
    ({"properties": {"a/b": {"not": {"enum": [1]}}}}, 'got "not". Leave them out. See #/properties/a~1b.'),
    ({"dependencies": {"a": [], "b": ["c"]}}, '"dependencies"'),
    ({"propertyNames": {"pattern": "^a", "maxLength": 3}}, '"propertyNames"'),
    ({"propertyNames": {"enum": ["a", "b"], "pattern": "^a"}}, '"propertyNames"'),
    ({"propertyNames": {"pattern": "^a"}, "properties": {"a": {}}}, '"propertyNames"'),
    ({"oneOf": [OBJECT, TEXT], "unevaluatedProperties": False}, '"unevaluatedProperties"'),
    ({"if": {"properties": {"a": {}}}, "unevaluatedProperties": False}, '"unevaluatedProperties"'),
    ({"not": {"type": "integer"}}, '"not"'),
    ({**TEXT, "format": "iri"}, 'a format of JSON Schema that is supported, got "iri". Leave it out, or use pattern.'),
    ({**TEXT, "format": 5}, "a text in format, got 5"),
    ({"properties": {"v": {"type": "any"}}}, 'string, got "any". Leave it out for any type. See #/properties/v/type.'),
    ({"type": []}, "a type of JSON Schema"),
    (
        {"properties": {"v": {**TEXT, "required": True}}},
        "got true. List the property's name in required of its object. See #/properties/v/required.",
    ),
    ({"required": "a"}, 'a list of names in required, got "a"'),
    ({"enum": []}, "a list of at least one value in enum, got []"),
    ({"anyOf": []}, "a list of at least one schema in anyOf, got []"),
    ({"properties": {"v": 5}}, "a schema: an object, true or false, got 5. See #/properties/v."),
    ({"items": None}, "true or false, got null. See #/items."),
    ({"minLength": "3"}, 'a whole number of at least 0 in minLength, got "3". See #/minLength.'),
    ({"maxItems": -1}, "a whole number of at least 0 in maxItems, got -1"),
    ({"maximum": "3"}, 'a number in maximum, got "3"'),
    ({"multipleOf": 0}, "a number above 0 in multipleOf, got 0"),
    ({"properties": []}, "an object in properties, got []"),
    ({"prefixItems": {}}, "a list of schemas in prefixItems, got {}"),
    ({"pattern": ["a"]}, 'a regular expression as a text in pattern, got ["a"]'),
    ({"properties": {"v": {"pattern": "a(?=b)"}}}, "whose look-around stands directly after ^, got"),
    ({"patternProperties": {"\\bx": {}}}, "a pattern without word boundaries"),
    ({"not": {}, "title": "x"}, 'a JSON schema that a value can satisfy, got "not". Together they exclude every value. See #.'),
    ({"type": "integer", "const": "a"}, 'a JSON schema that a value can satisfy, got "type, const"'),
    ({"$schema": DRAFT_7, "items": {"contains": TEXT, "minContains": 0}}, 'got "contains". Leave them out. See #/items.'),
    ({"minProperties": 2}, "minProperties of at most 1, one more than required lists, where other names are free, got 2. "),
    ({"properties": {"v": {"required": ["a"], "minProperties": 3}}}, "of at most 2, one more than required lists, where other names"),
    ({"patternProperties": {"^x": {}}, "additionalProperties": False, "minProperties": 2}, "beside it, or leave it out. See #/minProp"),
    ({"type": "integer", "allOf": [{"multipleOf": 99991}, {"multipleOf": 65537}]}, "whose product is at most 4294967295"),
]


@pytest.mark.parametrize(("schema", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_enforced_is_refused_with_keyword_value_place_and_remedy(schema: Any, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        normalized(schema)
    assert refused.value.field == "grammar"
    assert said in str(refused.value)


def test_a_definition_that_nothing_refers_to_refuses_nothing() -> None:
    assert normalized({**TEXT, "$defs": {"a": {"type": "any"}, "b": {"$ref": "#/missing"}}}) == TEXT


def test_properties_keep_their_order_and_keywords_theirs() -> None:
    schema = {"required": ["z"], "properties": {"z": {}, "a": {"oneOf": [{"type": "null"}, NUMBER]}, "m": TEXT}, "type": "object"}
    assert json.dumps(normalized(schema)) == (
        '{"required": ["z"], "properties": {"z": true, "a": {"anyOf": [{"type": "null"}, {"type": "number"}]}, "m": {"type": "string"}}, '
        '"type": "object"}'
    )
    both = {"properties": {"q": {}}, "allOf": [{"properties": {"b": {}}}], "$ref": "#/$defs/t", "$defs": {"t": {"properties": {"a": {}}}}}
    assert matches(grammar_of(json.dumps(both)), '{"q":1,"b":2,"a":3}')
    assert not matches(grammar_of(json.dumps(both)), '{"a":3,"q":1,"b":2}')


def test_properties_may_have_the_names_of_keywords() -> None:
    properties = {"$ref": TEXT, "enum": {"$ref": "#/properties/default"}, "default": {"type": "null"}, "const": {**TEXT, "x": 1}, "$id": {}}
    found = normalized({"properties": properties, "required": ["$id"]})
    null = {"type": "null"}
    assert found["properties"] == {"$ref": TEXT, "enum": {"$ref": "#/$defs/default"}, "default": null, "const": TEXT, "$id": True}
    assert found["$defs"] == {"default": null}


def test_additional_items_count_from_their_own_items_beside_all_of() -> None:
    schema = grammar_of('{"type":"array","allOf":[{"items":[{"type":"integer"},{"type":"integer"}]}],"items":[{}],"additionalItems":false}')
    assert matches(schema, "[1]")
    assert not matches(schema, "[1,2]")


RECURSIVE: list[tuple[dict[str, Any], str]] = [
    ({"type": "object", "properties": {"n": {"$ref": "#", "type": "object"}}, "additionalProperties": False}, '{"n":{"n":{} } }'),
    (
        {
            "$ref": "#/$defs/pet",
            "$defs": {
                "pet": {"type": "object", "properties": {"a": {"$ref": "#/$defs/cat"}}},
                "cat": {"allOf": [{"$ref": "#/$defs/pet"}, {"required": ["b"]}]},
            },
        },
        '{"a":{"a":{"b":2},"b":1} }',
    ),
    (
        {"type": "object", "properties": {"left": {"oneOf": [{"type": "null"}, {"$ref": "#"}]}}, "required": ["left"]},
        '{"left":{"left":null} }',
    ),
    (
        {"type": "array", "items": {"anyOf": [{"$ref": "#"}, {"type": "null"}], "minItems": 1}},
        "[[[null]],null]",
    ),
]


@pytest.mark.parametrize(("schema", "document"), RECURSIVE, ids=[document for _, document in RECURSIVE])
def test_a_schema_recurs_where_it_combines_its_references_too(schema: dict[str, Any], document: str) -> None:
    assert matches(grammar_of(json.dumps(schema)), document)


def test_a_name_that_stands_twice_counts_once() -> None:
    """Of one name more than required lists, another one is certain: a required name is not written twice."""
    for schema in ({"minProperties": 1}, {"required": ["a"], "minProperties": 2}):
        bound = grammar_of(json.dumps({"type": "object", "additionalProperties": {"type": "integer"}, **schema}))
        assert matches(bound, '{"a":1,"b":2}')
        assert not matches(bound, "{}")
        assert "required" not in schema or not matches(bound, '{"a":1,"a":2}')


def test_the_result_is_bounded_however_often_definitions_are_combined() -> None:
    pairs = {f"d{number}": {"allOf": [{"$ref": f"#/$defs/d{number + 1}"}, {"$ref": f"#/$defs/e{number + 1}"}]} for number in range(30)}
    others = {f"e{number}": {"allOf": [{"$ref": f"#/$defs/d{number + 1}"}, {"maxProperties": number}]} for number in range(1, 30)}
    last = {"d30": {"properties": {"again": {"$ref": "#"}}}, "e30": {"type": "object"}}
    written = normalized({"$ref": "#/$defs/d0", "$defs": {**pairs, **others, **last}})
    assert json.dumps(written).count('"') < 16 * MAX_WRITTEN


def test_long_chains_of_references_are_followed() -> None:
    chain: dict[str, Any] = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(5_000)}
    assert normalized({"$ref": "#/$defs/d0", "$defs": {**chain, "d5000": TEXT}}) == TEXT
    combined = {name: {**rule, "maxLength": 5} for name, rule in chain.items()}
    assert len(normalized({"$ref": "#/$defs/d0", "$defs": {**combined, "d5000": TEXT}})["$defs"]) == 5_000


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ('start: "x" %json {"type":"string","format":"path"} "y"', 'start: "x" %json {"type": "string"} "y"'),
        ('start: %json\n{"title":"x"}|%json {"minLength":0}', "start: %json\n{}|%json {}"),
        ('start: "%json {  }" /%json {  }/ // %json {  }', 'start: "%json {  }" /%json {  }/ // %json {  }'),
        ('start: %json {"x": } # %json {  }', 'start: %json {"x": } # %json {  }'),
        ('start: "a\\"%json {  }"', 'start: "a\\"%json {  }"'),
        ('start: %json {"x-guidance":{"whitespace_flexible":false},"title":"x","type":"null"}', None),
    ],
)
def test_schemas_within_a_lark_source_are_normalized_and_nothing_else(source: str, written: str | None) -> None:
    expected = 'start: %json {"type": "null", "x-guidance": {"whitespace_flexible": false}}' if written is None else written
    assert json.loads(llguidance_source(lark(source), {}))["grammars"][1]["lark_grammar"] == expected


def test_a_schema_within_a_lark_source_is_refused_as_one_alone_is() -> None:
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        llguidance_source(lark('start: "x" %json {"properties":{"v":{"uniqueItems":true}}}'), {})
    with pytest.raises(InvalidRequest, match="at most 64 levels"):
        llguidance_source(lark("start: %json " + '{"items":' * 65 + "{}" + "}" * 65), {})


def test_numbers_are_read_exactly() -> None:
    text = '{"a":1.0,"b":1e3,"c":-0.0,"d":9007199254740993.0,"e":1234567890123456789012,"f":0.1,"g":1e-400,"h":-1.5e2}'
    read = read_schema(text)
    assert read == {"a": 1, "b": 1000, "c": 0, "d": 9007199254740993, "e": 1234567890123456789012, "f": 0.1, "g": 0, "h": -150}
    assert [type(value) for value in read.values()] == [int, int, int, int, int, float, int, int]
    for digits in ("1e400", "-1e999999999999"):
        with pytest.raises(InvalidRequest, match="numbers that a 64-bit float can hold, got"):
            read_schema(f'{{"const":{digits}}}')
