"""Tests schemas as generators write them: what is drawn from an accepted one validates, and what is refused is refused by name.

Those of pydantic are printed here, those of Zod by data/zod_schemas.mjs; data/generators.json has schemas written after other generators.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator, Draft202012Validator
from jsonschema.validators import validator_for
from pydantic_schemas import pydantic_schemas
from sampled_documents import documents

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar, GrammarKind

pytestmark = pytest.mark.pure

DATA = Path(__file__).parent / "data"
NUM_DOCUMENTS = 20
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies", "schemas")
VALUES = ("const", "enum", "default", "examples", "example", "mapping")

SCHEMAS: dict[str, Any] = {
    **pydantic_schemas(),
    **json.loads((DATA / "zod.json").read_text(encoding="utf-8")),
    **json.loads((DATA / "generators.json").read_text(encoding="utf-8")),
}

REFUSED = {
    "pydantic: Patterned": 'that is supported, got "regex". Leave it out, or use pattern. See #/properties/expression.',
    "pydantic: Sets": 'got "uniqueItems". Leave them out. See #/properties/some.',
    "pydantic: Keyed": 'got "propertyNames". Leave them out. See #/properties/by_both.',
    "a set (pydantic, OpenAPI)": '"uniqueItems"',
    "a condition (Ajv)": '"if, then"',
    "a dependency (Ajv)": '"dependentRequired"',
    "an excluded value": '"not"',
    "a regular expression (pydantic)": '"regex"',
    "an identifier of 64 bits": "integers of at most 2^53 (9007199254740992) in enum, got 1234567890123456789",
    "an inherited type without a tag (springdoc)": "a oneOf whose branches visibly exclude each other",
    "a schema elsewhere": 'a $ref to a part of the same schema, got "https://example.com/schemas/a.json"',
    "an item that is somewhere in a list": '"contains"',
}


def grammar(schema: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def children(schema: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for keyword, value in schema.items():
        if keyword in MAPS and isinstance(value, dict):
            found += value.values()
        elif keyword not in VALUES:
            found += value if isinstance(value, list) else [value]
    return found


def keywords(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    return set(schema).union(*map(keywords, children(schema)))


def as_draft_7(schema: Any) -> Any:
    """OpenAPI 3.0's own spellings as JSON Schema has them."""
    if isinstance(schema, list):
        return [as_draft_7(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {keyword: as_draft_7(value) for keyword, value in schema.items()}
    if found.pop("nullable", False) is True and "type" in found:
        found["type"] = [found["type"], "null"]
    for inclusive, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(found.get(exclusive), bool) and found.pop(exclusive):
            found[exclusive] = found.pop(inclusive)
    return found


def validator(name: str, schema: Any) -> Any:
    """A validator of the schema as it was sent, by the draft that it names. OpenAPI 3.0 has none here: of its translation."""
    if "OpenAPI 3.0" in name:
        return Draft7Validator(as_draft_7(schema), format_checker=Draft7Validator.FORMAT_CHECKER)
    found = validator_for(schema, default=Draft202012Validator)
    return found(schema, format_checker=found.FORMAT_CHECKER)


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name not in REFUSED])
def test_what_is_drawn_from_an_accepted_schema_validates(name: str) -> None:
    judge = validator(name, SCHEMAS[name])
    for text in documents(grammar(SCHEMAS[name]), NUM_DOCUMENTS):
        judge.validate(json.loads(text))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        next(documents(grammar(SCHEMAS[name]), 1))
    assert REFUSED[name] in str(refused.value)


def test_the_schemas_differ_in_their_keywords() -> None:
    name_of: dict[frozenset[str], str] = {}
    for name, schema in SCHEMAS.items():
        assert name_of.setdefault(frozenset(keywords(schema)), name) == name
    assert sum(name.startswith("pydantic") for name in SCHEMAS) >= 15
    assert sum(name.startswith("zod") for name in SCHEMAS) >= 10
