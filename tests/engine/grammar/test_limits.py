"""Tests that a grammar that counts further than a lexer has states is refused by name on arrival, and that nothing else is taken for a
count.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from grammar_kit import lark, regex, schema

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar
from headrace.engine.grammar.sources import llguidance_source

pytestmark = pytest.mark.pure


def nested(leaf: dict[str, Any]) -> Grammar:
    return schema(json.dumps({"type": "object", "properties": {"a": {"type": "array", "items": leaf}}}))


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (nested({"type": "string", "maxLength": 7001}), "maxLength of at most 7000, got 7001"),
        (nested({"type": "string", "minLength": 10**30}), "minLength of at most 7000"),
        (nested({"type": "string", "pattern": "^[a-z]{1,8000}$"}), 'counts of at most 7000 in a regular expression, got "8000"'),
        (nested({"patternProperties": {"^x{9000}$": {}}}), '"9000"'),
        (regex(".{1,20000}"), '"20000"'),
        (regex(".{9000,}"), '"9000"'),
        (regex("a{" + "9" * 5000 + "}"), '"99999"'),
        (lark('start: A "x"\nA: /[a-z]{1,7001}/'), '"7001"'),
        (lark('start: "call" %json {"properties":{"a":{"maxLength":8000}}} "end"'), "maxLength of at most 7000, got 8000"),
    ],
)
def test_a_count_beyond_the_lexers_states_is_refused_with_its_limit_and_its_value(grammar: Grammar, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        llguidance_source(grammar, {})
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "grammar",
    [
        nested({"type": "string", "maxLength": 7000, "pattern": r"\{9000}[{9000}]x{00007}"}),
        nested({"const": {"maxLength": 9000}, "enum": [{"pattern": "x{9000}"}], "default": {"minLength": 9000}}),
        nested({"properties": {"maxLength": {"type": "integer", "maximum": 9000}}, "maxItems": 9000}),
        regex(r"\{9000\}[^]{9000}]a{1,7000}"),
        lark('start: "{9000}" item{1,9000}\nitem: "x"'),
        lark('start: "%json {" %json {"maxLength":7000'),
    ],
)
def test_what_only_looks_like_a_count_is_let_pass(grammar: Grammar) -> None:
    llguidance_source(grammar, {})
