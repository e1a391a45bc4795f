"""Tests that vLLM's `StructuredOutputsParams`, as programs write them, become grammars."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import pytest

from headrace import StructuredOutputsParams as Outputs
from headrace.core.errors import InvalidRequest
from headrace.core.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams

pytestmark = pytest.mark.pure

SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}, "b": {}}, "required": ["größe"]}


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        (Outputs(json=SCHEMA), Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA, ensure_ascii=False, separators=(",", ":")))),
        (Outputs(json='{"type": "string"}'), Grammar(GrammarKind.JSON_SCHEMA, '{"type": "string"}')),
        (Outputs(json={}), Grammar(GrammarKind.JSON_SCHEMA, "{}")),
        (Outputs(regex="a+"), Grammar(GrammarKind.REGEX, "a+")),
        (Outputs(choice=["yes", 'say "no"']), Grammar.choice(["yes", 'say "no"'])),
        (Outputs(grammar="start: /a+/"), Grammar(GrammarKind.LARK, "start: /a+/")),
        (Outputs(grammar='root ::= "a" | "b"'), Grammar.ebnf('root ::= "a" | "b"')),
        (Outputs(json_object=True), Grammar.json_object()),
        (Outputs(json_object=False, regex="a"), Grammar(GrammarKind.REGEX, "a")),
    ],
    ids=lambda value: "" if isinstance(value, Grammar) else value.kind,
)
def test_each_form_becomes_a_grammar(given: Outputs, grammar: Grammar) -> None:
    assert given.as_grammar() == grammar


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ({}, "structured_outputs", "exactly one of json, regex"),
        ({"json_object": False}, "structured_outputs", "exactly one"),
        ({"json": {}, "regex": "a"}, "structured_outputs", "exactly one"),
        ({"json": 5}, "structured_outputs.json", "a mapping or as JSON text"),
        ({"json": {"a": {1}}}, "structured_outputs.json", "can be written as JSON"),
        ({"json": {"a": float("nan")}}, "structured_outputs.json", "can be written as JSON"),
        ({"json": " "}, "structured_outputs.json", "non-empty"),
        ({"json": "x" * (MAX_GRAMMAR_BYTES + 1)}, "structured_outputs.json", f"at most {MAX_GRAMMAR_BYTES} bytes"),
        ({"regex": 5}, "structured_outputs.regex", "a text"),
        ({"grammar": b"x"}, "structured_outputs.grammar", "a text"),
        ({"grammar": 'root ::= "a'}, "structured_outputs.grammar", "GBNF"),
        ({"choice": []}, "structured_outputs.choice", "at least one"),
        ({"choice": ["a", ""]}, "structured_outputs.choice", "none of them empty"),
        ({"choice": "ab"}, "structured_outputs.choice", "a list of texts"),
        ({"choice": ["a", 1]}, "structured_outputs.choice", "a list of texts"),
        ({"json_object": 1}, "structured_outputs.json_object", "True"),
        ({"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern", "not supported"),
        ({"regex": "a", "disable_any_whitespace": True}, "structured_outputs.disable_any_whitespace", "not supported"),
        ({"json": {}, "disable_additional_properties": True}, "structured_outputs.disable_additional_properties", "into the schema"),
        ({"structural_tag": "{}"}, "structured_outputs.structural_tag", "Give a grammar"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        Outputs(**given).as_grammar()
    assert caught.value.field == field


def test_a_mapping_that_is_no_dict_is_a_schema_all_the_same() -> None:
    assert Outputs(json=MappingProxyType({"type": "string"})).as_grammar().source == '{"type":"string"}'


def test_sampling_params_hold_them_and_say_what_does_not_go_beside_them() -> None:
    SamplingParams(structured_outputs=Outputs(regex="a")).checked()
    with pytest.raises(InvalidRequest, match=r"structured_outputs: expected headrace\.StructuredOutputsParams, got .*dict"):
        SamplingParams(structured_outputs={"regex": "a"}).checked()  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="ignore_eos: expected False with structured_outputs"):
        SamplingParams(structured_outputs=Outputs(regex="a"), ignore_eos=True).checked()


def test_an_engine_takes_the_grammar_alone() -> None:
    params = SamplingParams(seed=1, structured_outputs=Outputs(regex="a"))
    with pytest.raises(InvalidRequest, match="structured_outputs: expected none in an engine's parameters"):
        EngineRequest(request_id=RequestId("r"), prompt_ids=(1,), params=params).checked(vocab_size=9, max_model_len=9)
